"""Ratios measured side by side on one machine, in one run: `shoal bench NAME --json`.

A figure is a ratio of two times taken minutes apart on the same machine, so that it means something on a shared one.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from shoal.errors import ConfigError, ShoalError

BEGAN_S = time.monotonic()
Report = dict[str, object]
MODULES = {
    "async": "asynchrony",
    "chaos": "chaos",
    "cli": "cli",
    "engine": "engine",
    "gateway": "gateway",
    "hostile": "flooded",
    "orchestrator": "orchestrator",
    "packing": "packing",
    "rewards": "rewards",
    "swarm": "swarm",
    "trainer": "trainer",
    "trl": "trl",
    "view": "view",
}


def child_environment() -> dict[str, str]:
    """Variables under which a child process finds `benchmarks` from any working directory."""
    return on_path(os.environ)


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the source checkout on its PYTHONPATH."""
    root = str(Path(__file__).parents[1])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def run_bench(name: str, *, quick: bool, **options: float) -> Report:
    """The figures of one benchmark; `chaos` alone has options. Raises `ConfigError` for an unknown name."""
    if name not in MODULES:
        raise ConfigError(f"bench: expected one of {', '.join(sorted(MODULES))}, got {name!r}")
    if options and name != "chaos":
        raise ConfigError(f"bench: expected no --{' and no --'.join(options)} for {name}, which chaos alone has")
    measure: Callable[..., Report] = import_module(f"benchmarks.{MODULES[name]}").measure
    say(f"bench {name}{' --quick' if quick else ''} begins")
    return figures_of(name, partial(measure, **options), quick)


def figures_of(name: str, measure: Callable[[bool], Report], quick: bool) -> Report:
    """What a bench measures. Raises `ShoalError` with the reason whenever it has no figures."""
    try:
        return measure(quick)
    except ShoalError:
        raise
    except Exception as error:  # whatever it is: a bench ends with its figures or with a sentence
        first: BaseException = error
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise ShoalError(f"bench {name}: ended without figures: {_described(first)}") from error


def _described(error: BaseException) -> str:
    """An exception, and the line that it comes from; ours as they are."""
    if isinstance(error, ShoalError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def say(what: str) -> None:
    """Tells on standard error how far a bench is, with the seconds since this process began."""
    print(f"[{time.monotonic() - BEGAN_S:5.0f} s] {what}", file=sys.stderr, flush=True)
