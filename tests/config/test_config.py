"""Settings: checked, named in every complaint, and the same after a round trip."""

import contextlib
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.config import Config, TaskConfig, load, parse, to_toml
from shoal.config.presets import PRESETS
from shoal.config.training import DecoupledLoss, DoubleSidedLoss, GSPOLoss, LossConfig
from shoal.errors import ConfigError

# The one possible `name` of each loss: it says which section is meant, and is nothing to be set within it.
DISCRIMINATORS = [kind.model_fields["name"].annotation for kind in get_args(get_args(LossConfig)[0])]
LOSSES_OF_EACH_KIND = [
    {"name": (name := kind.model_fields["name"].default), **({"function": "module:loss"} if name == "own" else {})}
    for kind in get_args(get_args(LossConfig)[0])
]
TASKS = {"tasks": [{"name": "chain_sum"}]}


def sections_of(field: FieldInfo) -> list[type[BaseModel]]:
    """The sections that a field's value may be."""
    annotation = field.annotation
    found = [annotation, *get_args(annotation)]
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, BaseModel)]


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting below a section that is not itself a section, with its dotted name."""
    for name, field in section.model_fields.items():
        inner = sections_of(field)
        if not inner and field.annotation not in DISCRIMINATORS:
            yield f"{prefix}{name}", field
        for one in inner:
            yield from leaves(one, f"{prefix}{name}{'.' + one.__name__ if len(inner) > 1 else ''}.")


def test_the_defaults_train_with_a_list_of_tasks_alone() -> None:
    config = parse(TASKS)
    assert config.tasks == [TaskConfig(name="chain_sum")]
    assert config.train.loss == DecoupledLoss()


def test_there_are_at_most_110_settings_and_each_has_a_sentence() -> None:
    found = dict(leaves(Config))
    # Losses share settings: train.loss.clip_low is one, whichever of them reads it.
    assert 40 < len({re.sub(r"\.[A-Z]\w+(?=\.)", "", name) for name in found}) <= 110
    for name, field in found.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("0.0.0.0:8200", "tasks: remote ones need an address of this machine that they can reach, got 0.0.0.0"),
        ("somewhere", "tasks: remote ones register at one HOST:PORT, got somewhere"),
    ],
)
def test_remote_tasks_register_at_an_address_that_they_can_reach(path: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse({"tasks": [{"name": "sums", "service": "remote", "path": path}]})
    at = parse({"tasks": [{"name": "sums", "service": "remote"}]}).services_at
    assert at == ("127.0.0.1", 8200)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("params", {"n": 1}),
        ("scorer", "exact"),
        ("eval_share", 0.5),
        ("system_prompt", "Hi"),
        ("rewrite", [["a", "b"]]),
    ],
)
def test_a_remote_task_has_no_setting_that_only_its_own_process_could_follow(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"tasks.sums.{name}: expected none for a remote task, which has it"):
        parse({"tasks": [{"name": "sums", "service": "remote", name: value}]})


def test_every_section_says_what_it_is_about() -> None:
    for _, field in Config.model_fields.items():
        for section in sections_of(field):
            assert section.__doc__


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("train.grops_per_step=4", "train.grops_per_step: unknown setting; did you mean 'train.groups_per_step'?"),
        ("asynchony.max_staleness=1", "asynchony: unknown setting; did you mean 'asynchrony'?"),
        ("tasks.0.wieght=1", "tasks.0.wieght: unknown setting; did you mean 'tasks.0.weight'?"),
        ("model.zzzzzzzz=1", "model.zzzzzzzz: unknown setting; docs/reference/configuration.md lists the settings"),
        ("train.steps=0", "train.steps: expected at least 1, got 0"),
        ("train.minibatches=3", "train.minibatches: expected a divisor of groups_per_step = 8, got 3"),
        ("train.overlong_tokens=256", "train.overlong_tokens: expected less than rollout.max_tokens = 256, got 256"),
        (
            "train={loss = 'gmpo', advantage = 'gae'}",
            "train.loss: expected not 'gmpo' with advantages that differ within a row (gae, turn_discount)",
        ),
        (
            "train={loss = 'm2po', teacher = 'models/big'}",
            "train.loss: expected not 'm2po' with a teacher or train.kl.where = 'reward', which change advantages",
        ),
        (
            "train={advantage = 'maxrl', overlong_tokens = 8}",
            "train.overlong_tokens: expected 0 with train.advantage = 'maxrl', whose rewards are 0 and 1",
        ),
        (
            "train.loss={name = 'dppo_tv', weight_cap = 0.5}",
            "train.loss.weight_cap: expected more than 1, or 0 for no bound, got 0.5",
        ),
        (
            "asynchrony.late=mask_tokens",
            "asynchrony.late: expected 'drop' or 'train' with train.kl.coefficient or train.entropy_bonus above 0, or "
            "with a loaded model as train.teacher, got 'mask_tokens': each would still train the tokens that it masks",
        ),
        (
            "swarm={external_groups = 2, round_offers = 3}",
            "swarm.wait_s: expected more than 0 with swarm.round_offers, whose steps wait for a round, got 0",
        ),
        (
            'swarm={external_groups = 2, credit = "group_likely"}',
            "swarm.credit: expected 'group' with train.advantage = 'gae', whose advantages are the critic's, got "
            "'group_likely'",
        ),
        (
            'train={advantage = "batch", kl = {coefficient = 0.1, where = "reward"}}',
            "swarm.credit: expected 'group' with train.advantage = 'batch', whose advantages come after the KL "
            "penalty, got 'group_likely'",
        ),
        (
            'train={advantage = "batch", dynamic_sampling = true}',
            "train.dynamic_sampling: expected false with train.advantage = 'batch' or 'gae', got true: groups whose "
            "rewards are all equal have a gradient there",
        ),
        (
            "rollout.temperature=1e-39",
            "rollout.temperature: expected at least 1e-05, got 1e-39",
        ),
        ("rollout.max_tokens=0", "rollout.max_tokens: expected at least 1, got 0"),
        ("tasks.1.name=x", "tasks.1.name: expected an index below 1, got '1'"),
        ("seed.x=1", "seed.x: 'seed' is a value, not a section"),
        ("seed.x.y=1", "seed.x.y: 'seed' is a value, not a section"),
        ("train", "override 'train': expected --section.key=value"),
    ],
)
def test_a_wrong_setting_is_named_with_what_was_expected(override: str, complaint: str) -> None:
    advantage = {"advantage": "gae"} if override.startswith("swarm") else {}
    swarm = {"external_groups": 2} if complaint.startswith("swarm") else {}
    with pytest.raises(ConfigError) as caught:
        parse({"seed": 0, "train": {"entropy_bonus": 0.01, **advantage}, "swarm": swarm, **TASKS}, [override])
    assert str(caught.value) == complaint


def test_a_misspelled_setting_of_a_loss_is_answered_with_that_loss_s_settings() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train.loss.clip_low'\?"):
        parse({**TASKS, "train": {"loss": {"name": "double_sided", "clip_lo": 0.5}}})


def test_misspelled_settings_of_every_loss_and_of_sections_within_sections_are_answered() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'train.loss.clip_high'\?"):
        parse({**TASKS, "train": {"loss": {"name": "gspo", "clip_hi": 0.5}}})
    with pytest.raises(ConfigError, match=r"did you mean 'train.kl.coefficient'\?"):
        parse(TASKS, ["train.kl.coeficient=0.1"])


def test_parameters_of_a_loss_without_a_name_are_the_default_loss_s() -> None:
    loss = parse(TASKS, ["train.loss.weight_cap=3"]).train.loss
    assert isinstance(loss, DecoupledLoss)
    assert loss.weight_cap == 3


def test_two_tasks_of_one_name_and_a_jsonl_task_without_a_file_are_refused() -> None:
    with pytest.raises(ConfigError, match="tasks: names must differ, got 'a' twice"):
        parse({"tasks": [{"name": "a"}, {"name": "a"}]})
    with pytest.raises(ConfigError, match=r"tasks\.a\.path: a jsonl task needs the path of its file"):
        parse({"tasks": [{"name": "a", "service": "jsonl"}]})


def test_a_list_of_tasks_is_required_and_not_empty() -> None:
    with pytest.raises(ConfigError, match="tasks: expected at least one table"):
        parse({})
    with pytest.raises(ConfigError, match="tasks: "):
        parse({"tasks": []})


@pytest.mark.parametrize("value", ["false", '"off"', '""', '"no"', "0"])
def test_behaviour_correction_cannot_be_turned_off_without_saying_that_it_biases(value: str) -> None:
    with pytest.raises(ConfigError, match=r"train\.loss\.behaviour_correction"):
        parse({**TASKS, "train": {"loss": {"name": "decoupled"}}}, [f"train.loss.behaviour_correction={value}"])


def test_behaviour_correction_is_on_unless_the_words_say_otherwise() -> None:
    loss = parse({**TASKS, "train": {"loss": {"name": "decoupled"}}}).train.loss
    assert isinstance(loss, DecoupledLoss)
    assert loss.behaviour_correction == "on"
    off = parse(
        {**TASKS, "train": {"loss": {"name": "decoupled", "behaviour_correction": "off_and_biased"}}}
    ).train.loss
    assert isinstance(off, DecoupledLoss)
    assert off.behaviour_correction == "off_and_biased"


def test_overrides_take_toml_values_and_bare_words() -> None:
    config = parse(
        dict(TASKS), ["--train.lr=1e-4", "model.path=some/model", "train.betas=[0.8, 0.95]", "tasks.0.weight=2"]
    )
    assert config.train.lr == 1e-4
    assert config.model.path == "some/model"
    assert config.train.betas == (0.8, 0.95)
    assert config.tasks[0].weight == 2.0


@given(
    max_staleness=st.integers(0, 64),
    lr=st.floats(1e-9, 1.0),
    prompt=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20),
    params=st.dictionaries(st.text("abc_", min_size=1, max_size=5), st.integers(-9, 9) | st.booleans(), max_size=3),
    loss=st.sampled_from(LOSSES_OF_EACH_KIND),
)
def test_a_configuration_is_the_same_after_being_written_and_read(max_staleness, lr, prompt, params, loss) -> None:
    config = parse(
        {
            "tasks": [{"name": "chain_sum", "system_prompt": prompt, "params": params, "rewrite": [["a+", prompt]]}],
            "asynchrony": {"max_staleness": max_staleness},
            "train": {"lr": lr, "loss": loss},
        }
    )
    assert parse(tomllib.loads(to_toml(config))) == config


def test_a_file_is_read_with_overrides_on_top(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('[[tasks]]\nname = "chain_sum"\n[train]\nsteps = 7\nlr = 1e-3\n')
    config = load(path, ["--train.steps=9"])
    assert (config.train.steps, config.train.lr) == (9, 1e-3)


def test_paths_in_a_file_are_relative_to_it_and_those_of_overrides_to_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "model").mkdir(parents=True)
    path = tmp_path / "there" / "run.toml"
    path.write_text('[model]\npath = "model"\n[[tasks]]\nname = "a"\nservice = "jsonl"\npath = "a.jsonl"\n')
    with contextlib.chdir(tmp_path / "here"):
        config, other = load(path), load(path, ["tasks.0.path=b.jsonl", "model.path=org/name"])
    assert (config.model.path, config.tasks[0].path) == (f"{path.parent}/model", f"{path.parent}/a.jsonl")
    assert (other.model.path, other.tasks[0].path) == ("org/name", f"{tmp_path}/here/b.jsonl")


def test_files_of_code_are_relative_to_the_configuration_too(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        """
[[tasks]]
name = "words"
service = "jsonl"
path = "q.jsonl"
agent = { run = "agent.py:speak", timeout_s = 5 }
reward = ["mine.py:hook", "length:0.1"]
scorer = { name = "weighted", parts = [{ scorer = { name = "function", path = "mine.py:f" }, weight = 1.0 }] }
[train]
loss = "mine.py:loss"
advantage = "mine:advantage"
"""
    )
    config = load(file)
    (task,) = config.tasks
    assert task.agent == {"run": f"{tmp_path}/agent.py:speak", "timeout_s": 5}
    assert task.reward == [f"{tmp_path}/mine.py:hook", "length:0.1"]
    assert f"{tmp_path}/mine.py:f" in str(task.scorer)
    assert config.train.advantage == "mine:advantage"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [(None, "does not exist"), (b"steps =", "is not TOML"), (b"\xff\xfe", "cannot be read")],
)
def test_a_file_that_cannot_be_used_is_named(content: bytes | None, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"run.toml {complaint}"):
        load(path)


OFF = {"dual_clip": 0.0, "weight_cap": 0.0}
PAPERS: dict[str, dict[str, Any]] = {
    # arXiv 2505.24298: table 3 (batch 512 x 16, 4 minibatches, eps .2, global advantages, Adam 2e-5, .05, .9 / .95,
    # clip 1.0, temperature 1), equation 5, eta 8 for mathematics; equation 3 is its only bound on staleness.
    "areal": {
        "train.groups_per_step": 512, "rollout.group_size": 16, "train.minibatches": 4, "rollout.temperature": 1,
        "train.loss": {"name": "decoupled", "clip_low": 0.2, "clip_high": 0.2, "behaviour_correction": "on", **OFF},
        "train.advantage": "batch", "train.kl.coefficient": 0, "train.lr": 2e-5, "train.lr_schedule": "constant",
        "train.weight_decay": 0.05, "train.betas": (0.9, 0.95), "train.max_grad_norm": 1, "train.short_groups": "keep",
        "asynchrony.max_staleness": 8, "asynchrony.late": "train", "engine.on_update": "recompute",
        "train.dynamic_sampling": False, "train.entropy_bonus": 0,
    },
    # arXiv 2602.15763, section 4.1 (no std, padding, reset at a push, drop by age); the band as its follow-up has it.
    "glm5": {
        "train.loss": {"name": "double_sided", "clip_low": 0.3, "clip_high": 5.0}, "train.advantage": "grpo_no_std",
        "train.short_groups": "pad", "train.reset_optimizer_at_push": True, "asynchrony.late": "drop",
        "train.push_every": 1, "train.max_grad_norm": 0, "train.dynamic_sampling": False, "train.kl.coefficient": 0,
    },
    # arXiv 2509.08721: eight nodes, I = J = 4, 8 completions, GRPO without KL, .2 / .28, Adam with its defaults.
    "sapo": {
        "train.groups_per_step": 4, "swarm.external_groups": 4, "rollout.group_size": 8, "rollout.ratios": "chance",
        "train.loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0},
        "train.advantage": "grpo", "train.kl.coefficient": 0, "train.lr": 1e-3, "train.betas": (0.9, 0.999),
        "train.weight_decay": 0, "train.lr_schedule": "constant", "train.warmup_steps": 0, "train.max_grad_norm": 0,
        "train.short_groups": "keep", "train.minibatches": 1, "train.dynamic_sampling": False,
        "asynchrony.max_staleness": 0, "swarm.share": "all", "swarm.take": "uniform", "swarm.credit": "group",
        "swarm.reuse": 1, "swarm.datasets": "any",
        "swarm.round_offers": (8 - 1) * 4, "swarm.wait_s": 600,
    },
    # arXiv 2503.14476: equation 8, sections 2.3, 3.1 to 3.4 and 4.1 (512 x 16, 16 updates, 1e-6, warm-up of 20 steps).
    "dapo": {
        "train.groups_per_step": 512, "rollout.group_size": 16, "train.minibatches": 16, "train.warmup_steps": 20 * 16,
        "train.loss": {"name": "grpo", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0},
        "train.advantage": "grpo", "train.loss_mean": "tokens", "train.dynamic_sampling": True,
        "train.overlong_tokens": 4096, "train.kl.coefficient": 0, "train.lr": 1e-6, "train.lr_schedule": "constant",
        "train.max_grad_norm": 0, "train.short_groups": "keep", "asynchrony.max_staleness": 0,
    },
}  # fmt: skip
"""Values as the papers print them, and the absence of what they do not name; typed from the papers, not the code."""


@pytest.mark.parametrize("name", PAPERS)
def test_a_preset_is_its_paper_and_nothing_else(name: str) -> None:
    config = parse({**TASKS, "preset": name, "rollout": {"max_tokens": 20_480}})
    for key, wanted in PAPERS[name].items():
        value = key_of(config, key)
        if isinstance(wanted, dict):
            assert wanted.items() <= value.model_dump().items()
        else:
            assert value == wanted, key
    assert PRESETS[name].keys() <= PAPERS[name].keys(), "each value of a preset has its place in the table"


@pytest.mark.parametrize("name", PRESETS)
def test_one_s_own_settings_win_over_a_preset(name: str) -> None:
    config = parse({**TASKS, "preset": name, "rollout": {"max_tokens": 100}})
    own = parse({**TASKS, "preset": name, "train": {"loss": {"name": "gspo"}}}, ["train.groups_per_step=64"])
    assert (own.train.loss, own.train.groups_per_step) == (GSPOLoss(), 64)
    assert parse(tomllib.loads(to_toml(config))) == config


def test_a_part_of_a_preset_s_loss_can_be_set_by_itself() -> None:
    config = parse({**TASKS, "train": {"loss": {"clip_high": 3.0}}}, ["preset=glm5"])
    assert config.train.loss == DoubleSidedLoss(clip_low=0.3, clip_high=3.0)


@pytest.mark.parametrize(
    "train",
    [
        {"advantage": "gae"},
        {"advantage": "batch", "kl": {"coefficient": 0.1, "where": "reward"}},
        {"teacher": "models/big"},
        {"teacher": "models/big", "advantage": "rloo"},
    ],
)
def test_what_changes_rows_is_refused_where_the_trainer_puts_its_own_advantages_in_their_place(train: Any) -> None:
    with pytest.raises(ConfigError, match=r"^asynchrony\.late: expected 'drop' or 'train'"):
        parse({**TASKS, "train": train, "asynchrony": {"late": "mask_tokens"}})
    with pytest.raises(ConfigError, match=r"^swarm\.credit: expected 'group'"):
        parse({**TASKS, "train": train, "swarm": {"external_groups": 2, "credit": "group_likely"}})
    assert parse({**TASKS, "train": train, "swarm": {"external_groups": 2, "credit": "group"}}).train.loss.name


@pytest.mark.parametrize("loss", ["gspo", "gmpo"])
def test_a_ratio_of_whole_rows_is_refused_where_late_tokens_are_masked(loss: str) -> None:
    with pytest.raises(ConfigError, match=f"asynchrony.late: expected 'drop' or 'train' with train.loss = '{loss}'"):
        parse({**TASKS, "train": {"loss": loss}, "asynchrony": {"late": "mask_tokens"}})


def test_the_presets_are_those_that_the_setting_takes() -> None:
    assert set(PRESETS) == set(PAPERS) == {*get_args(get_args(Config.model_fields["preset"].annotation)[0])}


def key_of(config: Config, key: str) -> Any:
    """The value of a dotted setting."""
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("seed=99999999999999999999", "seed: expected a number of at most 64 bits"),
        ("tasks.0.weight=inf", "tasks.0.weight: expected a finite number, got inf"),
        ("tasks.0.params.x=nan", "tasks.0.params.x: expected a finite number, got nan"),
        ("tasks.0.params=[1]", "tasks.0.params: expected a table or a whole number"),
        ("tasks.0.params.day=1979-05-27", "tasks.0.params.day: expected text or a number, got the date 1979-05-27"),
        ("run_dir=\udcff", r"run_dir: expected text in UTF-8 without NUL, got '\udcff'"),
        ("train.steps=1000000000000", "train.steps: expected at most 1000000000, got 1000000000000"),
        ("train.critic.lr=2", "train.critic.lr: expected at most 1, got 2"),
        ("swarm.fresh_s=1e300", "swarm.fresh_s: expected at most 1000000000, got 1e+300"),
        ("train.betas=[1, 2]", "train.betas.0: expected less than 1, got 1"),
        ("train.lr=inf", "train.lr: expected a finite number, got inf"),
        (f"train.lr={'[' * 3000}", "train.lr is nested too deeply"),
        (f"tasks.0.params.x={'[' * 40}{']' * 40}", "tasks is nested too deeply: expected at most 32 levels"),
    ],
)
def test_values_that_nothing_could_work_with_are_refused_wherever_they_stand(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(TASKS, [override])
    assert str(caught.value).startswith(complaint)


def test_nothing_of_a_configuration_can_be_changed_later() -> None:
    config = parse(TASKS)
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 1.0  # type: ignore[misc]


@given(
    steps=st.integers(1, 10**4),
    every=st.integers(0, 10**4),
    groups=st.integers(1, 64),
    size=st.integers(2, 64),
    samples=st.integers(1, 8),
)
def test_an_evaluation_by_default_answers_less_than_a_quarter_of_what_is_trained_between_two(
    steps: int, every: int, groups: int, size: int, samples: int
) -> None:
    tree = {
        "train": {"steps": steps, "groups_per_step": groups},
        "eval": {"every_steps": every, "samples": samples},
        "rollout": {"group_size": size},
    }
    questions = parse({**TASKS, **tree}).held_out_questions
    trained = min(every or steps, steps) * groups * size
    assert questions in range(8, 129)
    assert questions == 8 or questions * (samples + 1) <= trained / 4
    assert questions == 128 or (questions + 1) * (samples + 1) > trained / 4
    assert parse({**TASKS, **tree}, ["eval.questions=3"]).held_out_questions == 3


def test_a_run_of_the_default_settings_has_128_held_out_questions() -> None:
    assert parse(TASKS).held_out_questions == 128
