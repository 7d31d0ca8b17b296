"""The short form of `make frameworks`: the SDKs that this environment has, in training and with cut answers."""

import asyncio
import sys
from pathlib import Path

import pytest

from shoal.types import RolloutStatus

sys.path.append(str(Path(__file__).parents[2] / "tools"))

import frameworks
from engine_record import compared, rollouts


class Here(frameworks.Framework):
    """A framework in this environment."""

    @property
    def python(self) -> Path:
        return Path(sys.executable)


@pytest.mark.timeout(900)  # the model is made once
@pytest.mark.parametrize("name", ["anthropic", "openai-agents"])
def test_a_sdk_trains_on_what_the_engine_sampled(name: str, tmp_path: Path) -> None:
    sdk = Here(name, (name,))
    frameworks.questions(tmp_path / "whole" / "questions.jsonl")
    run, record = asyncio.run(frameworks.run_of(sdk, "", tmp_path / "whole", max_tokens=192, steps=1, groups=1))
    found = rollouts(run)
    turns, equal = compared(found, record)
    assert {one.status for one in found} == {RolloutStatus.FINISHED}, [one.reason for one in found]
    assert turns == equal > len(found), "a rollout calls the tool"


@pytest.mark.timeout(900)
def test_cut_answers_of_a_sdk_are_truncated(tmp_path: Path) -> None:
    sdk = Here("anthropic", ("anthropic",))
    frameworks.questions(tmp_path / "cut" / "questions.jsonl")
    run, _ = asyncio.run(frameworks.run_of(sdk, "", tmp_path / "cut", steps=1, groups=1, **frameworks.CUT))
    assert {one.status for one in rollouts(run)} == {RolloutStatus.TRUNCATED}, [one.reason for one in rollouts(run)]


def test_a_token_that_the_engine_did_not_sample_is_found() -> None:
    from engine_record import Record

    record = Record("", "")
    record.answers[1, 2].append([(5, -1.0, 0), (6, -0.5, 0)])
    record.answers[1, 2, 5, 6].append([(7, -0.1, 1)])
    whole = [(5, -1.0, 0), (6, -0.5, 0), (7, -0.1, 1)]
    assert record.has((1, 2), whole)
    assert record.has((1, 2), whole[:1]), "a stop text cuts an answer"
    assert not record.has((1,), whole)
    assert not record.has((1, 2), [*whole[:2], (8, -0.1, 1)])
    assert not record.has((1, 2), [*whole[:2], (7, -0.2, 1)])
