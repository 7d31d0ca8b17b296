"""The arms and the table of the experiment in which SmolLM2 mends small programs; its runs need hours."""

from experiments.swe.__main__ import summary, table, tasks_of


def test_the_control_trains_on_chance_and_is_evaluated_by_the_right_tests() -> None:
    real, control = tasks_of("real"), tasks_of("chance")
    assert [task.sources for task in real] == [task.sources for task in control]
    assert {task.split for one, task in zip(real, control, strict=True) if one.files != task.files} == {"train"}


def test_the_table_has_each_arms_accuracies_before_and_after() -> None:
    runs = [
        {
            "arm": "real",
            "seed": seed,
            "sampled": [[0, 0.1], [10, 0.3 + 0.1 * seed]],
            "greedy": [[0, 0.2], [10, 0.5]],
            "rewards": [0.1] * 5 + [0.9] + [0.5] * 5,
        }
        for seed in range(2)
    ]
    row = "| real | 0.100 | 0.300, 0.400 | 0.200 | 0.500, 0.500 | 0.100, 0.500 |"
    assert row in table([summary("real", runs)])
