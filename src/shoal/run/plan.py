"""A plan checks a configuration before anything is written: model, tokenizer, tasks, prompt lengths, memory."""

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path

from shoal.checker import needs_tests, task_spec
from shoal.config import Config, OwnLoss, credentials, load, to_toml
from shoal.config.presets import PRESETS
from shoal.config.settings import EMBEDDED
from shoal.errors import ConfigError, RunDirError
from shoal.interfaces import Environment
from shoal.model import MOST_LOGITS
from shoal.model.chat_template import ChatRenderer
from shoal.model.renderer_loading import load_renderer, local_directory
from shoal.rollout.agents.clients import Agent, agent_of
from shoal.rollout.reward_hooks import hooks_of
from shoal.run.checks import check_start
from shoal.run.devices import Devices, devices_of, gpus_present, visible_gpus
from shoal.run.model_files import kv_bytes_per_token, number_in, parameter_count, settings_of, shapes_of
from shoal.run.probe import check_functions, check_scores
from shoal.sandbox.runner import strongest
from shoal.tasks.library import Library, library_of
from shoal.trainer.own_advantage import own_advantage
from shoal.trainer.packing import tokens_per_microbatch
from shoal.types import Split

PROBED_TASKS = 64
WEIGHT_BYTES = 4  # float32, whatever the engine's
TRAINED_BYTES = 12  # gradient and two moments
LOGIT_COPIES = 3  # of a chunk: itself, what the loss keeps of it, and its gradient
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Prepared:
    """Parts of a run that need no process of their own."""

    model_dir: Path
    renderer: ChatRenderer
    service: Environment
    max_model_len: int
    longest_prompt: int
    """Tokens of the longest prompt among the probed tasks."""
    agents: Mapping[str, Agent] = field(default_factory=dict)
    """Agents of tasks that name one."""
    devices: Devices = field(default_factory=Devices)


@contextmanager
def prepare(config: Config, *, trains: bool = True, dry: bool = False) -> Iterator[Prepared]:
    """Checks all that needs no engine. Raises a `ShoalError` and leaves nothing behind."""
    devices = devices_of(config, visible_gpus(os.environ, gpus_present()), trains=trains)
    model_dir = _model_directory(config.model.path)
    renderer = load_renderer(model_dir)
    for task in config.tasks:
        hooks_of(task.name, task.reward)
    max_model_len = _max_model_len(model_dir, config)
    shapes_of(model_dir)
    kv_bytes_per_token(settings_of(model_dir), 1)
    agents = {task.name: agent_of(task.agent) for task in config.tasks if task.agent is not None}
    with library_of(config) as service:
        for environment in service.services:
            environment.check()
        if not config.reward.urls:
            _check_sandbox(service)
        longest = _longest_prompt(service, renderer, max_model_len)
        if config.rollout.max_tokens > max_model_len:
            raise ConfigError(
                f"rollout.max_tokens: expected at most the {max_model_len} tokens of the model's context, "
                f"got {config.rollout.max_tokens}"
            )
        asyncio.run(check_functions(service.services))
        if dry:  # in this process: what a task's author opened on this event loop is of no use to a run
            asyncio.run(check_scores(service.services))
        yield Prepared(model_dir, renderer, service, max_model_len, longest, agents, devices)


def _check_sandbox(service: Library) -> None:
    """Raises `SandboxUnavailable` when tasks run programs and this machine has no sandbox."""
    tasks = (service.draw(split, index) for split in Split for index in range(PROBED_TASKS // 2))
    own = {one.name for one in service.services if one.converses or one.scores}
    if any(needs_tests(task_spec(task)) for task in tasks if task.service not in own):
        strongest()


def _longest_prompt(service: Library, renderer: ChatRenderer, max_model_len: int) -> int:
    """Tokens of the longest prompt among the probed tasks. Raises `ConfigError` when none would fit."""
    longest = 0
    for split in Split:
        for index in range(PROBED_TASKS // 2):
            task = service.draw(split, index)
            length = len(renderer.prompt_ids(task.messages))
            if length >= max_model_len:
                raise ConfigError(
                    f"tasks.{task.service}: expected prompts shorter than the model's context of {max_model_len} "
                    f"tokens, got one of {length}"
                )
            longest = max(longest, length)
    return longest


def own_mathematics(config: Config) -> dict[str, str]:
    """Names of the user's own loss and advantage, by setting."""
    loss, advantage = config.train.loss, config.train.advantage
    own = {"train.loss": loss.function if isinstance(loss, OwnLoss) else "", "train.advantage": advantage}
    return {setting: name for setting, name in own.items() if ":" in name}


def _check_own_mathematics(config: Config) -> None:
    """Tries the user's own loss and advantage on a small example. Raises `ConfigError`. Loads torch for a loss."""
    for setting, name in own_mathematics(config).items():
        if setting == "train.loss":
            from shoal.trainer.own_loss import own_loss

            own_loss(name)
        else:
            own_advantage(name)


def plan(config: Config, *, resume: bool = False) -> dict[str, object]:
    """Describes a run for `--dry-run`. Raises the run's errors."""
    check_start(config, resume=resume)
    _check_own_mathematics(config)
    with prepare(config, dry=True) as prepared:
        return _plan(config, prepared)


def _plan(config: Config, prepared: Prepared) -> dict[str, object]:
    settings = settings_of(prepared.model_dir)
    parameters = parameter_count(prepared.model_dir)
    rows = config.train.groups_per_step * config.rollout.group_size
    row_tokens = min(prepared.longest_prompt + config.rollout.max_tokens, prepared.max_model_len)
    kv_bytes = kv_bytes_per_token(settings, BYTES[config.model.dtype]) * row_tokens * config.engine.max_running
    return {
        "model": str(prepared.model_dir),
        "parameters": parameters,
        "tasks": ", ".join(task.name for task in config.tasks),
        "steps": config.train.steps,
        "rollouts_per_step": rows,
        "tokens_per_step_at_most": rows * row_tokens,
        "engine_memory_mb": round((parameters * BYTES[config.model.dtype] + kv_bytes) / 1e6, 1),
        "trainer_memory_mb": round(_trainer_bytes(config, prepared) / 1e6, 1),
        "staleness_bound": config.asynchrony.max_staleness,
        "staleness_expected": _expected_staleness(config),
        "devices": str(prepared.devices),
        "run_dir": config.run_dir,
        **_preset(config),
    }


def _preset(config: Config) -> dict[str, object]:
    """Settings that came from the preset."""
    tree = config.model_dump(mode="json")
    return {
        f"{config.preset}: {key}": reduce(lambda node, part: node[part], key.split("."), tree)
        for key in PRESETS.get(config.preset or "", {})
    }


def _trainer_bytes(config: Config, prepared: Prepared) -> int:
    """Bytes of each rank: weights, reference, gradient, moments, and one micro-batch in computation."""
    shapes, rank = shapes_of(prepared.model_dir), config.train.lora.rank
    parameters = parameter_count(prepared.model_dir)
    adapters = sum(rank * sum(shape) for name, shape in shapes.items() if _is_adapted(name, shape, config))
    trained = adapters if rank else parameters
    copies = 2 if config.train.kl.coefficient else 1  # and the reference
    kept = (copies * parameters * WEIGHT_BYTES + trained * TRAINED_BYTES) // config.train.ranks
    return kept + _micro_batch_bytes(config, prepared)


def _micro_batch_bytes(config: Config, prepared: Prepared) -> int:
    """Bytes of activations kept for the backward pass and of one chunk of logits; an estimate."""
    settings = settings_of(prepared.model_dir)
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size")
    layers, width, inner, vocabulary = (number_in(settings, name) or 0 for name in names)
    row_tokens = min(prepared.longest_prompt + config.rollout.max_tokens, prepared.max_model_len)
    budget = config.train.tokens_per_microbatch or tokens_per_microbatch(on_gpu=bool(prepared.devices.ranks))
    tokens = max(budget, row_tokens)
    of_layer = 8 * width + 4 * (inner or 4 * width)  # norms, projections, attention, feed-forward
    of_token = layers * width + of_layer if config.model.gradient_checkpointing else layers * of_layer
    logits = LOGIT_COPIES * min(tokens * vocabulary, max(MOST_LOGITS, vocabulary)) * WEIGHT_BYTES
    return tokens * of_token * BYTES[config.model.dtype] + logits


def _is_adapted(name: str, shape: list[int], config: Config) -> bool:
    """Tells whether LoRA adapts a tensor; by default every matrix but the vocabulary's."""
    if len(shape) != 2 or not name.endswith(".weight"):
        return False
    targets = config.train.lora.targets
    layer = name.removesuffix(".weight").rpartition(".")[2]
    return layer in targets if targets else "embed" not in layer and layer != "lm_head"


def _expected_staleness(config: Config) -> str:
    """Describes the staleness that the admission gate permits."""
    max_staleness = config.asynchrony.max_staleness
    if max_staleness == 0:
        return "0: generation and training take turns"
    return f"about {max_staleness} when training is the slower side, below 1 when generation is"


def _model_directory(path: str) -> Path:
    if path in EMBEDDED:
        from shoal.run.demo_model.warm_start import RECIPES, demo_model

        return demo_model(RECIPES[path]).directory
    return local_directory(path)


def _max_model_len(model_dir: Path, config: Config) -> int:
    limit = number_in(settings_of(model_dir), "max_position_embeddings")
    asked = config.engine.max_model_len
    if limit is None and asked is None:
        raise ConfigError(f"engine.max_model_len: the model in {model_dir} names no limit of its own, so set one")
    if limit is not None and asked is not None and asked > limit:
        raise ConfigError(f"engine.max_model_len: expected at most the model's {limit} tokens, got {asked}")
    return asked or limit or 0


def changed_settings(config: Config, run_dir: Path) -> list[str]:
    """Settings that differ from the run's last start: each may, but the run then trains under two configurations."""
    try:
        before, now = load(run_dir / "resolved.toml").model_dump(), config.model_dump()
    except ConfigError:
        return []
    sections = [name for name in now if isinstance(now[name], dict)]
    changed = [f"{name}.{key}" for name in sections for key in now[name] if before[name].get(key) != now[name][key]]
    return changed + [name for name in now if name not in sections and before[name] != now[name]]


def write_resolved(config: Config, run_dir: Path) -> None:
    """Writes the resolved configuration, with credentials in a file of their own. Raises `RunDirError`."""
    hidden: dict[str, str] = {}
    text = to_toml(config, hidden)
    try:
        if hidden:
            _write(run_dir / credentials.FILE, json.dumps(hidden))
        else:
            (run_dir / credentials.FILE).unlink(missing_ok=True)
        _write(run_dir / "resolved.toml", text)
    except OSError as error:
        raise RunDirError(f"{run_dir} cannot be written: {error.strerror}") from error


def _write(path: Path, text: str) -> None:
    """Replaces a file whole, readable by its owner only."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)
