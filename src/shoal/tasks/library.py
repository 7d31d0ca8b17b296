"""The environments that a configuration names."""

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from shoal.config import Config, TaskConfig
from shoal.errors import TaskError, expected_one_of
from shoal.interfaces import Environment
from shoal.net.client import TOKEN_VARIABLE
from shoal.tasks.holdout import EVAL_SHARE, HeldOut, check_rewrite
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.mixture import Mixture
from shoal.tasks.procedural_client import ProceduralClient, ReasoningGymService
from shoal.tasks.remote_environment import RemoteEnvironment, TaskServer
from shoal.tasks.sdk import Definition, definition_at
from shoal.types import Split

WORKER_TIMEOUT_S = 600.0
GAMES = ("guess_number", "hanoi", "calculator", "workspace")
"""Names of the tasks of many turns that come with Shoal, in `shoal.environments`."""


def written(config: TaskConfig, seed: int) -> Definition:
    """The task of an author, or of Shoal's own games, with the settings of the configuration. Raises `TaskError`."""
    check_rewrite(config.name, config.rewrite)
    path = config.path or config.name
    if config.service == "turns":
        if path not in GAMES:
            raise TaskError(f"tasks.{config.name}: {expected_one_of(GAMES, path)}")
        path = f"shoal.environments.{'workspace' if path == 'workspace' else 'games'}:{path}"
    if isinstance(config.params, int):
        raise TaskError(f"tasks.{config.name}.params: expected a table, got the level {config.params}")
    found = definition_at(path)
    return dataclasses.replace(
        found,
        name=config.name,
        eval_share=config.eval_share if config.service == "turns" else found.eval_share,
        seed=seed,
        system_prompt=config.system_prompt,
        rewrite=config.rewrite,
    ).given(config.params)


def share_of(tasks: Sequence[TaskConfig]) -> float:
    """The largest share of held-out questions among the tasks, which holds for all of them. Raises `TaskError`."""
    return max(map(_own_share, tasks))


def _own_share(config: TaskConfig) -> float:
    if config.service in ("jsonl", "turns"):
        return config.eval_share
    return definition_at(config.path or config.name).eval_share if config.service == "python" else EVAL_SHARE


def held_out(tasks: Sequence[TaskConfig]) -> HeldOut:
    """The questions of files that no stage of a run may train on. Raises `TaskError`."""
    share = share_of(tasks)
    files = [_file(config, 0, share) for config in tasks if config.service == "jsonl"]
    return HeldOut({question for file in files for question in file.epochs.held_out})


def _file(config: TaskConfig, seed: int, share: float) -> JsonlService:
    return JsonlService(config.model_copy(update={"eval_share": share}), seed)


class Library(Mixture):
    """The mixture that a configuration describes, with the processes it needs: one that draws, and a task server.

    A context manager. Its environments share one split: no question that one holds out is trained by another.
    """

    task_server: TaskServer | None = None

    def __init__(
        self, tasks: Sequence[TaskConfig], seed: int, at: tuple[str, int] | None = None, token: str = ""
    ) -> None:
        """Checks every task, by drawing its first question too. Raises `TaskError`.

        Waits for the workers that serve tasks in other processes; workers register `at` this host and port.
        """
        with ExitStack() as stack:
            if any(config.service == "reasoning_gym" for config in tasks):
                self._drawer = stack.enter_context(ProceduralClient())
            if remote := [config.name for config in tasks if config.service == "remote"]:
                (host, port), token = at or ("127.0.0.1", 0), token or os.environ.get(TOKEN_VARIABLE, "")
                self.task_server = stack.enter_context(TaskServer(remote, host=host, port=port, token=token))
            self._share = share_of(tasks)
            super().__init__([self._made(config, seed) for config in tasks], [config.weight for config in tasks])
            self.notes = list(self._left_out())
            for service in self.services:
                for split in Split:
                    service.draw(split, 0)
            self._open = stack.pop_all()

    def _made(self, config: TaskConfig, seed: int) -> Environment:
        if config.service == "reasoning_gym":
            return ReasoningGymService(config, seed, self._drawer, self._share)
        if config.service == "jsonl":
            return _file(config, seed, self._share)
        if self.task_server is None or config.service != "remote":
            return dataclasses.replace(written(config, seed), eval_share=self._share)
        service = RemoteEnvironment(config.name, self.task_server)
        service.await_worker(WORKER_TIMEOUT_S)
        return service

    def _left_out(self) -> Iterator[str]:
        """Sentences about rows of files that are not drawn; a file's small held-out half binds the others too."""
        files = [service for service in self.services if isinstance(service, JsonlService)]
        held = {question for file in files for question in file.epochs.held_out}
        for file in files:
            yield from file.notes
            if count := file.epochs.leave_out(held):
                yield f"{file.name}: {count} training questions are left out, which another task holds out"

    def __enter__(self) -> "Library":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()


def library_of(config: Config, token: str = "") -> Library:
    """The environments of a run, whose workers need its token. Raises `TaskError`."""
    return Library(config.tasks, config.seed, config.services_at, token)
