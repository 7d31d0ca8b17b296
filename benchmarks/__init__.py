"""Ratios measured side by side on one machine, in one run: `shoal bench NAME --json`.

A figure is a ratio of two times taken minutes apart on the same machine, so that it means something on a shared one.
"""

import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path

from shoal.errors import ConfigError

Report = dict[str, object]
MODULES = {
    "async": "asynchrony",
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
}


def child_environment() -> dict[str, str]:
    """Variables under which a child process finds `benchmarks` from any working directory."""
    return on_path(os.environ)


def on_path(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` with the source checkout on its PYTHONPATH."""
    root = str(Path(__file__).parents[1])
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, (root, environment.get("PYTHONPATH"))))}


def run_bench(name: str, *, quick: bool) -> Report:
    """The figures of one benchmark. Raises `ConfigError` for an unknown name."""
    if name not in MODULES:
        raise ConfigError(f"bench: expected one of {', '.join(sorted(MODULES))}, got {name!r}")
    measure: Callable[[bool], Report] = import_module(f"benchmarks.{MODULES[name]}").measure
    return measure(quick)
