"""SAPO with a pretrained model: its recipe, the choice of specialties, equal processor time, and a shortened run."""

import json
from pathlib import Path

import pytest

from experiments.grid import Record
from experiments.sapo_real.__main__ import main, node_config
from experiments.sapo_real.equal_time import cut, equal_time, held_out_at, judged, reward_at
from experiments.sapo_real.specialties import EASY, RECIPE, chosen, node, own_tasks
from shoal import procedural
from shoal.config import load
from shoal.config.training import GRPOLoss
from shoal.swarm.judge.messages import Condition

SPECIALTIES = [
    *("base_conversion", "basic_arithmetic", "arc_1d", "bf", "propositional_logic"),
    *("fraction_simplification", "decimal_arithmetic", "calendar_arithmetic", "binary_matrix"),
]
"""Of SAPO's controlled experiment."""
SIZE = {"nodes": 8, "groups": 4, "rounds": 40, "each": 8, "questions": 72, "every": 10, "context": 512}


def run(accuracies: list[float], processor_s: float, reward: float) -> Record:
    """A run of 20 rounds of two nodes, with evaluations after every 10."""
    evaluations = [[10 * i, accuracy] for i, accuracy in enumerate(accuracies)]
    rewards = [[reward, reward]] * 20
    return {"rewards": rewards, "evaluations": evaluations, "processor_s": processor_s + 5.0, "start_s": 5.0}


def test_the_example_is_the_papers_node_with_reasoning_gyms_own_settings() -> None:
    config = load(RECIPE, ["model.path=demo"])
    assert [task.name for task in config.tasks] == SPECIALTIES
    assert {(task.params == {}, task.scorer, task.reward) for task in config.tasks} == {(True, None, "correct")}
    assert isinstance(config.train.loss, GRPOLoss)
    assert (config.train.groups_per_step, config.swarm.external_groups, config.swarm.round_offers) == (4, 4, 7 * 4)
    assert (config.asynchrony.max_staleness, config.rollout.group_size, config.rollout.ratios) == (0, 8, "chance")


def test_a_specialty_has_easy_settings_only_where_its_own_give_nothing() -> None:
    own: dict[str, dict[str, object]] = {name: {"full_marks": 0.0} for name in SPECIALTIES}
    easiest = {**own, "arc_1d": {"full_marks": 0.5}, "bf": {"groups": 0}, "binary_matrix": {"full_marks": 0.1}}
    start = {
        "own": {**own, "basic_arithmetic": {"full_marks": 0.01}, "arc_1d": {"full_marks": 0.1}},
        "easiest": easiest,
    }
    assert {str(task["name"]): task.get("params") for task in chosen(start)} == {
        "basic_arithmetic": None,
        "arc_1d": None,
        "binary_matrix": EASY["binary_matrix"],
    }


@pytest.mark.parametrize("name", SPECIALTIES)
def test_the_easiest_settings_are_the_data_sets(name: str) -> None:
    params = EASY[name]
    assert isinstance(params, dict)
    assert json.loads(procedural.config_json(name, params, None)) == json.loads(json.dumps(params))


def test_a_cell_halves_the_papers_groups_and_waits_for_all_peers(tmp_path: Path) -> None:
    tree, url = node("demo", own_tasks(), 8), "nats://127.0.0.1:9"
    found = {
        cell: node_config(tmp_path, tree, cell, 7, SIZE, url if "/0" not in cell else "")
        for cell in ("8/0", "6/2", "4/4", "2/6")
    }
    assert {cell: one.train.groups_per_step for cell, one in found.items()} == {"8/0": 4, "6/2": 3, "4/4": 2, "2/6": 1}
    assert {cell: one.swarm.external_groups for cell, one in found.items()} == {"8/0": 0, "6/2": 1, "4/4": 2, "2/6": 3}
    assert [found[cell].swarm.round_offers for cell in ("6/2", "4/4", "2/6")] == [21, 14, 7]
    assert (found["8/0"].seed, found["8/0"].train.lora.rank, found["8/0"].swarm.servers) == (7, 16, [])


def test_both_sides_are_cut_after_the_processor_time_of_the_cheaper_one() -> None:
    shared, alone = run([0.0, 0.2, 0.4], 50.0, 0.5), run([0.0, 0.4, 0.6], 100.0, 0.25)
    assert cut(shared, alone) == (20.0, 10.0)
    assert held_out_at(alone, 15.0) == pytest.approx(0.5)
    assert reward_at(alone, 10.0) == 0.25
    runs = {f"smollm2:{cell}:{seed}": one for cell, one in (("4/4", shared), ("8/0", alone)) for seed in (0, 1)}
    row = equal_time(runs).splitlines()[2]
    assert row.startswith("| 4/4 less 8/0 | 2 | 0.50 | 20/10 20/10 | +0.000 | ")
    assert "| +0.250 | " in row
    assert [(one.arm, one.round, one.score) for one in judged(runs)][:2] == [
        (Condition.SWARM, 0, 0.0),
        (Condition.SWARM, 10, 0.2),
    ]


def test_a_shortened_run_has_real_nodes_whose_logs_pass_their_audits(tmp_path: Path) -> None:
    main(["--quick", "--results", str(tmp_path)])
    record = json.loads((tmp_path / "runs.jsonl").read_text())
    assert (record["key"], record["audits_clean"], len(record["rewards"])) == ("smollm2:4/4:0", 2, 2)
    assert [at for at, _ in record["evaluations"]] == [0, 2]
    assert 0 < record["start_s"] <= record["processor_s"]
    assert "| smollm2 4/4 | 1 |" in (tmp_path / "results.md").read_text()
    assert (tmp_path / "figure3.png").stat().st_size > 1000
