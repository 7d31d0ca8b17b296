"""What one request may not do to an engine, over real HTTP: each is refused by name, and the engine goes on."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_server import PROMPT, Server, threaded
from shoal.engine.server.protocol import MOST_LISTS
from shoal.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, MOST_TOP_K, Sampling


@pytest.fixture(scope="module")
def server(tiny_model_dir: Path) -> Iterator[Server]:
    with threaded(tiny_model_dir, "--max-running", "4") as found:
        yield found


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({"top_k": 2**31}, "top_k: expected 0 (off) to 2147483647, got 2147483648"),
        ({"top_k": 2**63}, "top_k: expected 0 (off) to 2147483647, got 9223372036854775808"),
        ({"temperature": 1e-39}, "temperature: expected 0 (greedy) or a number from 1e-05 to 100000, got 1e-39"),
        ({"temperature": 1e300}, "temperature: expected 0 (greedy) or a number from 1e-05 to 100000, got 1e+300"),
        ({"min_p": 2}, "min_p: expected a number in [0, 1), got 2"),
    ],
)
def test_numbers_that_cannot_be_computed_with_are_refused_by_name(
    server: Server, params: dict[str, float], words: str
) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 2, **params}}
    status, answer = server.ask("/inference/v1/generate", body)
    assert (status, words in answer["error"]["message"]) == (400, True)
    assert server.ask("/health") == (200, {"status": "ok"})


def test_numbers_at_their_bounds_are_answered_with_finite_logprobs(server: Server) -> None:
    samplings = [
        Sampling(3, temperature=LOWEST_TEMPERATURE),
        Sampling(3, temperature=HIGHEST_TEMPERATURE),
        Sampling(3, temperature=LOWEST_TEMPERATURE, top_k=MOST_TOP_K, top_p=5e-324, min_p=5e-324),
        Sampling(3, temperature=HIGHEST_TEMPERATURE, top_k=1, top_p=1 - 2**-53, min_p=1 - 2**-53),
        Sampling(10**400, seed=-(10**400), stop_token_ids=(10**400, -1)),
        Sampling(3, temperature=0, top_k=MOST_TOP_K),
    ]

    async def ask() -> None:
        async with server.engine() as engine, asyncio.TaskGroup() as tasks:
            for sampling in samplings:  # a completion of other than finite logprobs is a ValueError
                tasks.create_task(engine.generate(PROMPT, sampling, n=2, priority=10**400))

    asyncio.run(ask())
    body = {"token_ids": PROMPT, "sampling_params": {"temperature": LOWEST_TEMPERATURE, "top_p": 0.5}}
    assert server.ask("/inference/v1/generate", body)[0] == 200


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"path": "a\0b"}, "cannot be read: embedded null byte"),
        ({"path": "/" + "a" * 5000}, "expected a path below"),
        ({"path": "below-the-model/" + "a" * 5000}, "cannot be read: [Errno 36] File name too long"),
        ({"version": 2**63}, "Expected `int` <= 9223372036854775807 - at `$.version`"),
    ],
)
def test_an_update_that_names_no_file_or_version_is_refused(
    server: Server, tiny_model_dir: Path, change: dict[str, object], words: str
) -> None:
    if (path := str(change.get("path", ""))).startswith("below-the-model"):
        change = {"path": f"{tiny_model_dir}/{path}"}
    status, answer = server.ask("/update_weights", {"version": 1, "path": str(tiny_model_dir), **change})
    assert (status, words in answer["error"]["message"]) == (400, True)
    assert server.ask("/weight_info")[1]["version"] == 0


def test_a_body_nested_beyond_measure_is_refused(server: Server) -> None:
    raw = b'{"token_ids": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    assert server.ask("/score", raw=raw)[0] == 400


@pytest.mark.parametrize(
    ("lists", "words"), [(MOST_LISTS, "others: expected"), (MOST_LISTS + 1, "body: expected at most")]
)
def test_more_lists_than_a_score_may_have_are_refused_before_they_are_made(
    server: Server, lists: int, words: str
) -> None:
    others = b",".join([b"[]"] * (lists - 2))  # the other two are their list and that of the tokens
    raw = b'{"token_ids": [1, 2], "others": [' + others + b"]}"
    status, answer = server.ask("/score", raw=raw)
    assert (status, words in answer["error"]["message"]) == (400, True)
    if lists > MOST_LISTS:
        for route in ("/stream", "/inference/v1/generate"):
            status, answer = server.ask(route, raw=raw)
            assert (status, words in answer["error"]["message"]) == (400, True)
