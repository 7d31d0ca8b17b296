"""The main process's side of drawing reasoning-gym questions; `shoal.tasks.procedural_worker` is the other side.

A child process draws, for four reasons. Questions are reproducible only under a fixed PYTHONHASHSEED (see
`shoal.procedural`). Some settings make a generator loop without end. Some generators print or run snippets. The import
takes a second and 110 MB. The child holds no state that a draw depends on, so it may be killed at any moment.
"""

import importlib.metadata
import json
import os
import platform
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
from anyio.from_thread import start_blocking_portal

from shoal import checker, wire
from shoal.config import TaskConfig
from shoal.errors import ChildDied, OtherRelease, OutOfBounds, TaskError
from shoal.interfaces import Environment
from shoal.net.process import Child
from shoal.net.renewed import RenewedChild
from shoal.tasks.holdout import EVAL_SHARE, check_rewrite
from shoal.types import Receipt, Split, Task

DRAW_TIMEOUT_S = 30.0
# Stated here and not taken from `shoal.procedural`: importing that loads reasoning-gym.
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@cache
def libraries() -> str:
    """Releases besides reasoning-gym's on which a question may depend: another release prints otherwise."""
    names = [f"{name} {importlib.metadata.version(name)}" for name in ("numpy", "sympy")]
    system = [platform.machine(), " ".join(platform.libc_ver())]
    return ", ".join([f"python {platform.python_version()}", *system, *names])


@dataclass(frozen=True, slots=True)
class Spec:
    """Settings that a reasoning-gym question depends on, besides split, seed and index."""

    dataset: str
    config: str  # JSON object, keys sorted
    system_prompt: str = ""
    rewrite: tuple[tuple[str, str], ...] = ()
    info: str = "{}"
    """JSON object of each task: a `scorer` in place of the dataset's own."""
    eval_share: float = EVAL_SHARE
    """Share of held-out questions."""


class NoReply(TaskError):
    """The child took too long or died; whether such a question exists is not known."""


class CheckSettings(msgspec.Struct, tag="check"):
    """Asks whether settings are valid. `params` is a JSON object."""

    dataset: str
    params: str
    level: int | None


class Draw(msgspec.Struct, tag="draw"):
    """Asks for the question at an index."""

    spec: Spec
    split: Split
    seed: int
    index: int


class Redraw(msgspec.Struct, tag="redraw"):
    """Asks for the question of a receipt."""

    spec: Spec
    receipt: Receipt
    most_characters: int | None = None
    """Number of characters of question and truth together, for settings of a peer."""


class Redrawn(NamedTuple):
    """The result of a `Redraw`."""

    question: str
    """The dataset's own question, before it is rewritten."""
    task: Task
    split: Split


class ProceduralReply(msgspec.Struct):
    """The config of a `CheckSettings`, the `Task` of a `Draw`, the `Redrawn` of a `Redraw`, or an error."""

    value: msgspec.Raw = msgspec.Raw(b"\xc0")
    error: str = ""
    kind: str = ""
    """The name of the error's class."""


_ERRORS = {one.__name__: one for one in (OtherRelease, OutOfBounds)}
R = TypeVar("R")


class ProceduralClient:
    """A child process that draws; callers from any thread take turns. A context manager.

    The child starts at once and imports in the background. A child that died is started again. The child ends with the
    process at the latest.
    """

    def __init__(self, draw_timeout_s: float = DRAW_TIMEOUT_S, *, boxed: bool = False) -> None:
        """A draw that takes longer than `draw_timeout_s` is a `TaskError`: some settings never give a question.

        A `boxed` child, which draws for peers, has bounded memory and writes no files.
        """
        self._draw_timeout_s = draw_timeout_s
        self._boxed = boxed
        self._stack = ExitStack()
        self._portal = self._stack.enter_context(start_blocking_portal())
        self._child = RenewedChild(self._made)
        self._portal.call(self._child.start)

    def __enter__(self) -> "ProceduralClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the child; None without a child."""
        return self._child.pid

    def config_json(self, dataset: str, params: str, level: int | None) -> str:
        """The dataset's checked settings as JSON. Raises `TaskError` naming the wrong setting."""
        return self._ask(CheckSettings(dataset, params, level), dataset, str)

    def draw(self, spec: Spec, split: Split, seed: int, index: int) -> Task:
        """The task at an index: a pure function of the arguments. Raises `TaskError` when no such question exists."""
        return self._ask(Draw(spec, split, seed, index), spec.dataset, Task)

    def redraw(self, spec: Spec, receipt: Receipt, most_characters: int | None = None) -> Redrawn:
        """The raw question of a receipt, the task that `spec` makes of it, and its split.

        `most_characters` bounds the settings and the question of a peer. Raises `OtherRelease`, `OutOfBounds`, another
        `TaskError` when the receipt gives no question, and `NoReply` when the child cannot tell.
        """
        return self._ask(Redraw(spec, receipt, most_characters), spec.dataset, Redrawn)

    def close(self) -> None:
        """Ends the child at once, also in the middle of a draw of another thread, which gets a `NoReply`."""
        with suppress(RuntimeError):  # it was closed before
            self._portal.call(self._child.close)
        self._stack.close()  # a portal's thread that goes on would keep the interpreter from ending

    def _ask(self, request: CheckSettings | Draw | Redraw, dataset: str, kind: type[R]) -> R:
        try:
            frame = self._portal.call(self._child.call, wire.encode(request), self._draw_timeout_s)
        except TimeoutError:
            raise NoReply(
                f"{dataset}: no question came within {self._draw_timeout_s:g} s; these settings may allow none"
            ) from None
        except (ChildDied, RuntimeError) as error:  # a portal that was closed raises RuntimeError
            raise NoReply(f"{dataset}: the process that draws questions died twice ({error})") from None
        reply = wire.decode(frame, ProceduralReply)
        if reply.error:
            raise _ERRORS.get(reply.kind, TaskError)(reply.error)
        return msgspec.msgpack.decode(reply.value, type=kind)

    def _made(self) -> Child:
        arguments, env = ["--boxed"] if self._boxed else [], {**os.environ, **ENVIRONMENT}
        return Child("procedural task", "shoal.tasks.procedural_worker", arguments, Path(os.devnull), env)


class ReasoningGymService(Environment):
    """Draws from one reasoning-gym dataset, with its settings or a level of its curriculum."""

    def __init__(self, config: TaskConfig, seed: int, drawer: ProceduralClient, eval_share: float = EVAL_SHARE) -> None:
        """Raises `TaskError` naming the dataset or the setting that is wrong."""
        check_rewrite(config.name, config.rewrite)
        params, level = ({}, config.params) if isinstance(config.params, int) else (config.params, None)
        settings = drawer.config_json(config.name, json.dumps(params), level)
        info = "{}"
        if config.scorer is not None:
            scorer = checker.spec_of(config.scorer, f"tasks.{config.name}.scorer")
            info = json.dumps({"scorer": checker.to_json(scorer)})
        self.name, self._seed, self._drawer = config.name, seed, drawer
        self.spec = Spec(config.name, settings, config.system_prompt, tuple(config.rewrite), info, eval_share)
        """Settings that its questions depend on, besides split, seed and index."""

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`, mostly in 0.3 ms, for some puzzles in 0.1 s. Raises `TaskError`."""
        return self._drawer.draw(self.spec, split, self._seed, index)
