"""What foreign answers are reinforced with."""

import math

from shoal.swarm.encoding import GENERATOR_LOGPROB, OWN_SKILL
from shoal.swarm.external import external_rows
from shoal.trainer.advantage import rows
from shoal.types import EXTERNAL, Completion, FinishReason, Group, Message, Reward, Role, Rollout, Sample, Task, Turn

TASK = Task("t", "letters", (Message(Role.USER, "say a"),), "a")


def rollout(value: float, own: float, **parts: float) -> Rollout:
    turn = Turn((1, 2), Completion((3, 4), (own / 2, own / 2), (0, 0), FinishReason.STOP))
    reward = Reward(value, parts=tuple(parts.items()))
    return Rollout(f"r{value}", (*TASK.messages, Message(Role.ASSISTANT, "a")), (turn,), reward)


def group(*rollouts: Rollout) -> Group:
    return Group(f"{EXTERNAL}x", TASK, rollouts, 0)


def trained(source: Group, *advantages: float) -> list[Sample]:
    return [row for one, a in zip(source.rollouts, advantages, strict=True) for row in rows(one, a)]


def of_drawn(row: Sample) -> set[float]:
    return {round(a, 9) for a, drawn in zip(row.advantages, row.mask, strict=True) if drawn}


def test_one_right_answer_teaches_a_node_that_is_mostly_wrong_as_much_as_its_skill_is_low() -> None:
    alone = group(rollout(1.0, -4.0, **{OWN_SKILL: 0.1}))
    (row,) = external_rows(alone, trained(alone, 0.0), "skill")
    assert of_drawn(row) == {3.0}
    assert {a for a, drawn in zip(row.advantages, row.mask, strict=True) if not drawn} == {0.0}


def test_negatives_are_kept_dropped_or_weighed_by_how_likely_the_node_is_to_say_them() -> None:
    both = group(rollout(1.0, -2.0, **{GENERATOR_LOGPROB: -1.0}), rollout(0.0, -5.0, **{GENERATOR_LOGPROB: -1.0}))
    samples = trained(both, 0.5, -0.5)
    assert [of_drawn(row) for row in external_rows(both, samples, "group")] == [{0.5}, {-0.5}]
    assert [of_drawn(row) for row in external_rows(both, samples, "group_drop")] == [{0.5}, {-0.0}]
    weighed = external_rows(both, samples, "group_weight")
    assert of_drawn(weighed[0]) == {0.5}
    assert of_drawn(weighed[1]) == {round(-0.5 * math.exp(-2), 9)}
