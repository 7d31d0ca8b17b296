"""A rank of a Tinker server's trainer in the process of the tests."""

import asyncio
from concurrent.futures import Future
from pathlib import Path

from shoal import wire
from shoal.tinker.store import Store
from shoal.trainer.messages import Answer, Request, request_from
from shoal.trainer.models import TrainedModels
from shoal.trainer.ranks import ALONE
from shoal.trainer.worker import Server


class RankHere:
    """Implements `interfaces.Worker`: a trainer's rank; tests of failures replace `answer`."""

    ticks = 0

    def __init__(self) -> None:
        self._server = Server(ALONE, TrainedModels(), None)

    async def died(self) -> str:
        await asyncio.Event().wait()
        return ""

    def place(self, folder: Path) -> str:
        return str(folder)

    async def call(self, frame: bytes, timeout_s: float, **folders: Path) -> bytes:
        return wire.encode(self.answer(request_from(frame)))

    def answer(self, request: Request) -> Answer:
        answer = self._server.answer(wire.encode(request))
        assert not isinstance(answer, Future)
        return answer


def nothing_pending(store: Store) -> bool:
    return not store.pending()
