"""What damaged a run is found: its step, the groups of it and their tokens."""

import asyncio
import math
from collections.abc import Set
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer_values import group
from chat_templates import renderer
from shoal.experience.held_out import HeldOutAnswer, write_answers
from shoal.run.commands.bisect import (
    Bisection,
    HeldOutScore,
    Metric,
    ReplayTrial,
    held_out_score,
    smallest,
    summed,
    without,
)
from shoal.run.commands.replay import Replay
from shoal.run.policy import StepRows
from shoal.types import Message, Reward, Role, Rollout, Sample, Task

SCORE = HeldOutScore(Metric.REWARD, ((1, 2, 3), (1, 4), (5, 6)), (1, 1, 1), ("a", "a", "b"), (1.0, 0.0, 0.5))
LOGPROBS = ((-1.0, -2.0), (-0.5,), (-4.0,))


def test_the_reward_is_expected_among_the_answers_to_each_question() -> None:
    right, wrong = math.exp(-3.0), math.exp(-0.5)
    assert SCORE.of(LOGPROBS) == pytest.approx((right / (right + wrong) + 0.5) / 2)
    moved = 1e-6
    higher = SCORE.of(((-1.0, -2.0 + moved), *LOGPROBS[1:]))
    slopes = SCORE.slopes(LOGPROBS)
    assert (higher - SCORE.of(LOGPROBS)) / moved == pytest.approx(slopes[0] / 2, rel=1e-4)
    assert slopes[0] == pytest.approx(-slopes[1])
    assert slopes[2] == 0


def test_held_out_logprob_is_a_mean_over_the_tokens_of_answers() -> None:
    score = HeldOutScore(Metric.HELDOUT, SCORE.rows, (2, 1, 1), SCORE.questions, SCORE.rewards)
    assert score.of(LOGPROBS) == pytest.approx((-2.0 - 0.5 - 4.0) / 3)


@given(st.integers(1, 200), st.data())
def test_a_search_takes_few_trials_for_a_small_number_whatever_the_count(count: int, data: st.DataObject) -> None:
    truth = data.draw(st.integers(1, count))
    tried = []

    async def cures(number: int) -> bool:
        tried.append(number)
        return number >= truth

    assert asyncio.run(smallest(count, cures)) == truth
    assert len(tried) <= 2 * math.ceil(math.log2(truth)) + 1


def test_a_muted_token_or_group_has_no_advantage_and_still_counts() -> None:
    row = Sample((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, 2.0, 2.0))
    rows = without({("g", 1, 2)}, StepRows({"g": (row, row), "h": (row,)}))
    assert [one.advantages for one in rows.of_group["g"]] == [(0.0, 2.0, 2.0), (0.0, 2.0, 0.0)]
    assert rows.of_group["g"][1].mask == row.mask
    assert rows.of_group["h"] == (row,)
    rows = without({"h"}, rows)
    assert rows.of_group["h"][0].advantages == (0.0, 0.0, 0.0)


def test_harm_and_size_of_a_whole_are_sums_over_its_parts() -> None:
    weights: dict[str, tuple[float, float]] = {"a": (1.0, 1.0), "b": (-3.0, 3.0), "c": (0.5, 2.0)}
    assert summed(weights, {"a": 1, "b": 1, "c": 2}) == {1: (-2.0, 4.0), 2: (0.5, 2.0)}


class Known(Bisection):
    """A search whose trials are cured without step 7."""

    async def cured(self, left_out: str, parts: Set[int | str | tuple[str, int, int]]) -> bool:
        self.trials.append(ReplayTrial(len(self.trials) + 1, left_out, 0.0, 7 in parts))
        return 7 in parts


def test_the_largest_step_is_tried_early_though_it_helps_to_first_order() -> None:
    search = Known(cast(Replay, None), SCORE, 0, 16, str)
    weights = {step: (1.0 / step, 1.0) for step in range(1, 16)} | {7: (-1.0, 100.0)}
    assert asyncio.run(search.fewest(weights, "steps")) == [7]
    assert len(search.trials) == 3


class KnownTokens(Bisection):
    """A search whose trials are cured without step 7, its group "a" or the second token of that."""

    async def measure_ends(self) -> None:
        self.scores = (1.0, 0.0)

    async def weights(self) -> dict[tuple[str, int, int], tuple[float, float]]:
        self.step_of |= {"before": 6, "silent": 7, "a": 7}
        return {("before", 0, 1): (1.0, 1.0), ("a", 0, 1): (0.5, 1.0), ("a", 0, 2): (2.0, 2.0)}

    async def cured(self, left_out: str, parts: Set[int | str | tuple[str, int, int]]) -> bool:
        return bool(parts & {7, "a", ("a", 0, 2)})


def test_a_group_without_trained_tokens_is_one_of_its_step_and_harms_nothing() -> None:
    made = renderer("qwen3")
    ids = tuple(made.token_ids("one"))[:1] * 3
    rows = {name: (Sample(ids, (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, 1.0, 1.0)),) for name in ("silent", "a")}

    async def rows_of(groups: object, version: int) -> StepRows:
        return StepRows(rows)

    of_step = {6: [group("before")], 7: [group("silent"), group("a")]}
    logged = SimpleNamespace(groups=of_step.__getitem__, records={7: SimpleNamespace(version=7)})
    replay = cast(Replay, SimpleNamespace(logged=logged, steps=SimpleNamespace(rows=rows_of)))
    found = asyncio.run(KnownTokens(replay, SCORE, 5, 7, str).culprit(made))
    assert (found.steps, [one.id for one in found.groups]) == ([7], ["a"])
    assert (found.tokens, found.texts) == ([("a", 0, 2)], {"a": [made.text(ids[:1])]})
    assert found.counts == (2, 2)


def test_the_rows_of_a_score_are_right_answers_after_their_questions_as_the_model_would_write_them(
    tmp_path: Path,
) -> None:
    asked, task = Message(Role.USER, "What is 3 + 4?"), Task("q", "sums", (), "7")
    answers = [
        HeldOutAnswer.of(0, task, "sampled", n, Rollout("r", (asked, Message(Role.ASSISTANT, said)), (), Reward(value)))
        for n, (said, value) in enumerate((("8", 0.0), ("7", 1.0), ("It is 7.", 1.0)))
    ]
    write_answers(tmp_path, 0, [replace(answer, asked=1) for answer in answers])
    made = renderer("qwen3")
    prompt = made.prompt_ids([asked])
    score = held_out_score(tmp_path, Metric.HELDOUT, made)
    assert score.rows == ((*prompt, *(made.completion_ids("7", prompt) or ())),)
    assert (score.begins, score.rewards) == ((len(prompt),), (1.0,))
    assert len(score.rows[0]) > len(prompt)
