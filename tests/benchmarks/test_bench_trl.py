"""The parts of the comparison with TRL that need no TRL; the comparison itself is `shoal bench trl`."""

import random
import subprocess
import sys
import time

import msgspec
import pytest

from benchmarks import run_bench
from benchmarks.model import STOPS, VOCABULARY, mean_length, write_ending_model
from benchmarks.trl import (
    ETA,
    FIXED,
    VARIED,
    WARMUP_STEPS,
    Round,
    ShoalFigures,
    compared,
    environments,
    observed,
    shoal_figures,
)
from benchmarks.trl_side import TrlFigures, TrlRun
from benchmarks.work import GROUP_SIZE, DigitService, coin, digits
from shoal.errors import ConfigError
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.model.renderer_loading import load_renderer
from shoal.types import Split


def test_mean_length_is_that_of_a_geometric_draw_cut_at_the_budget():
    generator = random.Random(0)
    p = len(STOPS) / VOCABULARY

    def length(most):
        return next((n for n in range(1, most) if generator.random() < p), most)

    for most in (8, 256):
        drawn = [length(most) for _ in range(20_000)]
        assert mean_length(most) == pytest.approx(sum(drawn) / len(drawn), rel=0.02)
    assert mean_length(256) == pytest.approx(34, rel=0.01)
    assert mean_length(1) == pytest.approx(1)


def test_every_position_of_the_ending_model_ends_an_answer_with_the_same_chance(tmp_path):
    import torch

    write_ending_model(tmp_path)
    stops = load_renderer(tmp_path).stop_token_ids
    assert len(stops) == len(STOPS)
    generator = random.Random(0)
    tokens = [generator.randrange(6, VOCABULARY) for _ in range(200)]
    model = load_model(tmp_path)
    assert model.config.vocab_size == VOCABULARY
    rows = [[*tokens[:at], stop] for at in range(1, 200, 9) for stop in stops]
    with torch.no_grad():
        logp_T = packed_logprobs(
            model, torch.tensor([token for row in rows for token in row]), [len(row) for row in rows]
        )
    ends = torch.tensor([len(row) for row in rows]).cumsum(0) - 1
    chance = logp_T[ends].exp().view(-1, len(stops)).sum(1)
    assert float(chance.mean()) == pytest.approx(len(STOPS) / VOCABULARY, rel=0.03)
    assert float((chance.max() - chance.min()) / chance.mean()) < 0.1


def test_the_coin_gives_most_groups_something_to_learn():
    groups = [{coin(f"{digits(8 * g + i)}") for i in range(GROUP_SIZE)} for g in range(200)]
    assert sum(len(group) == 2 for group in groups) > 190


def test_questions_are_eight_digits_and_differ():
    asked = [DigitService().draw(Split.TRAIN, index).messages[0].content for index in range(500)]
    assert len(set(asked)) == 500
    assert all(len(question) == 8 and question.isdigit() for question in asked)


def test_a_run_for_trl_survives_the_command_line():
    run = TrlRun("dir", 2, 64, 4, 1, 64, 256, 1e-6, True, "mixed", 30.0)
    assert msgspec.json.decode(msgspec.json.encode([run]), type=list[TrlRun]) == [run]


def step(length, dropped=0):
    return {
        "kind": "step",
        "length_mean": length,
        "engine_busy": 0.5,
        "trainer_busy": 0.75,
        "dropped_late": dropped,
    }


def test_steps_before_the_queue_is_full_are_not_counted():
    warmup = WARMUP_STEPS + ETA
    steps = [(100.0 * k, step(1.0, dropped=1)) for k in range(warmup)]
    began_s = steps[-1][0]
    steps += [(began_s + 2.0 * k, step(30.0)) for k in range(1, 5)]
    figures = shoal_figures(steps, staleness_max=3)
    assert figures == ShoalFigures(32.0, 4, 30.0, 0.5, 0.75, 3, warmup)


def test_the_ratio_is_that_of_the_best_rounds():
    shoal = [Round(ShoalFigures(rate, 20, 33.0, 0.9, 0.8, 4, 0), 0.1, "") for rate in (50.0, 60.0)]
    trl = [Round(TrlFigures(rate, 12, 34.0, 200), 0.2, f"setting {rate:g}") for rate in (20.0, 10.0)]
    report = compared(VARIED, shoal, trl)
    assert report["ratio"] == 3.0
    assert report["shoal_rounds"] == [50.0, 60.0]
    assert report["trl_other_cores"] == [0.2, 0.2]
    assert report["length_expected"] == mean_length(256)
    assert report["trl_setting"] == "setting 20"
    assert compared(FIXED, shoal, trl)["length_expected"] == 32.0


def test_cores_that_other_processes_use_are_seen():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as other:
        # On a crowded machine the other process waits for a core as well: any of several looks may see it run.
        seen = any(observed("", lambda: time.sleep(1.0)).other_cores > 0.2 for _ in range(10))
        other.kill()
    assert seen


def test_trl_may_have_every_environment_that_shoal_has():
    from shoal.net.process import torch_environment

    offered = environments(2)
    assert offered["quiet"] == torch_environment(2)
    assert not any(name.startswith("MALLOC_") for name in offered["quiet with the usual malloc"])
    assert offered["plain with Shoal's malloc"]["MALLOC_ARENA_MAX"] == torch_environment(2)["MALLOC_ARENA_MAX"]


def test_an_unknown_benchmark_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"expected one of async, .*trl, .*got 'speed'"):
        run_bench("speed", quick=True)


def test_dtypes_are_named_when_another_is_given():
    with pytest.raises(ConfigError, match="expected --dtype float32 or bfloat16, got 'int8'"):
        run_bench("trl", quick=True, dtype="int8")
