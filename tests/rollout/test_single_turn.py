"""One turn's requests: what they ask of the engine."""

from dataclasses import dataclass, field, replace

import pytest

from shoal.interfaces import Purpose
from shoal.rehearsal.clock import run_virtual
from shoal.rollout.single_turn import SingleTurn, priority_of, sampled_for
from shoal.types import (
    Completion,
    FinishReason,
    Message,
    Reward,
    RewardStatus,
    Role,
    RolloutStatus,
    Sampling,
    Task,
    Turn,
    seed_for,
)

ASKED = Sampling(4, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, stop_token_ids=(2,), seed=5)
TASK = Task("t", "chain_sum", (Message(Role.USER, "1 + 1 ="),))


@dataclass
class Asked:
    """An engine that notes what it is asked."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def generate(self, prompt_ids, sampling, *, n=1, priority=0):
        self.asked.append((prompt_ids, sampling, n, priority))
        return [Completion((1,), (-0.5,), (0,), FinishReason.STOP)] * n


class Plain:
    """A renderer for which each token is a letter, and a scorer that cannot score the second answer."""

    def prompt_ids(self, messages):
        return [7, 8]

    def message(self, token_ids, prompt_ids):
        return Message(Role.ASSISTANT, "x" * len(token_ids))

    async def score(self, task, answers):
        assert answers == ["x", "x"]
        return [Reward(0.5), Reward(0.0, RewardStatus.TIMED_OUT)]


def test_a_rollout_is_the_question_its_answer_and_reward_and_fails_where_nothing_could_score_it() -> None:
    engine, plain = Asked(), Plain()
    first, second = run_virtual(SingleTurn(engine, plain, plain, ASKED).rollouts(TASK, 2))
    assert [(one.id, one.status, one.reason) for one in (first, second)] == [
        ("t#0", RolloutStatus.FINISHED, ""),
        ("t#1", RolloutStatus.FAILED, "scorer: timed out"),
    ]
    assert first.messages == (*TASK.messages, Message(Role.ASSISTANT, "x"))
    assert first.turns == (Turn((7, 8), Completion((1,), (-0.5,), (0,), FinishReason.STOP)),)
    assert first.reward == Reward(0.5)
    assert engine.asked == [((7, 8), replace(ASKED, seed=seed_for("rollout", 5, "t")), 2, 0)]


@dataclass
class Turns:
    """The finished turns of a rollout, in memory."""

    left: list[Completion]
    kept: list[tuple[object, ...]] = field(default_factory=list)

    def take(self, prompt_ids, sampling):
        return self.left.pop() if self.left and prompt_ids == (7, 8) else None

    def keep(self, prompt_ids, sampling, completion):
        self.kept.append((prompt_ids, completion))


@pytest.mark.parametrize("left", [(1, 1), (1, 0), (0, 0)])
def test_answers_of_a_killed_run_are_not_sampled_again_and_new_ones_are_kept_before_they_are_scored(left) -> None:
    engine, plain, old = Asked(), Plain(), Completion((9,), (-0.25,), (0,), FinishReason.STOP)
    turns = [Turns([old] * n) for n in left]
    rollouts = run_virtual(SingleTurn(engine, plain, plain, ASKED).rollouts(TASK, 2, turns=turns.__getitem__))
    new = Completion((1,), (-0.5,), (0,), FinishReason.STOP)
    whole = all(left)
    assert [one.turns[0].completion for one in rollouts] == [old if whole else new] * 2
    assert [one.kept for one in turns] == [[] if whole else [((7, 8), new)]] * 2
    assert len(engine.asked) == (not whole)


def test_a_greedy_rollout_keeps_of_the_settings_only_how_an_answer_ends() -> None:
    assert sampled_for(Purpose.GREEDY, ASKED) == Sampling(4, temperature=0.0, stop_token_ids=(2,), seed=5)
    assert sampled_for(Purpose.SAMPLED, ASKED) == sampled_for(Purpose.TRAIN, ASKED) == ASKED


def test_the_answers_of_a_group_are_one_request_and_evaluation_s_goes_before_training_s() -> None:
    engine, priority = Asked(), priority_of(Purpose.SAMPLED)
    turn = SingleTurn(engine, None, None, ASKED)  # type: ignore[arg-type]  # nothing is rendered or scored
    assert len(run_virtual(turn.completions(TASK, (7, 8), ASKED, 2, priority))) == 2
    assert engine.asked == [((7, 8), ASKED, 2, priority)]
    assert priority > priority_of(Purpose.TRAIN)
