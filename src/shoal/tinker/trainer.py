"""The trainer of the Tinker server, as the server sees it: a process of this host, or one that joined from another."""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from shoal import wire
from shoal.errors import ChildDied, EngineError, RequestRefused
from shoal.net.process import Child, torch_environment
from shoal.tinker import messages as m

ANSWER_TIMEOUT_S = 3600.0


class ModelsTrainer(Protocol):
    """Process that has the models in training."""

    @property
    def replaced(self) -> bool:
        """Whether another one comes whenever it ends, so that even one that ends at its start is no failure."""

    async def exchanged(self, request: m.Request, timeout_s: float) -> bytes:
        """Frame of the answer to a request. Raises `ChildDied` and `TimeoutError`, after which the trainer is gone."""


Trainers: TypeAlias = Callable[[], AbstractAsyncContextManager[ModelsTrainer]]
"""A new trainer, without any model yet, for as long as the block lasts."""


@dataclass(frozen=True, slots=True)
class LocalTrainer:
    """ModelsTrainer process of this host."""

    child: Child
    replaced: bool = False

    async def exchanged(self, request: m.Request, timeout_s: float) -> bytes:
        """Implements `ModelsTrainer`."""
        return await self.child.ask(wire.encode(request), timeout_s)


@asynccontextmanager
async def local_trainer(
    bases: Mapping[str, Path], log: Path, *, threads: int, dtype: str, device: str
) -> AsyncIterator[LocalTrainer]:
    """Starts a trainer process."""
    named = json.dumps({name: str(path) for name, path in bases.items()})
    arguments = ["--threads", str(threads), "--dtype", dtype, "--device", device, named]
    async with Child("trainer", "shoal.tinker.worker", arguments, log, torch_environment(threads)) as child:
        yield LocalTrainer(child)


async def carried_out(trainer: ModelsTrainer, request: m.Request) -> m.CarriedOut:
    """Answer of a trainer that did as asked. Raises `ChildDied`, `EngineError`, and `RequestRefused`."""
    try:
        frame = await trainer.exchanged(request, ANSWER_TIMEOUT_S)
    except TimeoutError:
        raise ChildDied(f"the trainer has not answered {type(request).__name__} for {ANSWER_TIMEOUT_S:g} s") from None
    answer = m.answer_from(frame)
    if isinstance(answer, m.Failed):
        raise RequestRefused(answer.reason) if answer.refused else EngineError(answer.reason)
    return answer
