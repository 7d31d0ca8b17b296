"""`shoal rehearse` and `shoal plan` on the first example: figures that say the same thing in two ways agree."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine_models import saved
from shoal.cli import app
from shoal.config import load
from shoal.model.file_sizes import sizes_of
from shoal.rehearsal.costs import shape_of
from shoal.rehearsal.rehearse import rehearse
from shoal.rehearsal.scene import figures_of
from shoal.rehearsal.search import SHORT_STEPS, answers_of, hardware_of, scene_of, searched

EXAMPLE = Path(__file__).parents[2] / "examples" / "start" / "first" / "run.toml"
GROUPS, SIZE, ANSWER, PRICE = 16, 8, 256, 3.0
SETTINGS = (
    *("--model.path=Qwen/Qwen3-8B", f"--train.groups_per_step={GROUPS}", f"--rollout.group_size={SIZE}"),
    *("--rollout.max_tokens=1024", f"--train.steps={SHORT_STEPS}"),
)
GPUS = ("--gpus=8+8x2", "--gpu=h200", f"--answer-tokens={ANSWER}", "--prompt-tokens=64")


def figures(command: str, *more: str) -> dict[str, Any]:
    """What a command prints for programs."""
    done = CliRunner().invoke(app, [command, str(EXAMPLE), *SETTINGS, *GPUS, "--json", *more])
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def rehearsed() -> dict[str, Any]:
    """Figures of a rehearsal with a given price."""
    return figures("rehearse", f"--usd-per-gpu-hour={PRICE}")


def test_steps_tokens_and_seconds_agree(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["steps"] == SHORT_STEPS
    low, high = rehearsed["step_s_90"]
    assert low <= rehearsed["step_s"] <= high
    assert rehearsed["tokens_per_s"] * rehearsed["step_s"] == pytest.approx(GROUPS * SIZE * ANSWER, rel=0.15)
    assert 0.5 * SHORT_STEPS * rehearsed["step_s"] < 3600 * rehearsed["hours"] < 2 * SHORT_STEPS * rehearsed["step_s"]


def test_the_distribution_of_staleness_has_its_mean_and_keeps_the_bound(rehearsed: dict[str, Any]) -> None:
    shares = {int(versions): share for versions, share in rehearsed["staleness"].items()}
    assert sum(shares.values()) == pytest.approx(1)
    mean = sum(versions * share for versions, share in shares.items())
    assert mean == pytest.approx(rehearsed["staleness_mean"], abs=1e-6)
    assert max(shares) <= 2, "asynchrony.max_staleness of the example"


def test_money_is_gpus_times_hours_times_price(rehearsed: dict[str, Any]) -> None:
    assert rehearsed["usd_per_hour"] == pytest.approx(16 * PRICE)
    assert rehearsed["usd"] == pytest.approx(16 * PRICE * rehearsed["hours"])
    tokens_per_hour = 3600 * rehearsed["tokens_per_s"]
    assert rehearsed["usd_per_million_tokens"] * tokens_per_hour / 1e6 == pytest.approx(rehearsed["usd_per_hour"])


def test_a_plan_has_the_figures_of_the_rehearsal_of_the_same_steps(rehearsed: dict[str, Any]) -> None:
    planned = figures("plan")
    for name in ("step_s", "tokens_per_s", "engines_idle", "trainer_idle", "staleness_mean"):
        assert planned[name] == pytest.approx(rehearsed[name]), name
    slower_s = max(planned["generation_s"], planned["training_s"])
    assert 0.8 * slower_s < planned["step_s"] < 3 * (planned["generation_s"] + planned["training_s"])


def test_a_search_for_a_low_rate_finds_few_gpus_and_says_what_they_cost() -> None:
    few = ("--train.groups_per_step=2", "--rollout.group_size=4")
    found = figures("rehearse", f"--usd-per-gpu-hour={PRICE}", "--tokens-per-s=100", *few)
    split = found["split"]
    assert split["engines"] % split["per_engine"] == 0
    assert split["trainer"] + split["engines"] <= 4, "a quarter of the given GPUs reaches it"
    assert found["figures"]["tokens_per_s"] >= 100
    assert found["figures"]["usd_per_hour"] == pytest.approx((split["trainer"] + split["engines"]) * PRICE)


def test_a_rate_that_no_split_reaches_is_searched_with_more_answers_at_once() -> None:
    settings = load(EXAMPLE, [word.removeprefix("--") for word in SETTINGS] + ["engine.max_running=8"])
    answers = answers_of(settings, None, ANSWER, 64)
    hardware = hardware_of(settings, "2+2", "h200", answers, PRICE)
    wanted: dict[str, Any] = {"tokens_per_s": 1e9, "powers": (0,), "bounds": (1,)}
    narrow = searched(settings, hardware, answers, **wanted, scales=(1,))
    wide = searched(settings, hardware, answers, **wanted, scales=(0.5, 1, 2))
    assert (narrow.max_running, wide.max_running) == (8, 16)
    assert (narrow.groups_per_step, wide.split) == (GROUPS, narrow.split)
    assert wide.figures.tokens_per_s > 1.3 * narrow.figures.tokens_per_s


def test_short_answers_get_a_trainer_of_more_than_half_of_the_gpus() -> None:
    settings = load(EXAMPLE, [word.removeprefix("--") for word in SETTINGS])
    answers = answers_of(settings, None, 40, 2000)
    hardware = hardware_of(settings, "2+6", "h200", answers, PRICE)
    found = searched(settings, hardware, answers, tokens_per_s=1e9, powers=(0,), bounds=(4,), scales=(1,))
    assert found.split.trainer > found.split.engines


def test_no_rehearsed_rate_is_above_that_of_the_slower_side_alone() -> None:
    """A search leaves out splits whose slower side is too slow; with more answers ahead engines are faster."""
    words = [word.removeprefix("--") for word in SETTINGS]
    more = ["train.groups_per_step=8", "asynchrony.max_staleness=4", "rollout.max_tokens=4096"]
    settings = load(EXAMPLE, [*words, "model.path=qwen3-30b-a3b", *more])
    answers = answers_of(settings, None, 3000, 64)
    scene = scene_of(settings, hardware_of(settings, "16+16", "h100", answers, PRICE), answers)
    possible = scene.rollouts * answers.mean / scene.step_s
    assert figures_of(scene, rehearse(scene), 8, PRICE).tokens_per_s < 1.05 * possible


def test_a_token_uses_its_own_experts_of_a_directory_of_a_mixture(tmp_path: Path) -> None:
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    path = saved("Qwen3Moe", tmp_path, num_key_value_heads=2, head_dim=8, **experts)
    shape, sizes = shape_of(str(path)), sizes_of(path)
    one_expert = 3 * sizes.hidden_size * 24
    assert shape.parameters - shape.active == pytest.approx(sizes.num_hidden_layers * (6 - 2) * one_expert)
