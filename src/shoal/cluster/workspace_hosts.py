"""Hosts that play rollouts in workspaces, as the run sees them; `cluster.workspaces_role` is the other side.

A rollout goes where the smallest share of the places is taken. Its tree goes to a host once, as a Version does: as a
signed manifest of shards.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from shoal.cluster.registry import WorkspacesRole
from shoal.environments.workspace import WorkspaceGame
from shoal.errors import ShoalError
from shoal.interfaces import Environment, Model
from shoal.net.client import decoded
from shoal.net.identity import Identity
from shoal.net.process import cores
from shoal.net.run_server import LeasedWorker, RunServer
from shoal.sandbox.usage import remove_tree
from shoal.tasks.remote_environment import MARGIN_S
from shoal.tasks.remote_protocol import JobDone, JobFailed, Result
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed
from shoal.types import Message, Outcome, Split, Task
from shoal.weights.manifest import Digest
from shoal.weights.serving import VersionServer
from shoal.workspace.fork import new_folder, sweep
from shoal.workspace.task import WorkspaceTask, prepared_tree
from shoal.workspace.tree import Tree, pack

TREES = "/v1/trees"
"""Path below which trees are served."""
KEPT_TREES = 32
"""Packed trees that no rollout has hosts fetch, the last used ones."""
REST_S = 5.0
"""Seconds for which a host that failed gets no rollout."""


class ServedTree(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Number under which the run serves a tree, and the tree's digest."""

    number: Annotated[int, msgspec.Meta(ge=1)]
    digest: Digest


class PlayRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A rollout. The task names no tree: a path would be one of the host's."""

    game: WorkspaceGame
    wanted: WorkspaceTask
    messages: tuple[Message, ...]
    tree: ServedTree | None
    """None where the task has its files."""
    base_url: str
    anthropic_base_url: str
    api_key: str


@dataclass(slots=True)
class _Host:
    """Places for rollouts; those of the run's own host have no worker."""

    worker: LeasedWorker | None
    most: int
    running: int = 0
    rests_until_s: float = 0.0

    def rest(self) -> None:
        """Has it get no rollout for a while."""
        self.rests_until_s = asyncio.get_running_loop().time() + REST_S


class WorkspaceHosts:
    """Hosts of a run that play rollouts in workspaces."""

    def __init__(self, folder: Path, identity: Identity) -> None:
        """Packed trees go to `folder`."""
        self._hosts: dict[str, _Host] = {}
        self._folder, self._numbers = folder, itertools.count(1)
        self._packed: dict[str, asyncio.Task[int]] = {}
        self._fetching = Counter[str]()  # rollouts that have hosts fetch a tree
        self._freed = asyncio.Event()
        self.versions = VersionServer(self, folder, identity, TREES)

    def directory_of(self, version: int) -> Path:
        """Folder of a packed tree, by its number."""
        return self._folder / str(version)

    @property
    def places(self) -> int:
        """Rollouts at once of all hosts."""
        return sum(host.most for host in self._hosts.values())

    @asynccontextmanager
    async def joined(self, role: WorkspacesRole, worker: LeasedWorker) -> AsyncIterator[None]:
        """Gives a host rollouts within the block."""
        self._hosts[worker.name] = _Host(worker, role.max_running)
        try:
            yield
        finally:
            del self._hosts[worker.name]

    @asynccontextmanager
    async def place(self, own: _Host, *, travels: bool) -> AsyncIterator[_Host]:
        """A place, taken within the block: of the host that has the smallest share taken, once one has room."""
        while True:
            now_s = asyncio.get_running_loop().time()
            others = [one for one in self._hosts.values() if travels and one.rests_until_s <= now_s]
            host = min((own, *others), key=lambda one: one.running / one.most)
            if host.running < host.most:
                break
            self._freed.clear()
            with suppress(TimeoutError):  # after a rest a host takes rollouts again
                await asyncio.wait_for(self._freed.wait(), REST_S)
        host.running += 1
        try:
            yield host
        finally:
            host.running -= 1
            self._freed.set()

    @asynccontextmanager
    async def serving(self, tree: Tree) -> AsyncIterator[ServedTree]:
        """Serves a tree within the block, once it is packed. Raises `OSError`."""
        self._fetching[tree.digest] += 1
        try:
            packing = self._packed.pop(tree.digest, None)
            if packing is None or (packing.done() and packing.exception()):
                packing = asyncio.create_task(self._pack(tree))
            self._packed[tree.digest] = packing  # as the one that was used last
            yield ServedTree(await asyncio.shield(packing), tree.digest)
        finally:
            self._fetching[tree.digest] -= 1

    async def _pack(self, tree: Tree) -> int:
        number = next(self._numbers)
        idle = [digest for digest, one in self._packed.items() if one.done() and not self._fetching[digest]]
        for packed in map(self._packed.pop, idle[:-KEPT_TREES]):
            if not packed.exception():
                await asyncio.to_thread(remove_tree, str(self.directory_of(packed.result())))
        folder = self.directory_of(number)
        folder.mkdir()
        try:
            await asyncio.to_thread(pack, tree, folder)
        except OSError:
            await asyncio.to_thread(remove_tree, str(folder))
            raise
        return number


class HostedWorkspaces(Environment):
    """A task of workspaces whose rollouts other hosts play, too."""

    converses = True

    def __init__(self, own: Definition, hosts: WorkspaceHosts) -> None:
        self.name, self._own, self._hosts = own.name, own, hosts
        self._here = _Host(None, own.max_running or cores())

    @property
    def questions(self) -> Sequence[Task]:
        """The training tasks where they are a fixed set."""
        return self._own.questions

    @property
    def timeout_s(self) -> float:
        """Seconds that one rollout may take."""
        return self._own.timeout_s

    @property
    def max_running(self) -> int:
        """Rollouts at once, of all hosts."""
        return self._here.most + self._hosts.places

    def draw(self, split: Split, index: int) -> Task:
        """The task at an index."""
        return self._own.draw(split, index)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Plays where most room is. Raises `EnvironmentFailed` where another host may succeed, and as the task does."""
        if not self._hosts.places:
            async with self._hosts.place(self._here, travels=False):
                return await self._own.rollout(task, model)
        wanted = self._own.author.task_of(task)
        tree = await asyncio.to_thread(prepared_tree, wanted) if wanted.tree else None
        wanted = msgspec.structs.replace(wanted, tree=tree.digest if tree else "")
        travels = tree is None or len(tree.layers) == 1  # layers of a snapshot do not
        async with self._hosts.place(self._here, travels=travels) as host:
            if host.worker is None:
                return await self._own.author.played(wanted, task.messages, model)  # type: ignore[no-any-return]
            if tree is None:
                return await self._elsewhere(host, host.worker, wanted, None, task, model)
            try:
                async with self._hosts.serving(tree) as served:
                    return await self._elsewhere(host, host.worker, wanted, served, task, model)
            except OSError as error:
                raise EnvironmentFailed(f"its tree cannot be packed for other hosts: {error}") from error

    async def _elsewhere(
        self,
        host: _Host,
        worker: LeasedWorker,
        wanted: WorkspaceTask,
        tree: ServedTree | None,
        task: Task,
        model: Model,
    ) -> Outcome:
        wanted = msgspec.structs.replace(wanted, tree="")
        urls = model.base_url, model.anthropic_base_url, model.api_key
        request = msgspec.json.encode(PlayRequest(self._own.author, wanted, task.messages, tree, *urls))
        try:
            answer = await worker.call(request, self.timeout_s + MARGIN_S)
            done: Result = decoded(answer, Result, worker.name)  # type: ignore[arg-type]
            if isinstance(done, JobDone):
                return decoded(bytes(done.value), Outcome, worker.name)
        except asyncio.CancelledError:  # most likely the rollout's deadline
            host.rest()
            raise
        except (ShoalError, TimeoutError) as error:
            done = JobFailed(str(error), retry=True)
        if done.by_policy:
            raise PolicyFailed(done.reason)
        if done.retry:
            host.rest()
        raise EnvironmentFailed(f"{worker.name}: {done.reason}", retry=done.retry)


@contextmanager
def hosted(
    environments: Mapping[str, Environment], server: RunServer, identity: Identity
) -> Iterator[Mapping[str, Environment]]:
    """The tasks of workspaces among these, for hosts that join within the block. A group that forks stays here."""

    def travels(one: Environment) -> bool:
        game = one.author if isinstance(one, Definition) and not one.rewrite else None
        return type(game) is WorkspaceGame and not game.fork_after

    games = {name: one for name, one in environments.items() if isinstance(one, Definition) and travels(one)}
    if not games:
        yield {}
        return
    sweep()
    folder = new_folder()
    hosts = WorkspaceHosts(folder, identity)
    try:
        with server.added(hosts.versions.routes):
            server.open(WorkspacesRole, hosts.joined)
            yield {name: HostedWorkspaces(one, hosts) for name, one in games.items()}
    finally:
        server.close(WorkspacesRole)
        remove_tree(str(folder))
