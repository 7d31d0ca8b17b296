"""A run is trained again under other settings, and the groups of its steps are weighed."""

import json
from collections.abc import Callable
from itertools import permutations
from math import log
from pathlib import Path

import pytest
import torch

from buffer_values import group as made_group
from command import shoal
from shoal.config import Config, parse
from shoal.experience.log import read, read_step, weights_of
from shoal.run.commands.replay import settings_of
from shoal.run.commands.whatif import kept_groups, sample_size
from shoal.trainer.advantage import step_samples
from shoal.trainer.ranks import ALONE
from shoal.trainer.row_files import fingerprint
from shoal.trainer.trainer import Trainer
from shoal.types import Group, Sample
from train_runs import finished

STEPS = 12
SETTINGS = (
    f"--train.steps={STEPS}",
    "--train.groups_per_step=8",
    "--train.advantage=grpo_no_std",
    "--train.max_grad_norm=0",
    "--checkpoint.every_steps=5",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Path:
    """A run of twelve steps of eight groups."""
    return finished(tmp_path_factory.mktemp("machine"), tiny_model_dir, *SETTINGS)


def groups_of(run: Path, step: int) -> list[Group]:
    return read(run, lambda connection: read_step(connection, step))


def trained(
    config: Config, model: Path, state: Path | None, steps: dict[int, list[Group]], done: Callable[[int, Trainer], None]
) -> None:
    """Trains groups in this process, as a run with these settings does."""
    trainer = Trainer(model, config.model, config.train, config.rollout.temperature, config.rollout.max_tokens)
    if state is not None:
        trainer.load(state)
    for step, groups in steps.items():
        trainer.step(step_samples(groups, config.train, config.rollout.max_tokens), step, 0)
        trainer.count_push()
        done(step, trainer)


def test_a_what_if_with_equal_settings_is_the_run(run: Path) -> None:
    done = shoal("whatif", str(run), "--from=3", "--until=11", "--json")
    values = json.loads(done.stdout.splitlines()[-1])
    recorded = {str(step + 1): read(run, lambda c, at=step: weights_of(c, at)) for step in range(2, 11)}
    assert values["weights"] == recorded


def test_a_what_if_with_other_settings_is_a_rerun_on_the_same_data(
    run: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = ("--train.loss=cispo", "--train.advantage=rloo", "--train.lr=3e-3")
    out = tmp_path / "out"
    done = shoal("whatif", str(run), "--from=1", "--until=6", *other, f"--out={out}", "--json")
    values = json.loads(done.stdout.splitlines()[-1])
    found: dict[str, str] = {}

    def keep(step: int, trainer: Trainer) -> None:
        found[str(step + 1)] = fingerprint(trainer.tensors(), ALONE)

    torch.set_num_threads(1)
    steps = {step: groups_of(run, step) for step in range(6)}
    trained(settings_of(run, other), tiny_model_dir, None, steps, keep)
    assert values["weights"] == found
    assert values["weights"]["6"] != read(run, lambda connection: weights_of(connection, 5))
    assert 0 < values["ess_least"] < 1
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert (out / "model" / "model.safetensors").is_file()


def test_a_policy_far_from_the_run_is_not_believed_and_a_filter_leaves_groups_out(run: Path) -> None:
    far = shoal("whatif", str(run), "--from=1", "--until=8", "--train.lr=0.1")
    assert "too small to believe" in far.stdout
    assert "believe only what is before" in far.stdout.splitlines()[-1]
    filtered = shoal("whatif", str(run), "--from=1", "--until=4", "--train.dynamic_sampling=true")
    assert "groups left out" in filtered.stdout


def test_a_what_if_refuses_settings_that_would_have_given_other_groups(run: Path) -> None:
    for setting in ("--rollout.temperature=0.5", "--train.groups_per_step=4"):
        done = shoal("whatif", str(run), "--from=1", "--until=2", setting)
        assert done.returncode == 2
        assert setting[2:].partition("=")[0].partition(".")[0] in done.stderr


def test_why_says_in_words_what_moved(run: Path) -> None:
    done = shoal("why", str(run), "--step=4")
    assert "step 4 trained Version 3 on 8 groups, 0 of peers." in done.stdout
    assert "influence  along" in done.stdout
    assert "since the step before" in done.stdout


def test_influence_ranks_groups_as_leaving_each_out_does(run: Path, tiny_model_dir: Path) -> None:
    values = json.loads(shoal("why", str(run), "--step=5", "--json").stdout.splitlines()[-1])
    influence = {one["id"]: one["influence"] for one in values["groups"]}
    groups, config, found = groups_of(run, 4), settings_of(run, ()), dict[str, dict[str, torch.Tensor]]()
    torch.set_num_threads(1)
    for left_out in ("", *(group.id for group in groups)):
        steps = {step: groups_of(run, step) for step in range(4)}
        steps[4] = [group for group in groups if group.id != left_out]

        def keep(step: int, trainer: Trainer, name: str = left_out) -> None:
            found[f"{name}{step}"] = {key: value.double().clone() for key, value in trainer.tensors().items()}

        trained(config, tiny_model_dir, None, steps, keep)

    def distance(one: str, other: str) -> float:
        return sum(float((found[one][key] - found[other][key]).square().sum()) for key in found[one]) ** 0.5

    change = [distance(f"{name}4", "4") / distance("3", "4") for name in influence]
    told = [
        *zip(influence.values(), change, strict=True)
    ]  # a rank correlation falls with two that are as good as equal
    apart = [(one, two) for one, two in permutations(told, 2) if one[0] > two[0] + 0.1 * max(influence.values())]
    assert apart
    assert sum(one[1] > two[1] for one, two in apart) >= 0.9 * len(apart)
    assert max(change) > 2 * min(change)


@pytest.mark.parametrize("far", [0.0, -800.0, 800.0])
def test_an_effective_sample_size_is_that_of_the_ratios_however_far_the_policies_are_apart(far: float) -> None:
    rows = [Sample((1, 2), (0, 1), (0.0, -1000.0), (-1, 0), (0.0, 1.0))] * 3
    assert sample_size({0: [far - 1000.0 + log(3)], 2: [far - 1000.0]}, rows) == pytest.approx(4**2 / (2 * (9 + 1)))
    assert sample_size({}, rows) == 1.0


def test_another_staleness_keeps_the_groups_that_it_would_have_trained() -> None:
    own = parse({"tasks": [{"name": "gcd"}], "asynchrony": {"max_staleness": 4, "late": "drop"}})
    given = [made_group("old", (0, 1)), made_group("new", (2, 3))]
    assert kept_groups(given, 3, own, own) == given
    other = own.model_copy(update={"asynchrony": own.asynchrony.model_copy(update={"max_staleness": 1})})
    assert kept_groups(given, 3, own, other) == given[1:]
