"""What foreign answers are reinforced with."""

import math
from dataclasses import fields

import pytest

from shoal import wire
from shoal.config import Credit
from shoal.swarm.external import OwnRecord, external_rows, own_likelihood
from shoal.swarm.offer import OfferedRollout, OfferedTurn
from shoal.trainer.advantage import rows
from shoal.types import (
    Completion,
    External,
    FinishReason,
    Group,
    Message,
    Origin,
    Reward,
    Role,
    Rollout,
    Sample,
    Task,
    Turn,
)

TASK = Task("t", "letters", (Message(Role.USER, "say a"),), "a")


def rollout(value: float, own: float, external: External) -> Rollout:
    turn = Turn((1, 2), Completion((3, 4), (own / 2, own / 2), (0, 0), FinishReason.STOP))
    messages = (*TASK.messages, Message(Role.ASSISTANT, "a"))
    return Rollout(f"r{value}", messages, (turn,), Reward(value), external=external)


def group(*rollouts: Rollout) -> Group:
    return Group("x", TASK, rollouts, 0, Origin("reef", "x"))


def trained(source: Group, *advantages: float) -> list[Sample]:
    return [row for one, a in zip(source.rollouts, advantages, strict=True) for row in rows(one, a)]


def of_drawn(row: Sample) -> set[float]:
    return {round(a, 9) for a, drawn in zip(row.advantages, row.mask, strict=True) if drawn}


def test_one_right_answer_teaches_a_node_that_is_mostly_wrong_as_much_as_its_skill_is_low() -> None:
    alone = group(rollout(1.0, -4.0, External(skill=0.1)))
    (row,) = external_rows(alone, trained(alone, 0.0), "skill")
    assert of_drawn(row) == {3.0}
    assert {a for a, drawn in zip(row.advantages, row.mask, strict=True) if not drawn} == {0.0}


@pytest.mark.parametrize(
    ("credit", "rewards", "teaches"),
    [
        ("group", (0.0, 0.0), False),
        ("group_drop", (0.0, 1.0), True),
        ("skill", (0.0, 0.0), True),
        ("skill_weight", (0.0, 0.0), True),
        ("skill_drop", (0.0, 0.5), False),  # the node's own mean is .75
        ("skill_drop", (0.0, 1.0), True),
    ],
)
def test_a_group_of_which_credit_leaves_nothing_does_not_teach(
    credit: Credit, rewards: tuple[float, ...], teaches: bool
) -> None:
    record = OwnRecord(credit)
    record.add(group(*(rollout(value, -1.0, External()) for value in (0.5, 1.0))))
    assert record.teaches("letters", [Reward(value) for value in rewards]) is teaches


def test_negatives_are_kept_dropped_or_weighed_by_how_likely_the_node_is_to_say_them() -> None:
    usual = External(usual_logprob=-0.5)
    both = group(rollout(1.0, -2.0, usual), rollout(0.0, -5.0, usual))
    samples = trained(both, 0.5, -0.5)
    assert [of_drawn(row) for row in external_rows(both, samples, "group")] == [{0.5}, {-0.5}]
    assert [of_drawn(row) for row in external_rows(both, samples, "group_drop")] == [{0.5}, {-0.0}]
    weighed = external_rows(both, samples, "group_weight")
    assert of_drawn(weighed[0]) == {0.5}
    assert of_drawn(weighed[1]) == {round(-0.5 * math.exp(-2), 9)}


def test_a_text_that_the_node_says_as_often_as_its_own_is_pushed_down_in_full() -> None:
    alone = group(rollout(0.0, -1.0, External(usual_logprob=-0.5)))
    assert own_likelihood(alone.rollouts[0]) == 1.0
    assert own_likelihood(rollout(0.0, -4.0, External(usual_logprob=-0.5))) == pytest.approx(math.exp(-1.5))


def test_nothing_that_an_offer_claims_beside_its_texts_reaches_what_is_trained() -> None:
    """The size of a gradient comes of the node's own rewards, logprobs and means."""
    assert {field.name for field in fields(OfferedRollout)} == {"text", "complete", "turns"}
    said = {"role", "content", "tool_calls", "tool_call_id", "sampled", "complete"}
    assert {field.name for field in fields(OfferedTurn)} == said
    claimed = wire.encode({"text": "a", "logprob": -1e30, "skill": 0.0})
    assert wire.decode(claimed, OfferedRollout) == OfferedRollout("a")
