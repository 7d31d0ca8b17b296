"""Environments written for verifiers 0.4 (`verifiers.v1`), with their own agents, tools and rewards.

    from shoal.environments.verifiers import verifiers_environment
    sums = verifiers_environment("sums", taskset="my-taskset")       # served by: shoal task serve my_tasks:sums ...

The environment runs an unchanged episode; its model is the session. verifiers pins its own releases of some packages.
It therefore mostly lives in its own environment, where `shoal task serve` needs neither torch nor a model.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
from typing import Any

from shoal.interfaces import Model
from shoal.tasks.sdk import Definition, EnvironmentFailed, Question
from shoal.types import Json, Outcome, Task

KEY_VARIABLE = "SHOAL_SESSION_KEY"
"""Name of the environment variable that verifiers reads a key from; Shoal's key is in the URL."""


def verifiers_environment(
    name: str,
    *,
    taskset: str,
    env: "dict[str, Json] | None" = None,
    most_tasks: int = 10_000,
    max_running: int = 32,
    eval_share: float = 0.2,
) -> Definition:
    """A task of a verifiers taskset; `env` is the rest of the `[env]` block.

    An infinite taskset gives its first `most_tasks` tasks. `env` says where an agent runs: `{"agent": {"runtime":
    {"type": "subprocess"}}}`.
    """
    table = (env or {}).get("taskset")
    given = {**(env or {}), "taskset": {**(table if isinstance(table, dict) else {}), "id": taskset}}
    made = Verifiers(taskset, given, most_tasks)
    return Definition(name, made, eval_share=eval_share, max_running=max_running)


class Verifiers:
    """An author with a verifiers environment."""

    def __init__(self, taskset: str, env: dict[str, Json], most_tasks: int) -> None:
        from verifiers.v1.utils import loaders

        kind = loaders.environment_class(taskset, str(env.get("id", "")))
        self._env: Any = kind(_config_of(kind, env))
        os.environ.setdefault(KEY_VARIABLE, "none")
        self._tasks = list(itertools.islice(self._env.taskset, most_tasks))
        self._serving: asyncio.Future[None] | None = None

    def draw(self, rng: random.Random) -> Question:
        """One of the taskset's tasks."""
        number = rng.randrange(len(self._tasks))
        data = self._tasks[number].data
        return Question(data.prompt_text, system=data.system_prompt or "", info={"number": number})

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """One episode of the environment; its reward is the sum over the episode's traces."""
        from verifiers.v1 import EvalClientConfig, ModelContext

        await self._served()
        (slot,) = self._env.slots(self._tasks[json.loads(task.info)["info"]["number"]], 1)
        client = EvalClientConfig(base_url=model.base_url, api_key_var=KEY_VARIABLE)
        episode = await self._env.run_slot(slot, ModelContext("policy", client))
        errors = [*filter(None, [getattr(episode, "error", None)]), *(e for one in episode.traces for e in one.errors)]
        if errors:
            raise EnvironmentFailed(f"{errors[0].type}: {errors[0].message}")
        return Outcome(reward=float(sum(trace.reward for trace in episode.traces)))

    async def _served(self) -> None:
        """Starts the environment's shared resources, which last as long as this process."""
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_future()
            self._holding = asyncio.create_task(self._hold(self._serving))
        await asyncio.shield(self._serving)

    async def _hold(self, up: "asyncio.Future[None]") -> None:
        try:
            async with self._env.serving():
                up.set_result(None)
                await asyncio.Event().wait()
        except (Exception, SystemExit) as error:  # an environment may raise anything: every waiter gets it
            with contextlib.suppress(asyncio.InvalidStateError):
                up.set_exception(EnvironmentFailed(f"{type(error).__name__}: {error}"))
            self._serving = None


def _config_of(kind: Any, env: dict[str, Json]) -> Any:
    """The environment's settings, as an object of its settings class."""
    from verifiers.v1 import EnvConfig
    from verifiers.v1.env import Env
    from verifiers.v1.utils.generic import concrete_type

    return (concrete_type(kind, EnvConfig, origin=Env) or EnvConfig).model_validate(env)
