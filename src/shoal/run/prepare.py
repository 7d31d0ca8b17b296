"""Prepares a run: checks its configuration, tasks and model before anything is written or started.

Torch is not loaded. `prepare` leaves nothing behind when it refuses.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

from shoal import checker
from shoal.checker import leaves, needs_tests, task_spec
from shoal.config import Config
from shoal.config.presets import PRESETS
from shoal.config.settings import EMBEDDED
from shoal.errors import ConfigError, ModelError, RunDirError, TaskError, did_you_mean
from shoal.files import ADAPTER_FILE, MODEL_FILE, siblings
from shoal.interfaces import Environment, Scorer
from shoal.model.adapter_targets import check_targets_of_files
from shoal.model.chat_template import ChatRenderer
from shoal.model.file_sizes import longest_row, shapes_of, sizes_of
from shoal.model.quantised import SMOLLM2
from shoal.model.renderer_loading import load_renderer, local_directory
from shoal.observe.trackers import checked_tracker
from shoal.reward.user_functions import FunctionScorer
from shoal.rollout.agents.clients import Agent, agent_of
from shoal.rollout.reward_hooks import hooks_of
from shoal.rollout.single_turn import SingleTurn
from shoal.run.blocking import run_blocking
from shoal.run.machine.devices import Devices, Threads, devices_of
from shoal.run.machine.memory import check_fits
from shoal.sandbox.runner import strongest
from shoal.swarm.strategy.choice import sharer_of, taker_of
from shoal.swarm.wire.invitation import NatsOptions, known_peers
from shoal.tasks.library import library_of
from shoal.tasks.mixture import Mixture
from shoal.tasks.sdk import Definition
from shoal.types import MOST_KEPT, RewardStatus, Sampling, Split, Task

PROBED_TASKS = 64
FOLDERS = ("weights", "logs", "checkpoints", "swarm", "model", "adapter", "archive", "held_out", "tokens")
"""Folders that a run makes in its directory."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A checked configuration, and the parts of its run that need no process."""

    config: Config
    model_dir: Path
    renderer: ChatRenderer
    service: Environment
    max_model_len: int
    longest_prompt: int
    """Tokens of the longest prompt among the probed tasks."""
    devices: Devices = field(default_factory=Devices)
    token: str = ""
    """Token of the run, which roles of other processes must have."""
    threads: Threads = field(default_factory=Threads)
    scorer: Scorer | None = None
    """Scorer in place of the worker processes."""
    single_turn: type[SingleTurn] = SingleTurn
    """Runner of tasks without an agent."""
    hosted: Mapping[str, Environment] = field(default_factory=dict)
    """Environments that other hosts play, too, in place of those of their names."""

    @property
    def environments(self) -> Mapping[str, Environment]:
        """Environments of the run, by name."""
        services = self.service.services if isinstance(self.service, Mixture) else (self.service,)
        return {one.name: self.hosted.get(one.name, one) for one in services}

    @property
    def sampling(self) -> Sampling:
        """Sampling of the training."""
        rollout, stops = self.config.rollout, self.renderer.stop_token_ids
        top_k = rollout.top_k or (MOST_KEPT if rollout.top_p < 1 else 0)
        return Sampling(
            rollout.max_tokens, rollout.temperature, rollout.top_p, top_k, stop_token_ids=stops, seed=self.config.seed
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of a prompt and its answer at most."""
        return min(self.longest_prompt + self.config.rollout.max_tokens, self.max_model_len)

    @property
    def version_file(self) -> str:
        """Name of the file of a Version: an adapter where all engines that load it have its base."""
        engine, listens = self.config.engine, self.config.cluster.listen
        others = (engine.urls and not engine.adapters) or listens
        return ADAPTER_FILE if self.config.train.lora.rank and not others else MODEL_FILE


@contextmanager
def prepare(config: Config, *, trains: bool = True, dry: bool = False, token: str = "") -> Iterator[Prepared]:
    """Checks all that needs no engine. Raises a `ShoalError` and leaves nothing behind."""
    devices = devices_of(config, trains=trains)
    check_model(config.model.path)
    ready = _loaded(config) if Path(config.model.path).expanduser().is_dir() else None
    for task in config.tasks:
        hooks_of(task.name, task.reward)
    agents_of(config)
    with library_of(config, token) as service:
        probed = [service.draw(split, index) for split in Split for index in range(PROBED_TASKS // 2)]
        for environment in service.services:
            environment.check()
        own = {one.name for one in service.services if one.converses or one.scores}
        others = (task_spec(task) for task in probed if task.service not in own)
        if config.reward.workers and any(map(needs_tests, others)):
            strongest()  # raises `SandboxUnavailable`
        run_blocking(check_functions(service.services, config.rollout.group_size))
        if dry:  # in this process: what a task's author opened on this event loop is of no use to a run
            run_blocking(check_scores(service.services, config.rollout.group_size))
        # A model that must be made or fetched first takes minutes, so all mistakes in tasks are reported before.
        model_dir, renderer, max_model_len = ready or _loaded(config)
        prompts = {len(renderer.prompt_ids(task.messages)): task for task in probed}
        _check_lengths(config, prompts, max_model_len)
        made = Prepared(config, model_dir, renderer, service, max_model_len, max(prompts), devices, token)
        if trains and not devices.ranks:
            check_fits(config, model_dir)
        yield made


@contextmanager
def prepare_answering(config: Config) -> Iterator[Prepared]:
    """Prepares a run that trains nothing, in a temporary run directory. Raises a `ShoalError`."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="shoal-"))
        yield stack.enter_context(prepare(config.model_copy(update={"run_dir": folder}), trains=False))


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
    limit = longest_row(sizes_of(model_dir))
    asked = config.engine.max_model_len
    if limit is None and asked is None:
        raise ConfigError(f"engine.max_model_len: the model in {model_dir} has no limit; set one")
    if limit is not None and asked is not None and asked > limit:
        raise ConfigError(f"engine.max_model_len: expected at most the model's {limit} tokens, got {asked}")
    return asked or limit or 0


def check_start(config: Config, *, resume: bool = False) -> None:
    """Raises a `ShoalError` for a run that cannot begin with any model and tasks."""
    swarm = config.swarm
    sharer_of(swarm.share), taker_of(swarm.take)
    if swarm.servers:
        NatsOptions(swarm.servers, swarm.name)
        known_peers()
    elif swarm.external_groups:
        preset = PRESETS.get(config.preset or "", {}).get("swarm.external_groups")
        is_preset = preset is not None and preset.value == swarm.external_groups
        by = f'preset = "{config.preset}" sets {swarm.external_groups}; ' if is_preset else ""
        raise ConfigError(
            f"swarm.external_groups: {by}peers' groups need swarm.servers to come from. "
            "Name servers, or set swarm.external_groups to 0 to train alone"
        )
    for text in config.metrics.trackers:
        checked_tracker(text)
    check_run_dir(Path(config.run_dir), resume=resume)


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """Raises `RunDirError` unless a run can be written (or resumed) there. Leaves nothing behind."""
    log = run_dir / "log.sqlite"
    try:
        if resume and not log.is_file():
            raise RunDirError(f"{run_dir} holds no run to resume: {log} does not exist")
        if not resume and run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
            raise RunDirError(f"{run_dir} exists already; resume it with --resume or choose another run_dir")
        for inner in FOLDERS:
            if (run_dir / inner).exists() and not (run_dir / inner).is_dir():
                raise RunDirError(f"{run_dir / inner}: expected a folder, got a file; move it away")
        parent = next(folder for folder in (run_dir, *run_dir.parents) if os.path.lexists(folder))
        os.rmdir(mkdtemp(dir=parent))
    except OSError as error:
        raise RunDirError(f"run_dir {run_dir} cannot be written: {error.strerror}") from None


def agents_of(config: Config) -> dict[str, Agent]:
    """Agents of tasks that name one. Raises `ConfigError`."""
    return {
        task.name: agent_of(task.agent, f"tasks.{task.name}.agent", task.max_running)
        for task in config.tasks
        if task.agent is not None
    }


async def check_functions(services: Sequence[Environment], answers: int) -> None:
    """Has each reward function score one row's truth, repeated to a group's size, in a separate process.

    Raises `ConfigError` with the cause.
    """
    scorer = FunctionScorer()
    try:
        for service in (one for one in services if not (one.converses or one.scores)):
            task = service.draw(Split.TRAIN, 0)
            for spec in leaves(task_spec(task)):
                if isinstance(spec, checker.Function):
                    await scorer.values(spec, task, [task.answer or ""] * answers)
    except (TaskError, TimeoutError) as error:
        raise ConfigError(f"tasks.{service.name}.scorer: expected rewards of one row's answers, got {error}") from None
    finally:
        await scorer.aclose()


async def check_scores(services: Sequence[Environment], answers: int) -> None:
    """Has each task's own `score` judge one row's truth, given as often as a group has answers, in this process.

    Raises `ConfigError`.
    """
    for service in services:
        if isinstance(service, Definition) and service.scores:
            task = service.draw(Split.TRAIN, 0)
            rewards = await service.score(task, [task.answer or ""] * answers)
            if reward := next((one for one in rewards if one.status is not RewardStatus.SCORED), None):
                raise ConfigError(f"tasks.{service.name}: expected a score of one row, got {reward.evidence}")
