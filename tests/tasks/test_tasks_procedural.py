"""reasoning-gym questions are pure functions of their receipts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal import procedural
from shoal.errors import OutOfBounds, TaskError
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.types import Json, Receipt, Split

PROGRAM = Path(__file__).parents[1].joinpath("support") / "reasoning_gym_entries.py"


def started(mode: str, hash_seed: str = "0") -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), mode],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
    )


def entries(process: "subprocess.Popen[str]") -> dict[str, list[str]]:
    out, err = process.communicate(timeout=1200)
    assert process.returncode == 0, err
    found: dict[str, list[str]] = json.loads(out)
    return found


def test_every_dataset_gives_a_receipts_entry_again_in_another_process_from_a_fresh_dataset_in_another_order() -> None:
    processes = [started("receipts"), started("fresh")]
    ours, fresh = (entries(process) for process in processes)
    assert len(ours) == 2 * len(procedural.names()) > 200
    assert [key for key in ours if ours[key] != fresh[key]] == []


def test_every_curriculum_that_ends_gives_a_question_at_its_lowest_level_but_for_one_that_is_wrong_upstream() -> None:
    found = entries(started("levels"))
    failed = {name: entry[1] for name, entry in found.items() if entry[0] == "error"}
    assert len(found) > 95
    assert set(failed) == {"knight_swap"}
    assert "min_nodes must be >= 6" in failed["knight_swap"]


def test_entries_are_refused_under_another_hash_seed() -> None:
    found = entries(started("receipts", hash_seed="1"))
    assert all("PYTHONHASHSEED=0" in entry[1] for entry in found.values())


def config(name: str, level: int | None = None, **params: Json) -> str:
    return procedural.config_json(name, params, level)


@pytest.mark.parametrize(
    ("name", "level", "params", "message"),
    [
        ("chain_sums", None, {}, "did you mean 'chain_sum'"),
        ("composite", None, {}, "unknown reasoning-gym dataset"),
        ("chain_sum", None, {"min_term": 2}, "params.min_term; did you mean 'min_terms'"),
        ("chain_sum", None, {"zzz": 2}, "expected one of"),
        ("chain_sum", None, {"min_terms": "two"}, "params.min_terms: input should be a valid integer"),
        ("chain_sum", None, {"min_terms": 5, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", None, {"seed": 5}, "params.seed: the run derives it"),
        ("chain_sum", 99, {}, "params: expected a level from 0 to"),
        ("acre", 0, {}, "no curriculum"),
    ],
)
def test_wrong_settings_are_named(name: str, level: int | None, params: dict[str, Json], message: str) -> None:
    with pytest.raises(TaskError, match=message.replace(".", r"\.")):
        config(name, level, **params)


def test_params_go_over_the_settings_of_the_level() -> None:
    settings = json.loads(config("chain_sum", 1, min_terms=1))
    assert settings["min_terms"] == 1
    assert settings["max_digits"] == json.loads(config("chain_sum", 1))["max_digits"]


def test_settings_that_are_enumerations_dates_or_wrongly_annotated_tuples_are_read_from_json() -> None:
    config("polynomial_multiplication", variables=["x", "y"])
    config("word_sorting", transformation="lowercase")
    config("time_intervals", min_date="2001-02-03")


@pytest.mark.parametrize(
    ("receipt", "message"),
    [
        (Receipt("chain_sum", "0.0.1", "{}", 1, 0), "drawn with reasoning-gym 0.0.1"),
        (Receipt("nowhere", procedural.VERSION, "{}", 1, 0), "unknown reasoning-gym dataset"),
        (Receipt("chain_sum", procedural.VERSION, "{", 1, 0), "as JSON"),
        (Receipt("chain_sum", procedural.VERSION, "[]", 1, 0), "as a JSON object"),
        (Receipt("chain_sum", procedural.VERSION, '{"size": 1}', 1, 0), "params.size"),
        (Receipt("chain_sum", procedural.VERSION, "{}", -1, 0), "expected a seed"),
        (Receipt("list_functions", procedural.VERSION, "{}", 1, 2**40), "an index below"),
    ],
)
def test_a_receipt_that_cannot_be_right_is_refused(
    receipt: Receipt, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with pytest.raises(TaskError, match=message):
        procedural.entry_of(receipt)


def test_a_receipt_gives_the_task_that_was_drawn_unless_it_is_larger_than_asked() -> None:
    spec = Spec("gcd", "{}")
    with ProceduralClient() as drawer:
        task = drawer.draw(spec, Split.TRAIN, 0, 3)
        assert task.receipt is not None
        for most in (None, 10_000):
            found = drawer.redraw(spec, task.receipt, most)
            assert found.task.messages == task.messages
            assert (found.task.answer, found.split) == (task.answer, Split.TRAIN)
            assert task.messages[-1].content.endswith(found.question)
        with pytest.raises(OutOfBounds, match="at most 3 characters"):
            drawer.redraw(spec, task.receipt, 3)
