"""Output of all commands: lines for people, one JSON object for programs, one sentence for errors."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, TypeAlias

import typer

from shoal.errors import ChildDied, StoodStill

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


def printable(text: str) -> str:
    """Escapes foreign text for a terminal.

    >>> printable("plain \\x1b[2J")
    'plain \\\\x1b[2J'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def show(values: dict[str, object], as_json: bool) -> None:
    """Prints one JSON line, or a line per value."""
    if as_json:
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
        print(json.dumps(finite))
        return
    values = {printable(name): value for name, value in _flat(values).items()}
    width = max(len(name) for name in values)
    for name, value in values.items():
        if value == "":
            continue
        print(f"{name:<{width}}  {f'{value:.4g}' if isinstance(value, float) else printable(str(value))}")


def _flat(values: dict[str, Any], where: str = "") -> dict[str, object]:
    """Flattens nested tables to dotted names.

    >>> _flat({"a": {"b": 1}, "c": 2})
    {'a.b': 1, 'c': 2}
    """
    flat: dict[str, object] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{where}{name}.") if isinstance(value, dict) else {f"{where}{name}": value}
    return flat


def show_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows of cells, whose columns are as wide as their widest cell."""
    shown = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def show_answers(run_dir: str, stream: TextIO | None = None) -> None:
    """Prints held-out questions with their sampled answers before and after, as wide as the terminal."""
    from shoal.observe.metrics import read_run
    from shoal.observe.progress import change_lines

    lines = list(change_lines(read_run(Path(run_dir)), shutil.get_terminal_size().columns))
    if lines:
        print("held-out questions, and the model's sampled answers before and after training:", file=stream)
        print("\n".join(f"  {line}" for line in lines), file=stream, flush=True)


def show_what_next(run_dir: Path) -> None:
    """Prints on standard error the paths of a run's model and report, and the next commands."""
    lines = (
        f"model: {run_dir / 'model'}",
        f"report: {run_dir / 'report.png'} and {run_dir / 'report.html'}",
        f"look at its curves, answers and tokens: shoal view {run_dir}",
        f"talk with it: shoal chat {run_dir}",
    )
    print(*lines, sep="\n", file=sys.stderr)


def announce(*lines: str) -> None:
    """Prints lines and flushes, because the command keeps running and its output may be a file."""
    print(*lines, sep="\n", flush=True)


def warn(sentence: str) -> None:
    """Prints a sentence on standard error between two rules: a command's last words."""
    rule = "!" * 80
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    text = f"{rule}\nWARNING: {printable(sentence)}\n{rule}"
    typer.secho(text, fg="yellow", bold=True, err=True, color=False if plain else None)


def fail(sentence: str, code: int) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    print("shoal:", "\n".join(printable(line) for line in sentence.split("\n")), file=sys.stderr)
    raise SystemExit(code)


@contextlib.contextmanager
def stoppable(run_dir: str | None = None) -> Iterator[None]:
    """Catches Ctrl-C and SIGTERM, and says how to continue the run, also when one of its processes has ended.

    Elsewhere typer prints "Aborted".
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        fail("; ".join(["stopped", *_continuation(run_dir)]), 130)
    except (ChildDied, StoodStill, ExceptionGroup) as error:
        lost = not isinstance(error, ExceptionGroup) or error.subgroup((ChildDied, StoodStill))
        for advice in _continuation(run_dir) if lost else ():
            error.add_note(advice)
        raise


def _continuation(run_dir: str | None) -> list[str]:
    """Advice to continue a run that has begun; a run without any group is removed."""
    resolved = None if run_dir is None else Path(run_dir) / "resolved.toml"
    return [f"go on with: shoal train {resolved} --resume"] if resolved and resolved.exists() else []


def until_stopped(serving: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine until it ends, or until SIGTERM or Ctrl-C."""
    import asyncio

    import uvloop

    async def serve() -> None:
        task = asyncio.ensure_future(serving)
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        await task

    with contextlib.suppress(asyncio.CancelledError):
        uvloop.run(serve())


def from_checkout(command: str) -> None:
    """Makes the checkout's modules outside src/ importable, or ends the process where there is no checkout."""
    root = Path(__file__).parents[3]
    if not (root / "benchmarks" / "__init__.py").is_file():
        fail(f"{command}: needs a source checkout of Shoal (git clone, then pip install -e .)", 2)
    sys.path.insert(0, str(root))


ViewFlag: TypeAlias = Annotated[
    bool, typer.Option("--view", help="Show the run on a page, as `shoal view` does, while it trains.")
]


@contextmanager
def page_beside(run_dir: str, wanted: bool) -> Iterator[None]:
    """Serves the page of a run that is about to start: in a terminal until Ctrl-C, otherwise until the run ends."""
    if not wanted:
        yield
        return
    command = [sys.executable, "-m", "shoal.cli", "view", run_dir, "--attached"]
    # A separate session: Ctrl-C must end the run first, so that the page shows how it ended.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            if address := process.stdout.readline().strip():
                print(f"page: {address}", file=sys.stderr)
            yield
            if address and sys.stderr.isatty():
                print(f"the page stays until Ctrl-C, and comes back with: shoal view {run_dir}", file=sys.stderr)
                with suppress(KeyboardInterrupt):
                    process.wait()
        finally:
            process.terminate()
