"""Benchmarks measure ratios side by side on one machine, in one run: `shoal bench NAME --json`.

A figure is a ratio of two times taken minutes apart on one machine, so it means something on a shared machine too.
"""

import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from shoal.errors import ConfigError, ShoalError, expected_one_of

BEGAN_S = time.monotonic()
Report = dict[str, object]
MODULES = {
    "async": "asynchrony",
    "chaos": "chaos",
    "cli": "cli",
    "cluster": "cluster",
    "engine": "engine",
    "gateway": "gateway",
    "hostile": "flooded",
    "links": "links",
    "memory": "memory",
    "orchestrator": "orchestrator",
    "packing": "packing",
    "real": "real",
    "push": "push",
    "rewards": "rewards",
    "sealing": "sealing",
    "slurm": "slurm",
    "swarm": "swarm",
    "tinker": "tinker",
    "trainer": "trainer",
    "trl": "trl",
    "view": "view",
    "workspaces": "workspaces",
}
OPTIONS = {"minutes": "chaos", "seed": "chaos", "dtype": "trl"}
"""Options of one bench alone."""
SMOLLM2 = ("engine", "trainer")
"""Benches that `--model smollm2` measures on a real model in bfloat16."""


def child_environment() -> dict[str, str]:
    """Variables under which a child process finds `benchmarks` from any working directory."""
    return on_path(os.environ)


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """Adds the source checkout to the PYTHONPATH of `environment`."""
    root = str(Path(__file__).parents[1])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def run_bench(name: str, *, quick: bool, model: str | None = None, **options: object) -> Report:
    """Runs one benchmark and returns its figures; `OPTIONS` says which have `options`.

    Raises `ConfigError` for an unknown name, model or option.
    """
    if name not in MODULES:
        raise ConfigError(f"bench: {expected_one_of(sorted(MODULES), name)}")
    if model is not None:
        if model != "smollm2" or name not in SMOLLM2:
            raise ConfigError(f"bench: expected --model smollm2 with {' or '.join(SMOLLM2)}, got {model!r} with {name}")
        say(f"bench {name} --model {model} begins")
        return figures_of(name, partial(import_module("benchmarks.smollm2").in_own_process, name), quick)
    for option in options:
        if name != OPTIONS[option]:
            raise ConfigError(f"bench: expected no --{option} for {name}, which {OPTIONS[option]} alone has")
    measure: Callable[..., Report] = import_module(f"benchmarks.{MODULES[name]}").measure
    say(f"bench {name}{' --quick' if quick else ''} begins")
    return figures_of(name, partial(measure, **options), quick)


def figures_of(name: str, measure: Callable[[bool], Report], quick: bool) -> Report:
    """Calls a bench's measurement. Raises `ShoalError` with the reason whenever it has no figures."""
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
    """Describes an exception with its line; ours keep their text."""
    if isinstance(error, ShoalError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"


def say(what: str) -> None:
    """Reports a bench's progress on standard error, with the seconds since this process began."""
    print(f"[{time.monotonic() - BEGAN_S:5.0f} s] {what}", file=sys.stderr, flush=True)
