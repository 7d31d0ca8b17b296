"""Agents that were not written for Shoal: they find the model as they find OpenAI's or Anthropic's.

    "module:function"     an async function of this process, given the task and an `AsyncOpenAI` client of its session
    ["python", "a.py"]    a command, run once for each rollout: the session is in its environment, the task its input

Either says at its end what came of it: nothing or a text (scored as the task says; nothing stands for the newest
answer), a number (the reward), or an `Outcome`, which a command writes as a JSON object in its last line.
"""

import asyncio
import contextlib
import inspect
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias, cast

import msgspec

from shoal.errors import TaskError
from shoal.net.process import PARENT, cores
from shoal.plugins import own_code
from shoal.rollout.agents.host import Seat
from shoal.rollout.agents.runner import AgentFailed, Play
from shoal.tasks.sdk import outcome_of
from shoal.types import Outcome, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentFunction: TypeAlias = "Callable[[Task, AsyncOpenAI], Awaitable[Outcome | str | float | None]]"

SAID_BYTES = 1 << 20
"""Of a command's standard output that are read; of its standard error the last `COMPLAINT_BYTES` are kept."""
COMPLAINT_BYTES = 4096
PROCESSES_PER_CORE = 4
TIMEOUT_S = 300.0


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An agent as a configuration names it in full."""

    run: str | list[str]
    timeout_s: float = TIMEOUT_S
    """Deadline of one rollout, from its begin."""
    max_at_once: int | None = None
    """Rollouts; commands have a few per core when unset."""


@dataclass(frozen=True, slots=True)
class Agent:
    """Who holds the conversations of a task."""

    timeout_s: float
    max_at_once: int | None
    play: Callable[[], contextlib.AbstractAsyncContextManager[Play]]
    """Ready to play until the context is left."""


def agent_of(named: object) -> Agent:
    """The agent that a configuration names. Raises `ConfigError` and `TaskError`."""
    try:
        spec = msgspec.convert(named if isinstance(named, dict) else {"run": named}, Named)
    except msgspec.ValidationError as error:
        raise TaskError(f"agent: {error}") from None
    if not spec.run or spec.timeout_s <= 0 or (spec.max_at_once is not None and spec.max_at_once < 1):
        raise TaskError(f"agent: expected something to run, timeout_s > 0 and max_at_once >= 1, got {named}")
    if isinstance(spec.run, str):
        if find_spec("openai") is None:
            raise TaskError("agent: expected the package openai; pip install 'shoal[agents]' brings it")
        return Agent(spec.timeout_s, spec.max_at_once, partial(function_play, _function_at(spec.run)))
    most = spec.max_at_once or PROCESSES_PER_CORE * cores()
    return Agent(spec.timeout_s, most, partial(command_play, tuple(spec.run)))


def _function_at(path: str) -> AgentFunction:
    found = own_code("agent", path)
    if not inspect.iscoroutinefunction(found):
        raise TaskError(f"agent: expected {path!r} to be an async function of a task and a client")
    return cast("AgentFunction", found)


@contextlib.asynccontextmanager
async def function_play(function: AgentFunction) -> AsyncIterator[Play]:
    """Plays with an async function. It shares this event loop: what computes for long belongs into a command.

    All rollouts share connections; each has a client that opens its own session only.
    """
    from openai import AsyncOpenAI  # loaded by those who use it

    async with AsyncOpenAI(api_key="-", base_url="http://127.0.0.1") as shared:

        async def play(task: Task, seat: Seat) -> Outcome:
            client = shared.with_options(base_url=seat.base_url, api_key=seat.api_key, timeout=seat.timeout_s)
            return outcome_of(await function(task, client))

        yield play


@contextlib.asynccontextmanager
async def command_play(command: Sequence[str]) -> AsyncIterator[Play]:
    """Plays with a process for each rollout, which is killed at the deadline with all that it started.

    The task is a line of its input, the session in its environment.
    """

    async def play(task: Task, seat: Seat) -> Outcome:
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=_environment(seat),
                start_new_session=True,
            )
        except OSError as error:
            raise AgentFailed(f"agent: {command[0]!r} cannot be started: {error.strerror}") from error
        try:
            return outcome_of(await _said(process, msgspec.json.encode(task) + b"\n"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()

    yield play


def _environment(seat: Seat) -> dict[str, str]:
    """What clients of OpenAI and Anthropic look for."""
    inherited = {name: value for name, value in os.environ.items() if name != PARENT}
    return {
        **inherited,
        "OPENAI_BASE_URL": seat.base_url,
        "OPENAI_API_KEY": seat.api_key,
        "ANTHROPIC_BASE_URL": seat.anthropic_base_url,
        "ANTHROPIC_API_KEY": seat.api_key,
    }


async def _said(process: asyncio.subprocess.Process, task: bytes) -> Outcome | str | None:
    """What its last line says. Raises `AgentFailed` when it ended badly."""
    assert process.stdin and process.stdout and process.stderr
    reading = asyncio.gather(_bytes(process.stdout, SAID_BYTES), _bytes(process.stderr, COMPLAINT_BYTES))
    with contextlib.suppress(ConnectionError):  # it need not read its task
        process.stdin.write(task)
        await process.stdin.drain()
    process.stdin.close()
    out, err = await reading
    code = await process.wait()
    if code:
        how = f"signal {-code}" if code < 0 else f"code {code}"
        complaint = err.decode(errors="replace").strip().splitlines()[-1:]
        raise AgentFailed(f"agent: its process ended with {how}{''.join(f': {line[:300]}' for line in complaint)}")
    text = out.decode(errors="replace").strip()
    line = text.splitlines()[-1] if text else ""
    if not line.startswith("{"):
        return line or None
    try:
        return msgspec.json.decode(line, type=Outcome)
    except (msgspec.MsgspecError, ValueError) as error:
        raise AgentFailed(f"agent: expected an outcome as JSON in its last line: {error}") from error


async def _bytes(stream: asyncio.StreamReader, kept: int) -> bytes:
    """The last `kept` bytes of all that comes."""
    data = b""
    while part := await stream.read(1 << 16):
        data = (data + part)[-kept:]
    return data
