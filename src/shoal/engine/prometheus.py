"""Metrics of an engine in Prometheus' text format."""

import contextlib
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shoal.engine.options import EngineCounters

COUNTERS = {
    "tokens_drawn": "Tokens drawn.",
    "tokens_prefilled": "Known tokens computed, those that interruptions made it compute again included.",
    "interruptions": "Weight updates that found sequences running.",
    "preemptions": "Sequences that lost their KV for want of memory.",
    "stale_sequences": "Sequences that went on with the KV of older weights.",
    "stale_tokens": "Tokens drawn on KV of which some is of older weights.",
    "prefix_tokens_reused": "Prompt tokens whose KV an ended sequence had left.",
    "busy_s": "Seconds spent computing, and loading weights.",
    "load_s": "Seconds in which weights were loaded and nothing could be computed.",
}
GAUGES = {
    "version": "Version of the weights being served.",
    "prefix_cache_bytes": "KV kept of ended sequences.",
    "running": "Sequences being decoded.",
    "waiting": "Sequences queued.",
}


class _Snapshot(Collector):
    def __init__(self, counts: EngineCounters, refused: int, failed_updates: int) -> None:
        self._counts = counts
        self._refused = refused
        self._failed_updates = failed_updates

    def collect(self) -> Iterator[Metric]:
        for name, text in COUNTERS.items():
            yield CounterMetricFamily(f"shoal_engine_{name}", text, value=getattr(self._counts, name))
        for name, text in GAUGES.items():
            yield GaugeMetricFamily(f"shoal_engine_{name}", text, value=getattr(self._counts, name))
        yield CounterMetricFamily("shoal_engine_refused", "Requests answered with an error.", value=self._refused)
        yield CounterMetricFamily(
            "shoal_engine_failed_updates", "Weight updates that were refused.", value=self._failed_updates
        )


def exposition(counts: EngineCounters, *, refused: int, failed_updates: int) -> bytes:
    """Body of `/metrics`."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(counts, refused, failed_updates))
    return generate_latest(registry)


def counted(exposition: str, names: dict[str, str]) -> dict[str, int]:
    """Numbers of a Prometheus text under Shoal's names, summed over labels; absent metrics are 0.

    >>> counted('# HELP a b\\na_total{x="1"} 2.0\\na_total{x="2"} 3.0\\nab 9.0\\n', {"a_total": "a"})
    {'a': 5}
    """
    sums = dict.fromkeys(names.values(), 0)
    for line in exposition.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in names:
            with contextlib.suppress(ValueError, OverflowError):  # lines whose value is no finite number count nothing
                sums[names[name]] += int(float(line.rpartition(" ")[2]))
    return sums
