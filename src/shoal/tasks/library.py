"""The task services that a configuration names."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType

from shoal import checker
from shoal.config import Config, TaskConfig
from shoal.interfaces import TaskService
from shoal.tasks.games import turns_service
from shoal.tasks.holdout import check_rewrite
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.mixture import Mixture
from shoal.tasks.procedural_client import ProceduralClient, Spec
from shoal.tasks.remote_protocol import TOKEN_VARIABLE
from shoal.tasks.remote_server import TaskServerThread
from shoal.tasks.remote_tasks import RemoteService
from shoal.tasks.sdk import definition_at
from shoal.types import Split, Task

PRESENT_TIMEOUT_S = 120.0


def _settings(config: TaskConfig) -> tuple[str, int | None]:
    """A dataset's settings as JSON, and the level of its curriculum if the configuration names a level."""
    return ("{}", config.params) if isinstance(config.params, int) else (json.dumps(config.params), None)


class ReasoningGymService:
    """Draws from one reasoning-gym dataset, with its settings or a level of its curriculum."""

    def __init__(self, config: TaskConfig, seed: int, drawer: ProceduralClient) -> None:
        """Raises `TaskError` naming the dataset or the setting that is wrong."""
        check_rewrite(config.name, config.rewrite)
        settings = drawer.config_json(config.name, *_settings(config))
        info = "{}"
        if config.scorer is not None:
            scorer = checker.spec_of(config.scorer, f"tasks.{config.name}.scorer")
            info = json.dumps({"scorer": checker.to_json(scorer)})
        self._spec = Spec(config.name, settings, config.system_prompt, tuple(config.rewrite), info)
        self._seed = seed
        self._drawer = drawer

    @property
    def name(self) -> str:
        """The dataset's name."""
        return self._spec.dataset

    @property
    def spec(self) -> Spec:
        """Settings that its questions depend on, besides split, seed and index."""
        return self._spec

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`, mostly in 0.3 ms, for some puzzles in 0.1 s. Raises `TaskError`."""
        return self._drawer.draw(self._spec, split, self._seed, index)


def _service(
    config: TaskConfig, seed: int, drawer: ProceduralClient | None, task_server: TaskServerThread | None
) -> TaskService:
    """The service that a task names. Raises `TaskError`."""
    match config.service:
        case "jsonl":
            return JsonlService(config, seed)
        case "turns":
            return turns_service(config, seed)
        case "python":
            served = definition_at(config.path or "")
            return served.renamed(config.name, served.max_running)
        case "remote":
            assert task_server is not None
            service = RemoteService(config.name, task_server)
            service.present(PRESENT_TIMEOUT_S)
            return service
        case "reasoning_gym":
            assert drawer is not None
            return ReasoningGymService(config, seed, drawer)


class Library(Mixture):
    """The mixture that a configuration describes, with the processes it needs: one that draws, and a task server.

    A context manager.
    """

    def __init__(self, tasks: Sequence[TaskConfig], seed: int, at: tuple[str, int] | None = None) -> None:
        """Checks every task, by drawing its first question too. Raises `TaskError`.

        Waits for the workers that serve tasks in other processes; workers register `at` this host and port.
        """
        with ExitStack() as stack:
            drawer = task_server = None
            if any(config.service == "reasoning_gym" for config in tasks):
                drawer = stack.enter_context(ProceduralClient())
            if remote := [config.name for config in tasks if config.service == "remote"]:
                (host, port), token = at or ("127.0.0.1", 0), os.environ.get(TOKEN_VARIABLE, "")
                task_server = stack.enter_context(TaskServerThread(remote, host=host, port=port, token=token))
            services = [_service(config, seed, drawer, task_server) for config in tasks]
            self.task_server = task_server
            super().__init__(services, [config.weight for config in tasks])
            for service in services:
                for split in Split:
                    service.draw(split, 0)
            self._open = stack.pop_all()

    def __enter__(self) -> "Library":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process that draws, and the task server."""
        self._open.close()


def library_of(config: Config) -> Library:
    """The task services of a run. Raises `TaskError`."""
    return Library(config.tasks, config.seed, config.services_at)
