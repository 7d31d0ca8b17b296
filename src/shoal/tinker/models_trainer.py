"""The trainer of a Tinker server, as the server sees it: the settings of the models, and one request at a time."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from shoal.config import ModelConfig
from shoal.errors import EngineError, RequestRefused
from shoal.tinker.store import StoredModel
from shoal.trainer.messages import (
    Accumulate,
    Accumulated,
    Adam,
    Close,
    Done,
    FoundRows,
    Gradient,
    GradientDone,
    LoadCheckpoint,
    OfModel,
    Open,
    OptimStep,
    TrainerFailed,
)
from shoal.trainer.worker import TrainerProcess, local_ranks

Trainers: TypeAlias = Callable[[], AbstractAsyncContextManager[TrainerProcess]]
"""A new trainer, without any model yet, while the block lasts."""


@asynccontextmanager
async def _local_trainer(log: Path, threads: int) -> AsyncIterator[TrainerProcess]:
    async with local_ranks(log, threads) as ranks:
        yield TrainerProcess(ranks)


@dataclass(frozen=True)
class ServerSettings:
    """Models by name, the folder of all that the server keeps, and the shares of the machine."""

    bases: Mapping[str, Path]
    folder: Path
    engines: int = 2
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "cpu"


class ModelsTrainer:
    """Client of a trainer process, which another one replaces when it ends.

    Methods raise `ChildDied`, `EngineError`, and `RequestRefused` for a request that changed nothing.
    """

    def __init__(self, settings: ServerSettings, trainers: Trainers | None = None) -> None:
        """Another of the `trainers` comes whenever one ends; without them a process of this host trains."""
        self._bases = settings.bases
        self._model_json = ModelConfig(dtype=settings.dtype, device=settings.device).model_dump_json()
        self._trainers = trainers or partial(_local_trainer, settings.folder / "trainer.log", settings.threads)
        self.replaced = trainers is not None
        """Whether a trainer may end at its start without a failure."""
        self.updates: dict[str, int] = {}
        """Optimizer steps of each model."""
        self.stack = AsyncExitStack()
        self._process: TrainerProcess | None = None

    async def start(self) -> None:
        """Ends the trainer, and starts another without any model."""
        await self.stack.aclose()
        self.updates.clear()
        self._process = await self.stack.enter_async_context(self._trainers())
        await self.accumulate(())

    async def open(self, model: StoredModel) -> None:
        """Opens a model from its state on disk, or as its base is."""
        if model.base not in self._bases:
            raise RequestRefused(f"base_model: expected one of {', '.join(self._bases)}; got {model.base!r}")
        await self.ask(Open(model.id, str(self._bases[model.base]), self._model_json, model.lora))
        if model.folder:
            try:
                await self.ask(LoadCheckpoint(model.folder, model.id, model.optimizer))
            except RequestRefused:
                await self.ask(Close(model.id))
                raise

    async def accumulate(self, jobs: Sequence[Gradient]) -> Sequence[GradientDone | TrainerFailed]:
        """Has gradients computed together; each job has an answer."""
        answer = await self.ask(Accumulate(tuple(jobs)))
        assert isinstance(answer, Accumulated)
        return answer.parts

    async def update(self, model: str, adam: Adam) -> float:
        """Norm of the gradient with which an optimizer step was taken."""
        answer = await self.ask(OptimStep(model, adam))
        assert isinstance(answer, Done)
        assert isinstance(answer.value, float)
        return answer.value

    async def ask(self, request: OfModel | Accumulate) -> Done | Accumulated:
        """Answer of a trainer that did as asked."""
        assert self._process is not None
        answer = await self._process.ask(request)
        assert not isinstance(answer, FoundRows)
        if isinstance(answer, TrainerFailed):
            raise RequestRefused(answer.reason) if answer.refused else EngineError(answer.reason)
        if isinstance(answer, Done) and not isinstance(request, Accumulate):
            self.updates[request.name] = answer.updates
        return answer
