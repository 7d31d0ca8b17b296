"""The task services that a configuration names."""

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType

from shoal import checker
from shoal.config import Config, TaskConfig
from shoal.interfaces import TaskService
from shoal.tasks.drawer import Drawer, Spec
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.mixture import Mixture
from shoal.tasks.split import check_rewrite
from shoal.types import Split, Task


class ReasoningGymService:
    """One reasoning-gym dataset by name, with its settings or the level of its curriculum."""

    def __init__(self, config: TaskConfig, seed: int, drawer: Drawer) -> None:
        """Raises `TaskError` naming the dataset or the setting that is wrong."""
        check_rewrite(config.name, config.rewrite)
        settings = drawer.config_json(config.name, json.dumps(config.params), config.curriculum_level)
        self._spec = Spec(config.name, settings, config.system_prompt, tuple(config.rewrite))
        self._seed = seed
        self._drawer = drawer
        self._info: str | None = None
        if config.scorer is not None:
            spec = checker.spec_of(config.scorer, f"tasks.{config.name}.scorer")
            self._info = json.dumps({"scorer": checker.to_json(spec)})

    @property
    def name(self) -> str:
        """Of the dataset."""
        return self._spec.dataset

    @property
    def spec(self) -> Spec:
        """What its questions depend on besides split, seed and index."""
        return self._spec

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; mostly 0.3 ms, for some puzzles 0.1 s. Raises `TaskError`."""
        task = self._drawer.draw(self._spec, split, self._seed, index)
        return task if self._info is None else replace(task, info=self._info)


class Library(Mixture):
    """The mixture that a configuration describes, and the process that draws its questions. A context manager."""

    def __init__(self, tasks: Sequence[TaskConfig], seed: int) -> None:
        """Checks every task, by drawing its first question too. Raises `TaskError`."""
        with ExitStack() as stack:
            services: list[TaskService] = []
            drawer: Drawer | None = None
            if any(config.service == "reasoning_gym" for config in tasks):
                drawer = stack.enter_context(Drawer())
            for config in tasks:
                if config.service == "jsonl":
                    services.append(JsonlService(config, seed))
                else:
                    assert drawer is not None
                    services.append(ReasoningGymService(config, seed, drawer))
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
        """Ends the process that draws."""
        self._open.close()


def library_of(config: Config) -> Library:
    """The task services of a run. Raises `TaskError`."""
    return Library(config.tasks, config.seed)
