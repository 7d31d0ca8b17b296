"""Every checker through one scorer: what is run where, what is kept, and what other machines and models are asked."""

import asyncio
import json
import os
import re
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from shoal.checker import Exact
from shoal.config import RewardConfig
from shoal.errors import EngineError
from shoal.net.server import serving
from shoal.reward.llm_judge import score_in
from shoal.reward.service import RewardCache, RewardService
from shoal.types import Json, Message, Reward, RewardStatus, Role, Task

T = TypeVar("T")
ADD: Json = [{"call": "add", "args": [1, 2], "returns": 3}]


def task(scorer: Json, answer: str | None = None, **info: Json) -> Task:
    return Task("t/1", "t", (Message(Role.USER, "What is 3 + 4?"),), answer, json.dumps({"scorer": scorer, **info}))


def run(work: Callable[[RewardService], Coroutine[None, None, T]], **config: object) -> T:
    """What `work` gives with a running service."""

    async def main() -> T:
        async with asyncio.timeout(100), RewardService(RewardConfig.model_validate(config)) as service:
            return await work(service)

    return asyncio.run(main())


def values(rewards: list[Reward]) -> list[float | str]:
    return [reward.value if reward.status is RewardStatus.SCORED else reward.status.value for reward in rewards]


def test_checkers_of_every_kind_are_weighed_together_and_their_parts_are_kept() -> None:
    spec: Json = {
        "name": "weighted",
        "parts": [
            {"scorer": "math", "weight": 0.75},
            {"scorer": {"name": "length", "at_most": 20}, "weight": 0.25, "label": "short"},
            {"scorer": {"name": "code", "template": "def add(a, b):\n    return {answer}\n"}, "weight": 2.0},
        ],
    }

    async def work(service: RewardService) -> None:
        rewards = await service.score(task(spec, "3", tests=ADD), ["3", "a + b", "a + b + 0 + 0 + 0 + 0"])
        assert values(rewards) == [3.0, 2.25, 2.0]
        assert dict(rewards[0].parts)["short"] == 1.0
        assert dict(rewards[1].parts) == {
            "math": 0.0,
            "short": 1.0,
            "code": 1.0,
            "code/tests_passed": 1,
            "code/tests": 1,
        }
        broken = await service.score(task({"name": "weighted", "parts": [{"scorer": "math"}]}, None), ["3"])
        assert values(broken) == ["failed"]
        assert broken[0].evidence.startswith("math: expected a task with an answer")
        assert values(await service.score(task("magic"), ["3"])) == ["failed"]

    run(work)


def test_what_was_scored_is_not_scored_again_unless_it_was_no_score() -> None:
    linear: Json = {"name": "regex", "pattern": "(a+)+$"}

    async def work(service: RewardService) -> None:
        assert values(await service.score(task("math", "7"), ["7", "8", "7", "7"])) == [1.0, 0.0, 1.0, 1.0]
        assert (len(service.cache), service.cache.hits) == (2, 0)
        assert values(await service.score(task("math", "7"), ["8", "7"])) == [0.0, 1.0]
        assert service.cache.hits == 2
        assert values(await service.score(task("math", "8"), ["8", "7"])) == [1.0, 0.0]
        assert values(await service.score(task(linear), ["aaa", "a" * 40 + "b"])) == [1.0, 0.0]
        misses = service.cache.misses
        for again in (1, 2):  # a task that cannot be judged gives no score, and its outcome is not kept
            assert values(await service.score(task("number", "none"), ["7"])) == ["failed"]
            assert service.cache.misses == misses + again
        assert service.values["scorer_restarts"] == 0
        assert 0 < service.values["scorer_cached_share"] < 1

    run(work, timeout_s=1.0)


def test_the_cache_keeps_the_most_recently_used() -> None:
    cache = RewardCache(most=2)
    for key in (b"a", b"b"):
        cache.put(key, Reward(1.0))
    assert cache.get(b"a") is not None
    cache.put(b"c", Reward(0.0))
    assert [cache.get(key) is not None for key in (b"a", b"b", b"c")] == [True, False, True]
    cache.put(b"d", Reward(0.0, RewardStatus.FAILED))
    assert cache.get(b"d") is None


def test_an_answer_with_half_of_a_surrogate_pair_is_wrong_and_kills_no_worker() -> None:
    spec: Json = {"name": "json_schema", "schema": {"additionalProperties": {"type": "string"}}}

    async def main(service: RewardService) -> tuple[list[Reward], float]:
        return await service.score(task(spec), ['{"\\ud800": 1}']), service.values["scorer_restarts"]

    rewards, restarts = run(main, workers=1)
    assert (values(rewards), restarts) == ([0.0], 0)


def test_a_worker_is_replaced_after_so_many_answers() -> None:
    from shoal.reward.scorer import WorkerScorer

    async def main() -> None:
        async with WorkerScorer(RewardConfig(), recycle_after=3) as scorer:
            pids = set()
            for _ in range(3):
                pids |= set(scorer.pids)
                assert values(await scorer.score_by(Exact(), task("exact", "x"), ["x", "y"])) == [1.0, 0.0]
            assert scorer.values["scorer_restarts"] == 1
            assert len(pids) == 1

    asyncio.run(main())


FUNCTIONS = """
import os, time
calls = []
def longest(prompts, completions, answer, level, **columns):
    assert prompts[0][-1]["role"] == "user" and "scorer" not in columns
    assert answer == ["7"] * len(completions) and level == [3] * len(completions)
    return [float(len(completion[0]["content"])) for completion in completions]
def nothing_to_say(completions, **_): return [None for _ in completions]
def too_few(completions, **_): return [1.0]
def not_finite(completions, **_): return [float("nan")] * len(completions)
def raises(**_): raise KeyError("level")
def hangs(**_): time.sleep(60)
def dies(**_): os._exit(3)
def dies_once(completions, **_):
    if not os.path.exists("died"):
        open("died", "w").close()
        os._exit(3)
    return [1.0] * len(completions)
"""


@pytest.fixture
def functions(tmp_path: Path) -> Iterator[None]:
    """A folder with a module of the user's, as the current one."""
    (tmp_path / "my_rewards.py").write_text(FUNCTIONS)
    before = Path.cwd()
    os.chdir(tmp_path)
    yield
    os.chdir(before)


@pytest.mark.usefixtures("functions")
def test_a_users_function_is_called_as_trl_calls_it_and_its_faults_are_failures() -> None:
    async def work(service: RewardService) -> None:
        async def by(name: str) -> list[Reward]:
            spec: Json = {
                "name": "function",
                "path": f"my_rewards:{name}",
                "timeout_s": 3.0 if name == "hangs" else 60.0,
            }
            return await service.score(task(spec, "7", level=3), ["a", "bcd"])

        assert values(await by("longest")) == [1.0, 3.0]
        assert values(await by("dies_once")) == [1.0, 1.0]
        failures = {
            "nothing_to_say": "gave None",
            "too_few": "expected a list of 2 rewards",
            "not_finite": "expected finite numbers or None, got nan",
            "raises": "KeyError: 'level'",
            "dies": "ended with code 3",
            "absent": "my_rewards has no 'absent'",
        }
        for name, why in failures.items():
            rewards = await by(name)
            assert values(rewards) == ["failed", "failed"], name
            assert why in rewards[0].evidence
        assert values(await by("hangs")) == ["timed_out", "timed_out"]
        assert values(await by("hangs")) == ["timed_out", "timed_out"]

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    run(work)
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def judge_app(asked: list[str]) -> Starlette:
    """A judge that does what the answer to grade says, as far as a careless model would."""

    async def completions(request: Request) -> JSONResponse:
        text = (await request.json())["messages"][1]["content"]
        asked.append(text)
        nonce = re.findall(r"SCORE-(\w+): <number>$", text)[0]
        answer = text.split("Answer to grade:\n")[1].split("Rubric:")[0]
        if "busy" in answer and len(asked) < 3:
            return JSONResponse({"error": "busy"}, 503)
        if "slow" in answer:
            await asyncio.sleep(5)
        replies = {
            "good": f"It is right.\nSCORE-{nonce}: 8",
            "unsure": "Hard to say. 8, perhaps.",
            "eleven": f"SCORE-{nonce}: 11",
            "busy": f"SCORE-{nonce}: 10",
        }
        reply = next((reply for word, reply in replies.items() if word in answer), f"SCORE-{nonce}: 0")
        return JSONResponse({"choices": [{"message": {"content": reply}}]})

    return Starlette(routes=[Route("/v1/chat/completions", completions, methods=["POST"])])


def test_a_judge_scores_by_a_rubric_and_what_it_does_not_answer_is_no_score() -> None:
    asked: list[str] = []

    async def work(service: RewardService) -> None:
        async with serving(judge_app(asked)) as url:
            spec: dict[str, Json] = {"name": "judge", "url": f"{url}/v1", "model": "m", "rubric": "Is it right?"}
            assert values(await service.score(task(spec, "7"), ["busy"])) == [1.0]
            assert len(asked) == 3
            rewards = await service.score(task(spec, "7"), ["good", "bad", "unsure", "eleven"])
            assert values(rewards) == [0.8, 0.0, "failed", "failed"]
            assert values(await service.score(task(spec | {"timeout_s": 1.0}, "7"), ["slow"])) == ["timed_out"]
            assert rewards[0].parts == (("judge_score", 8.0),)
            nonces = [re.findall(r"SCORE-(\w+)", text)[-1] for text in asked]
            assert len(set(nonces)) == len(nonces) - 2  # a question asked three times, and the others
            lost: Json = {**spec, "url": f"{url}/nowhere"}
            assert values(await service.score(task(lost, "7"), ["good"])) == ["failed"]

    run(work)


@pytest.mark.parametrize(
    "reply",
    ["", "SCORE-ab: 7\nbut then again", "SCORE-cd: 7", "SCORE-ab: -1", "SCORE-ab: 7/10", "SCORE-ab: 7 SCORE-ab: 9"],
)
def test_only_a_last_line_of_the_right_form_is_a_judges_score(reply: str) -> None:
    with pytest.raises(EngineError):
        score_in(reply, "ab", 10)
    assert score_in("Well.\n**SCORE-ab: 7**\n", "ab", 10) == 7
