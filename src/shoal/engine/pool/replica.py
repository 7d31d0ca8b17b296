"""Replica: an engine of the pool, its required methods, its known state, and requests to it.

A replica that gives a wrong answer, or fails many requests in a row while others answer, rests. After
`MOST_WRONG` wrong answers it is left out, unless enough good ones came between them. The same holds for a replica
whose answers depart from those of the others, unless a later look finds them alike.
"""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Protocol, TypeVar

from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import EngineUnavailable
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.interfaces import EngineInfo
from shoal.types import Completion, Sampling

TURN_S = 2.0


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model by the folder of its files. A name is of these files: other files at the same path have another one."""

    folder: Path | None = None
    """None: the pool's own weights, without an adapter."""
    whole: str = ""
    """Name of the whole model; empty for the pool's own weights."""
    adapter: str = ""
    """Name of the adapter; empty without one."""

    @classmethod
    def at(cls, folder: Path | None) -> "NamedModel":
        """The model of an adapter or of all weights in a folder. Reads the disk."""
        if folder is None:
            return cls()
        is_adapter = (folder / ADAPTER_FILE).is_file()
        file = folder / (ADAPTER_FILE if is_adapter else MODEL_FILE)
        name = f"{folder}@{file.stat().st_mtime_ns if file.exists() else 0}"
        return cls(folder, adapter=name) if is_adapter else cls(folder, whole=name)


class NumberedWeights:
    """Version numbers under which engines load named models. An engine of another host pulls them by number.

    Invariant: numbers increase, also across restarts, since they count from the microsecond of the start.
    """

    def __init__(self) -> None:
        self._next = count(time.time_ns() // 1000)
        self._folders: dict[int, Path] = {}

    @contextmanager
    def number(self, folder: Path) -> Iterator[int]:
        """A new number of the weights in a folder, valid inside the block."""
        number = next(self._next)
        self._folders[number] = folder
        try:
            yield number
        finally:
            del self._folders[number]

    def directory_of(self, version: int) -> Path:
        """Implements `weights.serving.Versions`."""
        folder = self._folders.get(version)
        if folder is None:
            raise FileNotFoundError(f"no engine loads weights {version} now")
        return folder


REST_S, LONGEST_REST_S = 5.0, 60.0
MOST_WRONG = 3
FORGIVEN_AFTER = 100
"""Good answers in a row after which one wrong answer is forgotten."""
FAILURES_IN_A_ROW = 8
MOST_ADAPTERS = 48
"""Adapters that a replica keeps loaded; the least recently used one goes first."""
KEPT_ROWS = 8
"""Newest sampled rows of a replica that wait for a comparison."""

T = TypeVar("T")


class ReplicaState(StrEnum):
    """States of a replica."""

    READY = "ready"
    """The replica takes requests."""
    UPDATING = "updating"
    """The replica loads weights: its requests continue, and new requests go elsewhere where possible."""
    AWAY = "away"
    """The replica did not answer, or serves the wrong weights."""


class PoolEngine(Protocol):
    """Protocol that an engine must satisfy to join a pool; see `interfaces.Engine`."""

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, n: int = 1, priority: int = 0, adapter: str = ""
    ) -> list[Completion]:
        """Samples `n` completions of one prompt, with a loaded adapter if it is named."""

    async def scored(
        self, token_ids: Sequence[int], others: int | list[list[int]] = 0, *, adapter: str = ""
    ) -> ScoreResponse:
        """Logprobs in nats at temperature 1 of tokens 1..L-1 given the tokens before them.

        `others` asks also for so many likely tokens, or for the listed ones, in the place of each.
        """

    async def update_weights(self, version: int, path: Path) -> None:
        """Serves the weights at `path` as `version`."""

    async def load_adapter(self, name: str, version: int, path: Path) -> dict[str, int]:
        """Loads an adapter, a directory in the form of peft; returns the Versions of all adapters by name."""

    async def unload_adapter(self, name: str) -> dict[str, int]:
        """Forgets an adapter; returns the Versions of the others by name."""

    async def info(self) -> EngineInfo:
        """Figures of the engine."""

    async def alive(self) -> None:
        """Returns when the engine answers. Raises `EngineUnavailable` otherwise."""

    async def abort(self) -> None:
        """Ends all requests and returns their sampled tokens."""

    async def aclose(self) -> None:
        """Closes the connections."""


@dataclass(slots=True, eq=False)
class LoadedAdapter:
    """Adapter of a replica."""

    name: str
    version: int
    users: int = 0
    """Requests that it answers now."""


class ReplicaAdapters:
    """Adapters that a pool has loaded into one engine since its start.

    Invariant: an adapter stays loaded while a request uses it.
    """

    def __init__(self, engine: PoolEngine, numbers: NumberedWeights) -> None:
        self._engine, self._numbers = engine, numbers
        self._loaded: OrderedDict[str, LoadedAdapter] = OrderedDict()  # last used last
        self._loading = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def used(self, model: NamedModel) -> AsyncIterator[LoadedAdapter]:
        """The adapter of a model, loaded inside the block. Raises `EngineError`."""
        async with self._loading:
            loaded = self._loaded.get(model.adapter) or await self._load(model)
            self._loaded.move_to_end(loaded.name)
            loaded.users += 1
        try:
            yield loaded
        finally:
            loaded.users -= 1
            self._freed.set()

    async def _load(self, model: NamedModel) -> LoadedAdapter:
        assert model.folder is not None
        while len(self._loaded) >= MOST_ADAPTERS:
            unused = next((name for name, one in self._loaded.items() if not one.users), None)
            if unused is None:
                self._freed.clear()
                await self._freed.wait()
            else:
                del self._loaded[unused]
                await self._engine.unload_adapter(unused)
        with self._numbers.number(model.folder) as number:
            versions = await self._engine.load_adapter(model.adapter, number, model.folder)
        for unknown in versions.keys() - self._loaded.keys() - {model.adapter}:  # of an earlier pool
            await self._engine.unload_adapter(unknown)
        loaded = self._loaded[model.adapter] = LoadedAdapter(model.adapter, number)
        return loaded


@dataclass(frozen=True, slots=True)
class SampledRow:
    """Row of tokens whose last ones a replica has sampled."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # nats, of the last tokens
    temperature: float


@dataclass(slots=True, eq=False)
class Replica:
    """Engine of the pool. Invariant: `version` is at most the version that the engine serves."""

    name: str
    engine: PoolEngine
    version: int
    state: ReplicaState = ReplicaState.READY
    load: int = 0
    """Sequences that the pool has running here."""
    max_model_len: int = 0
    """Tokens of its longest sequence, as it reported."""
    foreign: bool = False
    """`EngineInfo.foreign`, as it reported."""
    last_error: str = ""
    loading: asyncio.Task[None] | None = None
    """Update that loads weights into the engine now; also possible after the engine was lost."""
    watch: asyncio.Task[None] | None = None
    """Task of the latest check; a hanging engine keeps it from ending."""
    calls: dict[asyncio.Timeout, None] = field(default_factory=dict)
    """Timeouts of the requests under way, oldest first; expiring a timeout returns its request to the pool."""
    wrong: int = 0
    """Wrong answers that are not forgotten."""
    good: int = 0
    """Good answers since the last wrong one, or since one was forgotten."""
    departures: int = 0
    """Looks in a row at which its answers departed from those of the others."""
    sampled: deque[SampledRow] = field(default_factory=lambda: deque(maxlen=KEPT_ROWS))
    """Newest rows that it has sampled."""
    compared: int = 0
    """Rows that have been compared."""
    failures: int = 0
    """Failed requests since the last answer."""
    rests: int = 0
    """Rests since the last answer."""
    rests_until_s: float = 0.0
    whole: str | None = ""
    """Name of the whole model that it serves; empty for the pool's own weights, None for unknown ones."""
    adapters: ReplicaAdapters | None = None
    """Adapters by name, in a pool with named models."""
    used_s: float = 0.0
    """Time of the latest request."""

    async def with_model(self, model: NamedModel | None, ask: Callable[[str, int], Awaitable[T]]) -> T:
        """Answer of `ask`, which gets the adapter's name, and the oldest Version that may sample a token."""
        if model is None or not model.adapter:
            return await ask("", self.version)
        assert self.adapters is not None, "the pool serves no named models"
        async with self.adapters.used(model) as loaded:
            return await ask(loaded.name, loaded.version)

    @property
    def resting(self) -> bool:
        """Whether the replica is left alone for now, or for good."""
        return self.left_out or self.rests_until_s > asyncio.get_running_loop().time()

    @property
    def left_out(self) -> bool:
        """Whether the replica has given so many wrong answers that it is asked no more."""
        return max(self.wrong, self.departures) >= MOST_WRONG

    def answered(self) -> None:
        """Notes a good answer."""
        self.failures, self.rests, self.good = 0, 0, self.good + 1
        if self.good >= FORGIVEN_AFTER:
            self.good, self.wrong = 0, max(0, self.wrong - 1)

    def answered_wrongly(self) -> None:
        """Notes a wrong answer and begins a rest."""
        self.good, self.wrong = 0, self.wrong + 1
        self.rest()

    def rest(self) -> None:
        """Begins a rest, twice as long as the previous one."""
        self.failures, self.rests = 0, self.rests + 1
        rest_s = min(REST_S * 2.0 ** (self.rests - 1), LONGEST_REST_S)
        self.rests_until_s = asyncio.get_running_loop().time() + rest_s

    def return_calls(self) -> None:
        """Expires the timeouts of the requests under way, which return to the pool."""
        calls, self.calls = self.calls, {}  # an expiring timeout cannot be rescheduled again
        now_s = asyncio.get_running_loop().time()
        for call in calls:
            call.reschedule(now_s)


async def within(answer: Awaitable[T], timeout_s: float) -> T:
    """Answer that must come in time. Raises `EngineUnavailable` otherwise."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except TimeoutError:
        raise EngineUnavailable(f"no answer in {timeout_s:g} s") from None
