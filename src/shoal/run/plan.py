"""A plan checks a configuration before anything is written: model, tokenizer, tasks, prompt lengths, memory."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from math import prod
from pathlib import Path

from shoal.checker import needs_tests, task_spec
from shoal.config import Config
from shoal.config.presets import PRESETS
from shoal.config.settings import EMBEDDED
from shoal.errors import ConfigError, ModelError, did_you_mean
from shoal.files import siblings
from shoal.model.adapter_targets import check_targets_of_files
from shoal.model.chat_template import ChatRenderer
from shoal.model.quantised import SMOLLM2
from shoal.model.renderer_loading import load_renderer, local_directory
from shoal.rollout.agents.clients import agent_of
from shoal.rollout.reward_hooks import hooks_of
from shoal.run.blocking import run_blocking
from shoal.run.checks import check_functions, check_scores, check_start, check_urls
from shoal.run.devices import devices_of, gpus_present, visible_gpus
from shoal.run.memory import longest_row, memory_of
from shoal.run.prepared import Prepared, shapes_of, sizes_of
from shoal.run.run_dir import own_mathematics
from shoal.sandbox.runner import strongest
from shoal.tasks.library import library_of
from shoal.trainer.advantage import own_advantage
from shoal.types import Split, Task

PROBED_TASKS = 64


@contextmanager
def prepare(config: Config, *, trains: bool = True, dry: bool = False, token: str = "") -> Iterator[Prepared]:
    """Checks all that needs no engine. Raises a `ShoalError` and leaves nothing behind."""
    devices = devices_of(config, visible_gpus(os.environ, gpus_present()), trains=trains)
    check_model(config.model.path)
    ready = _loaded(config) if Path(config.model.path).expanduser().is_dir() else None
    for task in config.tasks:
        hooks_of(task.name, task.reward)
        if task.agent is not None:
            agent_of(task.agent, f"tasks.{task.name}.agent")
    with library_of(config, token) as service:
        probed = [service.draw(split, index) for split in Split for index in range(PROBED_TASKS // 2)]
        for environment in service.services:
            environment.check()
        own = {one.name for one in service.services if one.converses or one.scores}
        others = (task_spec(task) for task in probed if task.service not in own)
        if not config.reward.urls and any(map(needs_tests, others)):
            strongest()  # raises `SandboxUnavailable`
        run_blocking(check_functions(service.services, config.rollout.group_size))
        if dry:  # in this process: what a task's author opened on this event loop is of no use to a run
            run_blocking(check_scores(service.services, config.rollout.group_size))
        # A model that must be made or fetched first takes minutes, so all mistakes in tasks are reported before.
        model_dir, renderer, max_model_len = ready or _loaded(config)
        prompts = {len(renderer.prompt_ids(task.messages)): task for task in probed}
        _check_lengths(config, prompts, max_model_len)
        yield Prepared(model_dir, renderer, service, max_model_len, max(prompts), devices, token)


def _loaded(config: Config) -> tuple[Path, ChatRenderer, int]:
    """Directory, renderer and context of the configured model. Raises `ModelError` and `ConfigError`."""
    model_dir = model_directory(config.model.path)
    renderer, max_model_len = load_renderer(model_dir), _max_model_len(model_dir, config)
    shapes = shapes_of(model_dir)
    if config.train.lora.rank:
        check_targets_of_files(config.train.lora.targets, shapes)
    return model_dir, renderer, max_model_len


def _check_lengths(config: Config, prompts: Mapping[int, Task], max_model_len: int) -> None:
    """Raises `ConfigError` when prompts, of which there is one of each length, or answers exceed the context."""
    if (longest := max(prompts)) >= max_model_len:
        raise ConfigError(
            f"tasks.{prompts[longest].service}: expected prompts shorter than the model's context of {max_model_len} "
            f"tokens, got one of {longest}"
        )
    if (answer := config.rollout.max_tokens) > max_model_len:
        raise ConfigError(
            f"rollout.max_tokens: expected at most the {max_model_len} tokens of the model's context, got {answer}"
        )


def check_model(path: str) -> None:
    """Refuses the name of a model that is nowhere, before anything takes time. Raises `ModelError`."""
    if path in (*EMBEDDED, SMOLLM2) or Path(path).expanduser().exists():
        return
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        hint = did_you_mean(Path(path).name, [*EMBEDDED, SMOLLM2, *siblings(Path(path).expanduser())])
        raise ModelError(
            f"model {path!r} does not exist: expected a model's directory, a .gguf file, a hub name as OWNER/NAME, or "
            f"one of {', '.join((*EMBEDDED, SMOLLM2))}{hint}"
        )


def model_directory(path: str) -> Path:
    """Directory of a model by its path or name; the embedded ones are made first. Raises `ModelError`."""
    check_model(path)
    if path in EMBEDDED:
        from shoal.run.demo_model.warm_start import RECIPES, demo_model

        return demo_model(RECIPES[path])[0]
    return local_directory(path)


def _max_model_len(model_dir: Path, config: Config) -> int:
    limit = sizes_of(model_dir).max_position_embeddings
    asked = config.engine.max_model_len
    if limit is None and asked is None:
        raise ConfigError(f"engine.max_model_len: the model in {model_dir} has no limit; set one")
    if limit is not None and asked is not None and asked > limit:
        raise ConfigError(f"engine.max_model_len: expected at most the model's {limit} tokens, got {asked}")
    return asked or limit or 0


def plan(config: Config, *, resume: bool = False) -> dict[str, object]:
    """Describes a run for `--dry-run`. Raises the run's errors."""
    check_start(config, resume=resume)
    for setting, name in own_mathematics(config).items():
        if setting == "train.loss":
            from shoal.trainer.loss import own_loss  # loads torch

            own_loss(name)
        else:
            own_advantage(name)
    with prepare(config, dry=True) as prepared:
        unreached = run_blocking(check_urls(config, list(prepared.environments.values())))
        given = {f"not reached: {url}": why for url, why in unreached.items()}
        return {**_plan(config, prepared), **given}


def _plan(config: Config, prepared: Prepared) -> dict[str, object]:
    shapes = shapes_of(prepared.model_dir)
    rows = config.train.groups_per_step * config.rollout.group_size
    memory = memory_of(config, prepared, shapes)
    settings = config.model_dump(mode="json")
    preset = {
        f"{config.preset}: {key}": reduce(lambda node, part: node[part], key.split("."), settings)
        for key in PRESETS.get(config.preset or "", {})
    }
    bound = config.asynchrony.max_staleness
    return {
        "model": str(prepared.model_dir),
        "parameters": sum(map(prod, shapes.values())),
        "tasks": ", ".join(task.name for task in config.tasks),
        "steps": config.train.steps,
        "rollouts_per_step": rows,
        "tokens_per_step_at_most": rows * longest_row(config, prepared),
        **{f"{process}_memory_mb": round(sum(parts.values()) / 1e6, 1) for process, parts in memory.items()},
        "memory_mb": {
            process: {part: round(size / 1e6, 1) for part, size in parts.items() if size}
            for process, parts in memory.items()
        },
        "staleness_bound": bound,
        "staleness_expected": f"about {bound} if the trainer is slower than the engines, below 1 if it is faster"
        if bound
        else "0: generation and training take turns",
        "devices": str(prepared.devices),
        "run_dir": config.run_dir,
        **preset,
    }
