"""Checkpoints come early in time, and evaluations that cost more than training are told."""

from shoal.run.checkpoints import EARLY_S, CheckpointDue
from shoal.run.loop import EvaluationCost


class Clock:
    """A clock that a test moves."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def saved_after(step_s: float, save_s: float, *, every_steps: int, steps: int) -> list[int]:
    """Steps, from 1, after which checkpoints were written."""
    clock, saved = Clock(), []
    due = CheckpointDue(every_steps, clock)
    for step in range(steps):
        clock.now_s += step_s
        if due.after(step):
            clock.now_s += save_s
            due.saved(save_s)
            saved.append(step + 1)
    return saved


def test_quick_steps_are_saved_by_their_number_and_slow_ones_by_the_time_too() -> None:
    assert saved_after(1.0, 0.1, every_steps=25, steps=100) == [25, 50, 75, 100]
    assert saved_after(EARLY_S, 0.1, every_steps=25, steps=4) == [1, 2, 3, 4]
    assert saved_after(42.0, 0.1, every_steps=25, steps=9) == [3, 6, 9]


def test_time_alone_makes_checkpoints_cost_a_twentieth_at_most() -> None:
    assert saved_after(60.0, 60.0, every_steps=1000, steps=62) == [2, 22, 42, 62]


def test_a_checkpoint_written_beside_training_costs_what_training_waited_for_it() -> None:
    clock = Clock()
    due = CheckpointDue(1000, clock)
    due.saved(5.0)
    clock.now_s = 600.0  # a step of 60 s, and 540 s until the write ended
    due.sealed(540.0)
    assert not due.after(0)
    clock.now_s = 20 * 545.0
    assert due.after(1)


def cost(evaluation_s: float, trained_s: float) -> list[str]:
    """What is told of three stretches of 20 steps between evaluations."""
    clock = Clock()
    watch = EvaluationCost(questions=128, clock=clock)
    clock.now_s = 1000.0
    watch.begin()
    watch.evaluation_s = evaluation_s
    told = []
    for _ in range(3):
        clock.now_s += trained_s
        told.append(watch.trained(20))
    return told


def test_an_evaluation_that_takes_longer_than_training_is_told_once_with_what_to_set() -> None:
    first, *later = cost(90.0, 30.0)
    assert first.startswith("an evaluation takes 90 s, more than the 30 s of the 20 steps between two; ")
    assert "set eval.questions to 10, or eval.every_steps above 80" in first
    assert later == ["", ""]
    assert cost(30.0, 90.0) == ["", "", ""]
