"""Ratios measured side by side on one machine, in one run: `shoal bench NAME --json`.

A figure is a ratio of two times taken minutes apart on the same machine, so that it means something on a shared one.
"""

from collections.abc import Callable, Mapping

from shoal.errors import ConfigError

Report = dict[str, object]


def run_bench(name: str, *, quick: bool) -> Report:
    """The figures of one benchmark. Raises `ConfigError` for an unknown name."""
    benches = _benches()
    if name not in benches:
        raise ConfigError(f"bench: expected one of {', '.join(sorted(benches))}, got {name!r}")
    return benches[name](quick)


def _benches() -> Mapping[str, Callable[[bool], Report]]:
    from shoal.bench import asynchrony, trl

    return {"async": asynchrony.measure, "trl": trl.measure}
