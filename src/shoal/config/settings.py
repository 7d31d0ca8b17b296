"""One tree of settings.

Every field has a default that works, a sentence and a unit. Values that can be derived are not settings.
"""

import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Literal

from pydantic import Field, JsonValue, ValidationError, ValidationInfo, field_validator, model_validator

from shoal.config.complaints import complaint
from shoal.config.presets import DEFAULT_MAX_TOKENS
from shoal.config.processor import multiplies_bfloat16
from shoal.config.remote import ClusterConfig, SwarmConfig
from shoal.config.section import MOST, Section
from shoal.config.training import LOSS_OF, OWN_SETTINGS, UNUSED, DPOLoss, PositiveOnlyLoss, TrainConfig, foreign_setting
from shoal.config.urls import NATS, checked_url
from shoal.staleness import Late, Staleness
from shoal.types import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, MOST_KEPT

EMBEDDED = ("demo", "demo-code", "demo-turns", "demo-sums", "demo-tools")
"""Models that come with Shoal."""
DEFAULT_ADDRESS = "127.0.0.1:8200"  # where task services of other processes register
QUESTIONS, FEWEST, EVAL_SHARE = 128, 8, 0.25
"""Held-out questions if `eval.questions` is unset: most, fewest, and their answers' share of the trained ones."""
ELSEWHERE = {
    "remote": ("params", "scorer", "eval_share", "system_prompt", "rewrite"),
    "python": ("scorer",),
    "turns": ("scorer",),
}
"""Settings of a task that its own process or code has, by service."""


class ModelConfig(Section):
    """The model being trained."""

    path: str = Field(
        "demo",
        description="Directory, hub name, or embedded: `demo`, `demo-code`, `demo-turns`, `demo-sums`, `demo-tools`.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="`auto` takes a GPU when there is one.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "float32", description="Type of weights and activations; `auto` is bfloat16 where the processor multiplies it."
    )
    gradient_checkpointing: bool | Literal["selective"] = Field(
        False,
        description="Computes activations again to save memory; `selective` keeps products of weights.",
    )

    @field_validator("dtype")
    @classmethod
    def _choose_dtype(cls, dtype: str, info: ValidationInfo) -> str:
        """Puts the type in place of `auto`, so that resolved.toml says what computed the run."""
        if dtype != "auto":
            return dtype
        return "bfloat16" if multiplies_bfloat16(gpus=info.data.get("device") != "cpu") else "float32"


class TaskConfig(Section):
    """One task service of the mixture."""

    name: str = Field(description="A reasoning-gym dataset, a task of many turns, or any name.")
    service: Literal["reasoning_gym", "jsonl", "turns", "python", "remote"] = Field(
        "reasoning_gym", description="Source of the tasks; `remote` is `shoal task serve`."
    )
    weight: float = Field(1.0, ge=1e-6, le=1e6, description="Relative share of the trained groups.")
    params: dict[str, JsonValue] | Annotated[int, Field(ge=0)] = Field(
        default_factory=dict, description="Settings of the dataset or task, or its curriculum level."
    )
    path: str | None = Field(
        None,
        description="File, `module:name` (python), workers' address (remote), or game (turns).",
    )
    scorer: str | dict[str, JsonValue] | None = Field(
        None, description="Checker by name, or a table with its parameters; `exact` for files when unset."
    )
    reward: str | list[str] = Field(
        "score",
        description="Hooks after scoring: score, correct (1 or 0), length:PER_TOKEN, dedup, or module:function.",
    )
    eval_share: float = Field(
        0.1, gt=0, lt=1, description="Held-out share of a file's questions; the largest holds for all tasks."
    )
    system_prompt: str = Field(
        "",
        description="Text before every question; `reasoning_gym:default` asks for `<answer>` tags.",
    )
    rewrite: list[tuple[str, str]] = Field(
        [], description="Pairs of regular expression and replacement that shorten questions."
    )
    max_running: int | None = Field(
        None,
        ge=1,
        description="Rollouts of this task at once, at least one group; unset, what its code and the run allow.",
    )
    agent: str | list[str] | dict[str, JsonValue] | None = Field(
        None, description="`module:function`, a command, or a table; see docs/guides/agents.md."
    )


class RolloutConfig(Section):
    """How answers are sampled for training."""

    group_size: int = Field(8, ge=1, le=4096, description="Rollouts per task.")
    max_tokens: int = Field(DEFAULT_MAX_TOKENS, ge=1, description="Answer budget in tokens.")
    temperature: float = Field(1.0, ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE, description="Sampling temperature.")
    top_k: int = Field(0, ge=0, le=MOST_KEPT, description="Most likely tokens to sample from; 0 is all.")
    top_p: float = Field(1.0, gt=0, le=1, description="Share of the probability to sample from, in 512 tokens at most.")
    ratios: Literal["fixed", "chance", "tokens", "automatic"] = Field(
        "fixed",
        description="Weights are shares of groups, chances of each group (SAPO) or shares of tokens, or follow "
        "informative groups.",
    )


class EngineConfig(Section):
    """Where answers come from."""

    urls: list[str] = Field([], description="Running engines (Shoal, vLLM, SGLang); none starts local ones.")
    count: int = Field(1, ge=0, le=1024, description="Local engine processes; with 0 all join from other hosts.")
    gpus: list[Annotated[int, Field(ge=0)]] | Literal["shared"] = Field(
        [], description="GPU numbers, one per engine; after the trainer's when empty, or shared with it."
    )
    max_running: int = Field(128, ge=1, le=65536, description="Sequences decoded at once by the local engine.")
    max_model_len: int | None = Field(None, ge=2, description="Tokens per sequence; the model's own limit when unset.")
    adapters: bool = Field(False, description="Servers of `urls` load adapters instead of merged weights.")
    on_update: Literal["recompute", "keep", "drain"] = Field(
        "recompute", description="Treatment of running answers when new weights come."
    )


class AsyncConfig(Section):
    """How far generation may run ahead of training."""

    max_staleness: int = Field(2, ge=0, description="Staleness bound in versions (AReaL's eta); 0 is synchronous.")
    late: Late = Field("drop", description="Treatment of groups older than max_staleness.")

    @property
    def staleness(self) -> Staleness:
        """The bound with its treatment of late groups, as one value."""
        return Staleness(self.max_staleness, self.late)


class RewardConfig(Section):
    """Where answers are scored."""

    workers: int = Field(
        1, ge=0, le=1024, description="Scoring processes, and sandboxes at once; with 0 scorers join from other hosts."
    )
    timeout_s: float = Field(
        5.0, gt=0, le=86400, description="Processor time per answer; one that takes more is wrong."
    )


class EvalConfig(Section):
    """Held-out questions."""

    every_steps: int = Field(20, ge=0, description="Steps between evaluations; 0 evaluates only before and after.")
    questions: int | None = Field(
        None,
        ge=1,
        description="Held-out questions, by weight. Unset: 8 to 128, at most a quarter of the answers trained "
        "between evaluations.",
    )
    samples: int = Field(1, ge=1, description="Sampled answers per question; 2 or more give pass@k.")


class CheckpointConfig(Section):
    """Checkpoints, which a resumed run loads."""

    asynchronous: bool = Field(
        False, description="The next step runs while copies of weights and moments, or of a Version, are written."
    )
    every_steps: int = Field(
        25,
        ge=1,
        description="Steps between checkpoints; fewer if these take over 2 minutes and 20 times as long as saving.",
    )
    keep: int = Field(2, ge=1, description="Checkpoints kept.")
    backup: str = Field(
        "", description="Folder or URL to which log and checkpoints are copied all along; empty is off."
    )


class LogConfig(Section):
    """How much of the experience log stays in one file."""

    keep_steps: int = Field(200, ge=0, description="Steps in log.sqlite; older ones go to Parquet files; 0 keeps all.")


class MetricsConfig(Section):
    """Further targets of metrics."""

    trackers: list[str] = Field(
        [],
        description="tensorboard, wandb:PROJECT, mlflow:EXPERIMENT (extras of that name), or module:function.",
    )


class StageConfig(Section):
    """One of several stages; each begins with the model of the stage before."""

    kind: Literal["sft", "dpo", "rl"] = Field(description="Imitation, preference pairs, or reinforcement learning.")
    data: str | None = Field(
        None, description="JSONL rows with `messages`, or for dpo `chosen` and `rejected`, which end in the answers."
    )
    train: dict[str, JsonValue] = Field({}, description="Settings of [train] for this stage.")


class Config(Section):
    """A whole run."""

    run_dir: str = Field("runs/latest", description="Everything the run writes.")
    seed: int = Field(0, description="Name in every seed of the run.")
    stall_s: float = Field(120.0, gt=0, description="Seconds without progress before a standstill is handled.")
    preset: Literal["areal", "glm5", "sapo", "dapo"] | None = Field(
        None, description="Published settings, listed below."
    )
    model: ModelConfig = Field(ModelConfig())
    tasks: list[TaskConfig] = Field(min_length=1, description="The mixture.")
    rollout: RolloutConfig = Field(RolloutConfig())
    engine: EngineConfig = Field(EngineConfig())
    asynchrony: AsyncConfig = Field(AsyncConfig())
    train: TrainConfig = Field(TrainConfig())
    reward: RewardConfig = Field(RewardConfig())
    eval: EvalConfig = Field(EvalConfig())
    checkpoint: CheckpointConfig = Field(CheckpointConfig())
    log: LogConfig = Field(LogConfig())
    metrics: MetricsConfig = Field(MetricsConfig())
    swarm: SwarmConfig = Field(SwarmConfig())
    cluster: ClusterConfig = Field(ClusterConfig())
    stages: list[StageConfig] = Field([], description="Stages, in order; by default one of kind rl.")

    def stage(self, index: int) -> "Config":
        """Configuration of one stage, whose model is still this one's. Raises `ValueError`."""
        stage = self.stages[index]
        tree = self.model_dump(exclude_unset=True, exclude={"stages"})
        train = tree.get("train", {})
        if own := OWN_SETTINGS.get(stage.kind):
            # Such a stage samples and scores nothing, and these settings would change its loss.
            tree = {name: section for name, section in tree.items() if name not in UNUSED}
            train = {"loss": LOSS_OF[stage.kind], **{name: value for name, value in train.items() if name in own}}
        tree["train"] = {**train, **stage.train}
        return Config.model_validate({**tree, "run_dir": f"{self.run_dir}/stages/{index}-{stage.kind}"})

    @property
    def held_out_questions(self) -> int:
        """Number of held-out questions of a run: as set, or within a share of what it trains between evaluations."""
        train, steps = self.train, min(self.eval.every_steps or self.train.steps, self.train.steps)
        answers = EVAL_SHARE * steps * train.groups_per_step * self.rollout.group_size
        return self.eval.questions or int(min(max(answers / (self.eval.samples + 1), FEWEST), QUESTIONS))

    @property
    def services_at(self) -> tuple[str, int] | None:
        """Host and port where roles and task services of other processes register; None without any."""
        if self.cluster.listen:
            host, _, port = self.cluster.listen.rpartition(":")
            return host.strip("[]"), int(port)
        for task in self.tasks:
            if task.service == "remote":
                host, _, port = (task.path or DEFAULT_ADDRESS).rpartition(":")
                return host, int(port)
        return None

    @model_validator(mode="after")
    def _consistent(self) -> "Config":
        if complaint := next(
            chain(_in_stages(self), _in_training(self), _in_advantages(self), _in_tasks(self.tasks), _in_roles(self)),
            None,
        ):
            raise ValueError(complaint)
        for url in self.engine.urls:
            checked_url("engine.urls", url)
        for url in self.swarm.servers:
            checked_url("swarm.servers", url, NATS)
        return self


def _in_stages(config: Config) -> Iterator[str]:
    """Complaints about stages, each with its own settings of training."""
    for index, stage in enumerate(config.stages):
        if foreign := foreign_setting(stage.kind, stage.train):
            yield f"stages.{index}.{foreign}"
        if (stage.kind == "rl") != (stage.data is None):
            yield f"stages.{index}.data: expected a file with kind 'sft' or 'dpo', and none with 'rl'"
        try:
            loss = config.stage(index).train.loss
        except ValidationError as error:
            yield f"stages.{index}.{complaint(error, {'train': stage.train}, Config)}"
            continue
        if (stage.kind == "dpo") != isinstance(loss, DPOLoss) or (
            stage.kind == "sft" and not isinstance(loss, PositiveOnlyLoss)
        ):
            yield f"stages.{index}.train.loss: expected the loss of kind {stage.kind!r}, got {loss.name!r}"


def _in_roles(config: Config) -> Iterator[str]:
    """Complaints about roles that no process would fill."""
    yield from config.cluster.complaints(config.train, config.reward.workers)
    for name, count, urls in (
        ("engine.count", config.engine.count, config.engine.urls),
        ("reward.workers", config.reward.workers, []),
    ):
        if not count and not urls and not config.cluster.listen:
            yield f"{name}: expected at least 1 without cluster.listen, where others could join, got 0"


def _in_training(config: Config) -> Iterator[str]:
    """Complaints about settings of training that contradict others."""
    train, rollout = config.train, config.rollout
    if train.teacher is not None and (train.advantage in ("batch", "gae") or train.kl.coefficient):
        yield "train.teacher: expected none with train.kl.coefficient or train.advantage = 'batch' or 'gae'"
    if train.teacher_url is not None and rollout.temperature != 1.0:
        yield f"rollout.temperature: expected 1 with a URL as train.teacher, got {rollout.temperature:g}"
    groups, over_batch = train.groups_per_step, not train.compares_within_groups
    if config.engine.adapters and not (train.lora.rank and config.engine.urls):
        yield "engine.adapters: expected false without engine.urls and a train.lora.rank above 0, got true"
    if groups % train.minibatches:
        yield f"train.minibatches: expected a divisor of groups_per_step = {groups}, got {train.minibatches}"
    if rollout.group_size == 1 and not over_batch:
        yield (
            f"rollout.group_size: expected at least 2 with train.advantage = {train.advantage!r}, got 1: it compares "
            "the answers of a group, so that every advantage would be 0"
        )
    if train.dynamic_sampling and over_batch:
        yield (
            "train.dynamic_sampling: expected false with train.advantage = 'batch' or 'gae', got "
            f"{json.dumps(train.dynamic_sampling)}: groups whose rewards are all equal have a gradient there"
        )
    if (overlong := train.overlong_tokens) >= rollout.max_tokens:
        yield f"train.overlong_tokens: expected less than rollout.max_tokens = {rollout.max_tokens}, got {overlong}"
    if config.asynchrony.late == "mask_tokens" and (train.kl.coefficient or train.entropy_bonus or train.teacher_model):
        yield (
            "asynchrony.late: expected 'drop' or 'train' with train.kl.coefficient or train.entropy_bonus above 0, or "
            "with a loaded model as train.teacher, got 'mask_tokens': each would still train the tokens that it masks"
        )


def _in_advantages(config: Config) -> Iterator[str]:
    """Complaints about peers' groups, and about advantages computed late: by a critic, or after a penalty."""
    train, swarm = config.train, config.swarm
    if train.loss.name in ("gspo", "gmpo") and config.asynchrony.late == "mask_tokens":
        yield (
            f"asynchrony.late: expected 'drop' or 'train' with train.loss = {train.loss.name!r}, whose ratio is of "
            "whole rows and would train late tokens too, got 'mask_tokens'"
        )
    yield from train.complaints()
    if swarm.round_offers and not swarm.wait_s:
        yield "swarm.wait_s: expected more than 0 with swarm.round_offers, whose steps wait for a round, got 0"
    late = {"gae": "are the critic's"}
    if train.kl.coefficient > 0 and train.kl.where == "reward":
        late["batch"] = "come after the KL penalty"
    if train.teacher_model is not None:
        late[train.advantage] = "are the teacher's"
    if swarm.external_groups and swarm.credit != "group" and train.advantage in late:
        yield (
            f"swarm.credit: expected 'group' with train.advantage = {train.advantage!r}, whose advantages "
            f"{late[train.advantage]}, got {swarm.credit!r}"
        )
    if train.advantage != "gae":
        return
    gae = "with train.advantage = 'gae', whose"
    if config.asynchrony.late == "mask_tokens":
        yield f"asynchrony.late: expected 'drop' or 'train' {gae} critic learns from every token, got 'mask_tokens'"
    if train.ranks > 1:
        yield f"train.ranks: expected 1 {gae} critic is not sharded, got {train.ranks}"
    if train.turn_discount != 1:
        yield f"train.turn_discount: expected 1 {gae} critic sees whole rows, got {train.turn_discount:g}"


def _in_tasks(tasks: Sequence[TaskConfig]) -> Iterator[str]:
    """Complaints about duplicate, missing or unreachable tasks."""
    names = [task.name for task in tasks]
    if twice := [name for name in names if names.count(name) > 1]:
        yield f"tasks: names must differ, got {min(twice)!r} twice"
    for task in tasks:
        if task.service == "jsonl" and task.path is None:
            yield f"tasks.{task.name}.path: a jsonl task needs the path of its file"
        if task.agent is not None and (task.service == "remote" or not task.agent):
            yield (
                f"tasks.{task.name}.agent: expected module:function or a command, and none for a remote task, "
                f"got {task.agent!r}"
            )
        for name in ELSEWHERE.get(task.service, ()):
            usual, value = TaskConfig.model_fields[name].get_default(call_default_factory=True), getattr(task, name)
            if value != usual:
                yield f"tasks.{task.name}.{name}: expected none for a {task.service} task, which has it, got {value!r}"
        if task.service == "python" and ":" not in (task.path or ""):
            yield f"tasks.{task.name}.path: a python task needs module:name, got {task.path!r}"
    addresses = {task.path or DEFAULT_ADDRESS for task in tasks if task.service == "remote"}
    ports = [int(found[1]) if (found := re.fullmatch(r".+:(\d{1,5})", address)) else MOST for address in addresses]
    if len(addresses) > 1 or any(port > 65535 for port in ports):
        yield f"tasks: remote ones register at one HOST:PORT, got {', '.join(sorted(addresses))}"
    if any(address.startswith(("0.0.0.0:", "[::]:")) for address in addresses):
        yield "tasks: remote ones need an address of this machine that they can reach, got 0.0.0.0"
