"""Ratios measured side by side on one machine, in one run: `shoal bench NAME --json`.

A figure is a ratio of two times taken minutes apart on the same machine, so that it means something on a shared one.
"""

from collections.abc import Callable
from importlib import import_module

from shoal.errors import ConfigError

Report = dict[str, object]
MODULES = {
    "async": "asynchrony",
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


def run_bench(name: str, *, quick: bool) -> Report:
    """The figures of one benchmark. Raises `ConfigError` for an unknown name."""
    if name not in MODULES:
        raise ConfigError(f"bench: expected one of {', '.join(sorted(MODULES))}, got {name!r}")
    measure: Callable[[bool], Report] = import_module(f"shoal.bench.{MODULES[name]}").measure
    return measure(quick)
