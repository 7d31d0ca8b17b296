"""What Shoal uses of verifiers 0.4, for one taskset without an end; `make adapters` has the real one.

The real one wants other releases of packages than Shoal's own environment has.
"""

import contextlib
import itertools
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Generic, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict


class EnvConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    taskset: dict[str, Any] = {}


C = TypeVar("C", bound=EnvConfig)


class Env(Generic[C]):
    """An environment whose episodes are what its settings say."""

    def __init__(self, config: C) -> None:
        self.config: Any = config
        self.taskset = (task(number, **config.taskset) for number in itertools.count())
        self.played: list[tuple[Any, int, Any]] = []
        self.served = 0

    def slots(self, task: Any, n: int) -> list[tuple[Any, int]]:
        return [(task, n)] * n

    async def run_slot(self, slot: tuple[Any, int], context: Any) -> Any:
        assert self.served == 1, "what is shared is there, and once"
        self.played.append((*slot, context))
        return self.config.episode()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        if self.config.away:
            self.config.away.pop()
            raise ConnectionError("no container")
        self.served += 1
        yield
        self.served -= 1


class GameConfig(EnvConfig):
    rewards: list[float] = [1.0]
    wrong: list[str] = []
    broken: str = ""
    away: list[int] = []

    def episode(self) -> Any:
        errors = [SimpleNamespace(type="SandboxError", message=message) for message in self.wrong]
        traces = [SimpleNamespace(reward=reward, errors=errors) for reward in self.rewards]
        return SimpleNamespace(
            traces=traces, error=self.broken and SimpleNamespace(type="EnvError", message=self.broken)
        )


class Game(Env[GameConfig]):
    pass


def task(number: int, id: str, system: str | None = None) -> Any:
    return SimpleNamespace(data=SimpleNamespace(prompt_text=f"{id} {number}", system_prompt=system))


def concrete_type(kind: type, bound: type, *, origin: type) -> type | None:
    found: Iterator[type] = (
        one for base in getattr(kind, "__orig_bases__", ()) if get_origin(base) is origin for one in get_args(base)
    )
    return next((one for one in found if issubclass(one, bound)), None)


@dataclass
class EvalClientConfig:
    base_url: str
    api_key_var: str


@dataclass
class ModelContext:
    model: str
    client: EvalClientConfig
    sampling: dict[str, Any] = field(default_factory=dict)


def environment_class(taskset_id: str, env_id: str = "") -> type:
    """A taskset's own environment, unless one is named."""
    return {"": Game, "plain": Env}[env_id]


MODULES: dict[str, Any] = {
    "verifiers.v1": SimpleNamespace(EnvConfig=EnvConfig, EvalClientConfig=EvalClientConfig, ModelContext=ModelContext),
    "verifiers.v1.env": SimpleNamespace(Env=Env),
    "verifiers.v1.utils": SimpleNamespace(loaders=SimpleNamespace(environment_class=environment_class)),
    "verifiers.v1.utils.generic": SimpleNamespace(concrete_type=concrete_type),
}
