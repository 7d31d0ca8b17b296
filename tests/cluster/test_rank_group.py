"""A group of ranks starts whole or not at all."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any

from shoal.cluster.rank_group import RankGroup
from shoal.cluster.registry import RankRole


class Worker:
    """A rank that answers at once."""

    def __init__(self, name: str) -> None:
        self.name, self.ticks, self.closed = name, 0, False

    async def call(self, request: bytes, timeout_s: float) -> bytes:
        return b""

    def close(self) -> None:
        self.closed = True


class Server:
    """Lets a test join ranks without their connections."""

    def __init__(self) -> None:
        self.use: Callable[[Any, Any], AbstractAsyncContextManager[None]]

    def open(self, kind: object, use: Any) -> None:
        self.use = use

    def close(self, kind: object) -> None: ...

    @contextmanager
    def added(self, routes: Sequence[object]) -> Iterator[None]:
        yield


def test_a_rank_that_leaves_as_the_last_one_joins_starts_no_smaller_group() -> None:
    server, names = Server(), list[str]()

    async def train() -> None:
        async with RankGroup(2).ranks(server) as ranks:  # type: ignore[arg-type]
            names.extend(rank.worker.name for rank in ranks)

    async def join_and_leave() -> None:
        training = asyncio.create_task(train())
        await asyncio.sleep(0)
        first, second, third = (server.use(RankRole(address="127.0.0.1", port=1), Worker(name)) for name in "abc")
        await first.__aenter__()
        await second.__aenter__()  # the group is full; before its task runs, a rank leaves
        await first.__aexit__(None, None, None)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not training.done()
        assert names == []
        await third.__aenter__()
        await training

    asyncio.run(join_and_leave())
    assert names == ["b", "c"]
