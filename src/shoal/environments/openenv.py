"""OpenEnv's environment servers over their WebSocket; tested with openenv-core 0.3, which Shoal does not need.

    from shoal.environments.openenv import openenv_environment
    wordle = openenv_environment("wordle", "http://127.0.0.1:8000", system="Guess a word of five letters.")

A task is a seed with which the environment is reset. The first observation is the question. Every answer of the model
is an action, until the environment is done. The reward is the sum of the rewards of the steps.
"""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import aiohttp

from shoal.interfaces import Model
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed, Question
from shoal.types import Json, Message, Outcome, Role, Task

TIMEOUT_S = 60.0
CLOSE_S = 1.0
MOST_BYTES = 16 << 20
REFUSED_ACTION = "VALIDATION_ERROR"
"""Error code of a server that refuses an action; all other codes are faults of the environment."""


def openenv_environment(
    name: str,
    url: str,
    *,
    system: str = "",
    most_turns: int = 32,
    render: "Callable[[dict[str, Json]], str] | None" = None,
    max_running: int = 16,
    eval_share: float = 0.2,
) -> Definition:
    """A task of one server. `render` makes a text of an observation; by default its text, or all of it as JSON."""
    author = OpenEnv(url.rstrip("/"), system, most_turns, render or text_of)
    return Definition(name, author, eval_share=eval_share, max_running=max_running)


@dataclass(slots=True)
class OpenEnv:
    """An author with an OpenEnv server."""

    url: str
    system: str
    most_turns: int
    render: Callable[[dict[str, Json]], str]
    _field: str | None = None

    def draw(self, rng: random.Random) -> Question:
        """The first observation after a reset with a seed; blocks."""
        seed = rng.randrange(1 << 31)  # any generator takes it
        with ThreadPoolExecutor(1) as thread:  # the caller's thread may already run an event loop
            seen = thread.submit(lambda: asyncio.run(self._begun(seed))).result()
        return Question(self.render(seen.observation), system=self.system, info={"seed": seed})

    async def _begun(self, seed: int) -> "_Seen":
        async with self._environment() as environment:
            return await environment.ask("reset", {"seed": seed})

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Acts until the environment is done, or for as many turns as are allowed."""
        messages, total = list(task.messages), 0.0
        async with self._environment() as environment:
            seen = await environment.ask("reset", {"seed": json.loads(task.info)["info"]["seed"]})
            for _ in range(self.most_turns):
                if seen.done:
                    break
                said = await model.answer(messages)
                seen = await environment.ask("step", await self._action(said.content))
                total += seen.reward
                messages += [said, Message(Role.USER, self.render(seen.observation))]
        return Outcome(reward=total)

    async def _action(self, said: str) -> dict[str, Json]:
        """Converts an answer to an action: a JSON object, or the one field that the environment's actions need."""
        said = said.strip()
        with contextlib.suppress(ValueError):
            action = json.loads(said)
            if isinstance(action, dict):
                return action
        if self._field is None:
            self._field = await self._only_field()
        if not self._field:
            raise PolicyFailed(f"expected a JSON object as an action, got {said[:200]!r}")
        return {self._field: said}

    async def _only_field(self) -> str:
        async with aiohttp.ClientSession() as http, http.get(f"{self.url}/schema") as reply:
            schema = cast(dict[str, Any], await reply.json())["action"]
        required = schema.get("required", [])
        return str(required[0]) if len(required) == 1 else ""

    @contextlib.asynccontextmanager
    async def _environment(self) -> "AsyncIterator[_Connection]":
        """Opens one instance at the server, which lasts as long as the connection."""
        try:
            async with (
                aiohttp.ClientSession() as http,
                http.ws_connect(f"{self.url}/ws", max_msg_size=MOST_BYTES, heartbeat=TIMEOUT_S / 2) as socket,
            ):
                yield _Connection(socket)
                await socket.send_json({"type": "close"})
                with contextlib.suppress(TimeoutError):  # leaving first would be an error in the server's log
                    async with asyncio.timeout(CLOSE_S):
                        await socket.receive()
        except (aiohttp.ClientError, OSError) as error:
            raise EnvironmentFailed(f"{self.url}: {type(error).__name__}: {error}", retry=True) from error


class _Seen:
    """An observation, and the reward of the step before."""

    def __init__(self, data: dict[str, Any]) -> None:
        self.observation: dict[str, Json] = data.get("observation") or {}
        self.reward = float(data.get("reward") or 0.0)
        self.done = bool(data.get("done"))


@dataclass(frozen=True, slots=True)
class _Connection:
    socket: aiohttp.ClientWebSocketResponse

    async def ask(self, kind: str, data: dict[str, Json]) -> _Seen:
        """Sends a message and returns the environment's reply. Raises `PolicyFailed` for an action that it refuses."""
        await self.socket.send_json({"type": kind, "data": data})
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer = cast(dict[str, Any], await self.socket.receive_json())
        except TimeoutError:
            raise EnvironmentFailed(f"no answer to {kind} within {TIMEOUT_S:g} s", retry=True) from None
        except TypeError as error:  # it closed the connection
            raise EnvironmentFailed(f"the server left: {error}", retry=True) from error
        if answer.get("type") == "observation":
            return _Seen(cast(dict[str, Any], answer["data"]))
        refused = answer.get("data")
        why = json.dumps(refused)[:500]
        if kind == "step" and isinstance(refused, dict) and refused.get("code") == REFUSED_ACTION:
            raise PolicyFailed(f"the environment refuses the action: {why}")
        raise EnvironmentFailed(f"{kind}: {why}")


TEXTS = ("text", "message", "prompt", "messages", "content", "observation")


def text_of(observation: dict[str, Json]) -> str:
    """The text of an observation, or the whole observation as JSON when it has none.

    >>> text_of({"message": "Your turn.", "done": False}), text_of({"board": [0, 1]})
    ('Your turn.', '{"board": [0, 1]}')
    """
    for name in TEXTS:
        if isinstance(text := observation.get(name), str) and text:
            return text
    return json.dumps({name: value for name, value in observation.items() if name != "metadata"})
