"""Agents not written for Shoal reach the model as they reach OpenAI's or Anthropic's.

    "module:function"     an async function of this process, given the task and an `AsyncOpenAI` client of its session
    ["python", "a.py"]    a command, run once for each rollout: the session is in its environment, the task its input

A function returns its result: nothing or a text (scored as the task says; nothing stands for the newest
answer), a number (the reward), or an `Outcome`.

A command may run commands of the model. So the task's scorer judges it after its processes have ended, and a box keeps
them from all else (`box`). With `score = "agent"` the user states that it runs none. It then writes an outcome, a JSON
object, to the descriptor whose number is in `SHOAL_OUTCOME_FD`, or nothing. No reward is read from standard output.
"""

import asyncio
import contextlib
import inspect
import json
import os
import re
import shutil
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Literal, TypeAlias

import msgspec

from shoal.checker import table_complaint
from shoal.errors import TaskError, did_you_mean
from shoal.files import siblings
from shoal.interfaces import Model
from shoal.net.chat import close_clients, session_client
from shoal.net.ending import ended, settled
from shoal.net.process import cores
from shoal.plugins import own_code
from shoal.rollout.agents import box
from shoal.rollout.agents.runner import AgentFailed, CommandFailed, Play
from shoal.sandbox.supervisor import work_folder
from shoal.sandbox.usage import left_in
from shoal.tasks.sdk import outcome_of
from shoal.types import Outcome, Task

if TYPE_CHECKING:
    from openai import AsyncOpenAI

AgentFunction: TypeAlias = "Callable[[Task, AsyncOpenAI], Awaitable[Outcome | str | float | None]]"

SCRIPTS = (".py", ".sh")
OUTCOME_FD = "SHOAL_OUTCOME_FD"
"""Variable of a command's environment: the number of the descriptor that takes its outcome."""
MOST_OUTCOME_BYTES = 1 << 20
MOST_ANSWER_BYTES = 4 << 20
"""Bytes of an answer in a file; scorers take a million characters."""
COMPLAINT_BYTES = 4096
"""Bytes of a command's standard error that are kept, the last ones of it."""
PASSED = (
    *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TMPDIR"),
    *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "LD_LIBRARY_PATH", "SSL_CERT_FILE", "SSL_CERT_DIR"),
)
"""Names of the variables that a command gets of the run's environment; other variables may be keys and tokens."""
SUPERVISOR = (sys.executable, "-m", "shoal.rollout.agents.supervisor")
END_S = 5.0
"""Seconds after which a supervisor that was asked to end everything is killed."""
_TRACEBACK_PLACE = re.compile(r'^  File "([^"\n]+)", line (\d+)', re.MULTILINE)
PROCESSES_PER_CORE = 4
TIMEOUT_S = 300.0


class Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A command's outcome in JSON; see `types.Outcome`."""

    reward: float | None = None
    answer: str | None = None
    turn_rewards: tuple[float, ...] = ()
    evidence: str = ""


class Named(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An agent as a configuration names it in full."""

    run: str | list[str]
    timeout_s: float = TIMEOUT_S
    """Seconds of one rollout, from its begin."""
    env: list[str] = []
    """Names of further variables that a command gets of the run's environment, besides `PASSED`."""
    score: Literal["task", "agent"] = "task"
    """The judge of a command: the task's scorer, or the command itself, which then must run no command of the model."""
    answer_file: str = ""
    """Name of the file of its folder in which a command leaves its answer; unset, the newest answer counts."""
    reads: list[str] = []
    """Further paths that a command scored by the task may read."""


@dataclass(frozen=True, slots=True)
class Agent:
    """The holder of a task's conversations."""

    timeout_s: float
    max_running: int | None
    """Number of rollouts at once."""
    play: Callable[[], contextlib.AbstractAsyncContextManager[Play]]
    """A context in which `Play` is ready."""


def agent_of(named: object, field: str = "agent", max_running: int | None = None) -> Agent:
    """The agent that a configuration names in a setting. Raises `ConfigError` and `TaskError`.

    `max_running` is the number of rollouts at once; unset, commands have a few per core.
    """
    try:
        spec = msgspec.convert(table := named if isinstance(named, dict) else {"run": named}, Named)
    except msgspec.ValidationError as error:
        raise TaskError(f"{field}: {table_complaint(error, Named)}") from None
    if not spec.run or spec.timeout_s <= 0:
        raise TaskError(f"{field}: expected something to run and timeout_s > 0, got {named}")
    if isinstance(spec.run, str):
        if own := [name for name in ("env", "score", "answer_file", "reads") if name in table]:
            raise TaskError(f"{field}: expected {own[0]} for a command only; a function returns its outcome")
        if find_spec("openai") is None:
            raise TaskError(f"{field}: expected the package openai; pip install 'shoal[agents]' brings it")
        if not inspect.iscoroutinefunction(found := own_code(field, spec.run)):
            raise TaskError(f"{field}: expected {spec.run!r} to be an async function of a task and a client")
        return Agent(spec.timeout_s, max_running, partial(function_play, found, spec.timeout_s))
    if why := _why_no_command(spec):
        raise TaskError(f"{field}: {why}")
    most = max_running or PROCESSES_PER_CORE * cores()
    return Agent(spec.timeout_s, most, partial(command_play, spec))


def _why_no_command(spec: Named) -> str:
    """Reason why the settings name no command for this machine; empty where they do."""
    program, script = spec.run[0], Path("".join(spec.run[1:2]))
    if shutil.which(program) is None:
        return f"program {program!r} not found on this machine"
    if script.suffix in SCRIPTS and not script.exists():
        return f"script {str(script)!r} not found{did_you_mean(script.name, siblings(script))}"
    if missing := [name for name in spec.env if name not in os.environ]:
        return f"expected the variable {missing[0]} in the environment, as env names it; it is not set"
    if missing := [path for path in spec.reads if not os.path.exists(path)]:
        return f"reads: {missing[0]} not found"
    if os.path.basename(spec.answer_file) != spec.answer_file or spec.answer_file in (".", ".."):
        return f"expected answer_file to be a name without folders, got {spec.answer_file!r}"
    if spec.score == "agent":
        return 'expected answer_file and reads with score = "task" only' if spec.answer_file or spec.reads else ""
    why = box.why_not()
    return why and (
        f"this machine cannot keep the model's commands away from rewards: {why}. Use a machine that can, "
        'or, where the command runs none of them, score = "agent"'
    )


@contextlib.asynccontextmanager
async def function_play(function: AgentFunction, timeout_s: float = TIMEOUT_S) -> AsyncIterator[Play]:
    """Plays with an async function, which shares this event loop: what computes for long belongs into a command.

    All rollouts share connections; each has a client for its session, whose requests take `timeout_s` at most.
    """

    async def play(task: Task, model: Model) -> Outcome:
        return outcome_of(await function(task, session_client(model.base_url, model.api_key, timeout_s)))

    try:
        yield play
    finally:
        await close_clients()


@contextlib.asynccontextmanager
async def command_play(spec: Named) -> AsyncIterator[Play]:
    """Plays with a process for each rollout; nothing that it started outlives the rollout, see `supervisor`.

    The task is a line of its input, the session in its environment, which has `PASSED` and the variables `env` besides.
    """
    assert not isinstance(spec.run, str)
    command = box.absolute(spec.run)

    async def scored_by_itself(task: Task, model: Model) -> Outcome:
        with TemporaryFile() as written:
            environment = _environment(model, spec.env) | {OUTCOME_FD: str(written.fileno())}
            await _run([str(os.getpid()), "", *spec.run], task, environment, written)
            return _outcome(os.pread(written.fileno(), MOST_OUTCOME_BYTES + 1, 0))

    async def scored_by_the_task(task: Task, model: Model) -> Outcome:
        stack = contextlib.ExitStack()
        folder = stack.enter_context(work_folder())
        try:
            environment = _environment(model, spec.env)
            words = json.dumps([box.readable(command, spec.reads, environment), box.listed(command), folder])
            environment |= {"HOME": folder, "TMPDIR": folder, "PWD": folder}
            await _run([str(os.getpid()), words, *command], asked(task), environment)
            found = left_in(Path(folder, spec.answer_file), MOST_ANSWER_BYTES) or b""
            left = found.decode(errors="replace") if spec.answer_file else None
        finally:  # in a thread: the model decides how many files there are
            await settled(asyncio.ensure_future(asyncio.to_thread(stack.close)))
        return Outcome(answer=left)

    yield scored_by_itself if spec.score == "agent" else scored_by_the_task


def asked(task: Task) -> Task:
    """The task as a command of the model may see it: without the truth, and of `info` the entry `agent` alone."""
    info = {name: value for name, value in json.loads(task.info).items() if name == "agent"}
    return replace(task, answer=None, info=json.dumps(info), receipt=None)


async def _run(words: Sequence[str], task: Task, environment: dict[str, str], written: IO[bytes] | None = None) -> None:
    """Runs the supervisor with `words` and returns after all that it started has ended. Raises `AgentFailed`."""
    with TemporaryFile() as given:
        given.write(msgspec.json.encode(task) + b"\n")
        given.seek(0)
        starting = asyncio.ensure_future(
            asyncio.create_subprocess_exec(
                *(*SUPERVISOR, *words),
                stdin=given,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                env=environment,
                pass_fds=[written.fileno()] if written else (),
                start_new_session=True,
            )
        )
        try:
            process = await settled(starting)
            complaint = await _last_line(process.stderr)
            code = await process.wait()
        finally:
            await _ended(starting)
        if code:
            how = f"signal {code - 128}" if code > 128 else f"code {code}"  # the supervisor ends as a shell does
            kind = AgentFailed if code > 128 else CommandFailed
            raise kind(f"agent: its process ended with {how}{complaint}")


def _environment(model: Model, more: Sequence[str]) -> dict[str, str]:
    """The variables that are passed, and the variables that clients of OpenAI and Anthropic read."""
    return {
        **{name: os.environ[name] for name in (*PASSED, *more) if name in os.environ},
        "OPENAI_BASE_URL": model.base_url,
        "OPENAI_API_KEY": model.api_key,
        "ANTHROPIC_BASE_URL": model.anthropic_base_url,
        "ANTHROPIC_API_KEY": model.api_key,
    }


async def _ended(starting: asyncio.Future[asyncio.subprocess.Process]) -> None:
    """Has the supervisor end the rest of a rollout, if it was started and still runs."""
    if starting.cancelled() or starting.exception() is not None:
        return
    process = starting.result()
    if process.returncode is None:
        process.terminate()
        await ended(process, process.kill, END_S)


def _outcome(written: bytes) -> Outcome:
    """The outcome that a command wrote; without an outcome the task's scorer decides. Raises `AgentFailed`."""
    if not written.strip():
        return Outcome()
    try:
        if len(written) > MOST_OUTCOME_BYTES:
            raise ValueError(f"more than {MOST_OUTCOME_BYTES} bytes")
        one = msgspec.json.decode(written, type=Written)
        return Outcome(one.reward, one.answer, one.turn_rewards, one.evidence)
    except ValueError as error:
        raise AgentFailed(f"agent: expected one outcome as a JSON object in {OUTCOME_FD}: {error}") from error


async def _last_line(stream: asyncio.StreamReader | None) -> str:
    """Last line of standard error, after a colon, with a Python traceback's place; empty without a line.

    The stream ends with the supervisor, which outlives all processes of the command.
    """
    kept = b""
    while stream is not None and (part := await stream.read(1 << 16)):
        kept = (kept + part)[-COMPLAINT_BYTES:]
    said = kept.decode(errors="replace").strip()
    places = _TRACEBACK_PLACE.findall(said)
    where = f" ({Path(places[-1][0]).name}:{places[-1][1]})" if places else ""
    return f": {said.splitlines()[-1][:300]}{where}" if said else ""
