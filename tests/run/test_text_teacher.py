"""A teacher at a URL reinforces each sampled token by text, whatever tokenizer it has."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.config import parse
from shoal.config.training import TrainConfig
from shoal.errors import ConfigError, EngineUnavailable
from shoal.model.renderer_loading import load_renderer
from shoal.run.teacher import KEY_VARIABLE, MOST_NATS, ends_in, text_teacher
from shoal.types import Sample
from stub_server import Stub, stubbed
from train_runs import start


async def taught(spelt: list[str], logprobs: list[float | None], directory: Path) -> list[tuple[float, ...]]:
    """Advantages of the row `a b c <stop>`, whose first token is the prompt, under a teacher with these tokens."""
    renderer = load_renderer(directory)
    said = [renderer.token_ids(letter)[0] for letter in "abc"]
    row = Sample((*said, renderer.stop_token_ids[0]), (0, 1, 1, 1), (0.0, -1.0, -1.0, -0.5), (-1, 0, 0, 0), (7.0,) * 4)
    echo = {"choices": [{"logprobs": {"tokens": spelt, "token_logprobs": logprobs}}]}
    stub = Stub({"/v1/models": (200, b'{"data": [{"id": "teacher"}]}')})
    stub.answers["/v1/completions"] = 200, json.dumps(echo).encode()
    async with stubbed(stub) as url, text_teacher(TrainConfig(teacher=f"{url}/v1"), renderer) as teacher:
        assert teacher is not None
        return [found.advantages for (found,) in await teacher.taught([(row,)])]


def asked(spelt: list[str], logprobs: list[float | None], directory: Path) -> list[tuple[float, ...]]:
    return asyncio.run(taught(spelt, logprobs, directory))


def test_a_span_gets_what_the_teacher_says_of_it_and_what_it_cannot_spell_gets_nothing(
    tiny_model_dir: Path,
) -> None:
    renderer = load_renderer(tiny_model_dir)
    stop = renderer.token_bytes(renderer.stop_token_ids[0]).decode()
    same = asked(["a", "b", "c", stop], [None, -0.5, -3.0, -0.25], tiny_model_dir)
    assert same == [(0.0, 0.5, -2.0, 0.25)]
    begun = asked(["<s>", "a", "bc", stop], [None, -9.0, -1.0, -1e9], tiny_model_dir)
    assert begun == [(0.0, 1.0, 1.0, -MOST_NATS)]
    over = asked(["ab", "c", stop[:2], stop[2:]], [-2.0, -1.0, -8.0, -8.0], tiny_model_dir)
    assert over == [(0.0, 0.0, 0.0, 0.0)]  # a span with the prompt's end, an equal logprob, a stop that it has not
    other = asked(["a", "x", "c", stop], [-2.0, -1.0, -8.0, -8.0], tiny_model_dir)
    assert other == [(0.0,) * 4]


def test_a_character_of_several_tokens_leaves_the_other_tokens_taught(tiny_model_dir: Path) -> None:
    text = "x\N{TROPICAL FISH}y"
    pieces = ["x", "\ufffd", "", "\ufffd", "y"]
    assert ends_in(text, pieces, [-1.0, -2.0, -3.0, -4.0, -5.0]) == [(1, -1.0), (5, -9.0), (6, -5.0)]
    assert ends_in("ab", ["a", "\ufffd", "c"], [-1.0] * 3) is None
    one_fish_or_two = ["\ufffd", "\ufffd", "\N{TROPICAL FISH}"]
    assert ends_in("\N{TROPICAL FISH}" * 3, one_fish_or_two, [-1.0] * 3) is None


@given(st.text("ab\n\u00e9\u65e5\N{TROPICAL FISH}", min_size=1, max_size=12), st.data())
def test_tokens_that_cut_characters_anywhere_never_get_another_span_s_logprob(text: str, data: st.DataObject) -> None:
    spelt = text.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, max(len(spelt) - 1, 1)))))
    bounds = [0, *(cut for cut in cuts if cut < len(spelt)), len(spelt)]
    pieces = [spelt[a:b].decode(errors="replace") for a, b in pairwise(bounds)]
    found = ends_in(text, pieces, [-(2.0**-i) for i in range(len(pieces))])
    begin = 0
    for end, logprob in found or []:
        tokens = range(bounds.index(begin), bounds.index(end))
        assert logprob == -sum(2.0**-i for i in tokens)
        begin = end


@pytest.mark.timeout(400)
def test_a_run_whose_teacher_is_itself_behind_a_url_learns_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli", "serve", "--model", str(tiny_model_dir), "--port", "0"]
    key = {**os.environ, "SHOAL_ADMIN_KEY": "secret"}
    with subprocess.Popen([*command, "--host", "127.1"], stdout=subprocess.PIPE, text=True, env=key) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            settings = (f"--train.teacher={url}", "--train.steps=2", "--train.lr=1e-9")
            run = start(tmp_path, tiny_model_dir, *settings, **{KEY_VARIABLE: "secret"})
            assert run.wait(300) == 0, run.communicate()
            run.communicate()
        finally:
            served.send_signal(signal.SIGINT)
            assert served.stdout is not None
            served.stdout.read()
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["taught_share"] for step in steps] == [1.0, 1.0]
    assert [step["teacher_kl"] for step in steps] == pytest.approx([0.0, 0.0], abs=1e-4)
    assert [step["grad_norm"] for step in steps] == pytest.approx([0.0, 0.0], abs=1e-3)


async def opened(directory: Path) -> None:
    async with stubbed(Stub()) as url, text_teacher(TrainConfig(teacher=f"{url}/v1"), load_renderer(directory)):
        pass


def test_a_teacher_that_cannot_be_asked_is_refused(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected 1 with a URL as train.teacher"):
        parse({"tasks": [{"name": "chain_sum"}], "train": {"teacher": "http://x/v1"}, "rollout": {"temperature": 0.7}})
    with pytest.raises(EngineUnavailable, match="HTTP 404"):
        asyncio.run(opened(tiny_model_dir))
