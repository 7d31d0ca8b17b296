"""How many rollouts one curve saves over another."""

from experiments.question_pool.__main__ import saved, summary


def runs(regime: str, arm: str, accuracies: list[float]) -> list[dict[str, object]]:
    points = [(64 * i, one) for i, one in enumerate(accuracies)]
    return [{"regime": regime, "arm": arm, "accuracies": points, "informative": [0.5]}] * 3


def test_a_curve_that_rises_twice_as_fast_saves_half_of_the_rollouts_whichever_ends_higher() -> None:
    slow, fast = runs("r", "uniform", [0.1, 0.2, 0.3, 0.4, 0.5]), runs("r", "pool", [0.1, 0.3, 0.5, 0.7, 0.7])
    assert round(saved(slow, fast), 9) == 2
    assert round(saved(fast, slow), 9) == 0.5
    cell = summary("r", [*slow, *fast], 100)
    assert (cell["ratio"], cell["low"], cell["high"], cell["level"]) == (2, 2, 2, 0.5)


def test_a_fall_of_the_accuracy_moves_no_crossing() -> None:
    wavy = runs("r", "uniform", [0.1, 0.5, 0.3, 0.5])
    assert saved(wavy, runs("r", "pool", [0.1, 0.5, 0.5, 0.5])) == 1
