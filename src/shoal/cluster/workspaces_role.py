"""`shoal workspace serve`: a host that plays a run's rollouts in workspaces. It needs no file of the run."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
import msgspec

from shoal.cluster.registry import WorkspacesRole, run_info
from shoal.cluster.workspace_hosts import TREES, PlayRequest, ServedTree
from shoal.errors import EngineUnavailable, SandboxUnavailable, TaskError
from shoal.net.client import Client, session
from shoal.net.joining import Answering, hold_lease
from shoal.sandbox.usage import remove_tree
from shoal.tasks.remote_worker import CONNECTIONS, HttpModel, result_of
from shoal.tasks.sdk import EnvironmentFailed
from shoal.types import Outcome
from shoal.weights.pull import VersionPuller
from shoal.workspace.fork import fork_kind, new_folder, sweep
from shoal.workspace.tree import arrived, tree_named


async def serve_workspaces(url: str, token: str, most: int, announce: Callable[[str], None]) -> None:
    """Plays rollouts until it is cancelled, for one run after another at the same URL. Raises a `ShoalError`."""
    fork_kind()
    sweep()
    client = Client(url, token=token)
    trees = Trees(client)

    async def play(request: bytes, http: aiohttp.ClientSession) -> Outcome:
        asked = msgspec.json.decode(request, type=PlayRequest)
        wanted = msgspec.structs.replace(asked.wanted, tree=asked.tree.digest if asked.tree else "")
        model = HttpModel(asked.base_url, asked.anthropic_base_url, asked.api_key, http)
        try:
            if asked.tree:
                await trees.have(asked.tree)
            return await asked.game.played(wanted, asked.messages, model)
        except (SandboxUnavailable, EngineUnavailable, OSError) as error:  # another host may succeed
            raise EnvironmentFailed(str(error), retry=True) from error

    @asynccontextmanager
    async def working(_: aiohttp.ClientWebSocketResponse) -> AsyncIterator[Answering]:
        async with session(CONNECTIONS) as http:
            yield lambda request: result_of(play(request, http))

    try:
        await hold_lease(url, token, WorkspacesRole(max_running=most), announce, working, run_info)
    finally:
        await client.aclose()


@dataclass(slots=True)
class Trees:
    """Trees of a run on this host. A fetch outlives the rollout that began it: its tree may take longer."""

    client: Client
    fetching: dict[str, asyncio.Task[None]] = field(default_factory=dict)

    async def have(self, tree: ServedTree) -> None:
        """Returns once this host has a tree. Raises `EngineUnavailable` and `TaskError`."""
        with suppress(TaskError):
            await asyncio.to_thread(tree_named, tree.digest)
            return
        if tree.digest not in self.fetching:
            self.fetching[tree.digest] = fetching = asyncio.create_task(self._fetch(tree))
            fetching.add_done_callback(lambda _: self.fetching.pop(tree.digest))
        await asyncio.shield(self.fetching[tree.digest])

    async def _fetch(self, tree: ServedTree) -> None:
        folder = new_folder()
        try:
            puller = VersionPuller(self.client, folder, (await run_info(self.client)).key, TREES)
            await asyncio.to_thread(arrived, await puller.pull(tree.number), tree.digest)
        finally:
            await asyncio.to_thread(remove_tree, str(folder))
