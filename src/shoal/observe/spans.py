"""OpenTelemetry spans of a running run, sent over OTLP (HTTP): a span per step, and in it who worked and who waited."""

import time
from collections.abc import Callable

from shoal.errors import ConfigError
from shoal.observe.metrics import Record, number
from shoal.observe.view.timeline import bars_of


class SpanListener:
    """Listener of a run's records that sends spans to `endpoint`; OTEL_* variables add headers and attributes.

    A collector that does not answer loses spans, and never holds the run up: another thread sends them.
    """

    def __init__(self, endpoint: str, run_name: str) -> None:
        """Raises `ConfigError` without the `otlp` extra."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ModuleNotFoundError as error:
            raise ConfigError(
                "metrics.otlp: expected the packages of OpenTelemetry, which are not installed; "
                "pip install 'shoal[otlp]' brings them"
            ) from error
        resource = Resource.create({"service.name": "shoal", "shoal.run": run_name})
        self._provider = TracerProvider(resource=resource)
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces")
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("shoal")
        self._before: Record | None = None

    def __call__(self, record: Record) -> None:
        """Sends the spans of a step, or a span without length for an evaluation or event."""
        now_ns, now_s = time.time_ns(), number(record, "time_s")
        if record["kind"] not in ("step", "eval", "event"):
            return

        def at(time_s: float) -> int:
            return now_ns + round((time_s - now_s) * 1e9)

        if record["kind"] == "step":
            before, self._before = self._before, record
            if before is not None and now_s > number(before, "time_s"):
                self._step(before, record, at(number(before, "time_s")), at)
            return
        name = str(record.get("name", "evaluation"))
        span = self._tracer.start_span(name, start_time=now_ns, attributes=_attributes(record))
        span.end(now_ns)

    def _step(self, before: Record, step: Record, start_ns: int, at: Callable[[float], int]) -> None:
        from opentelemetry.trace import set_span_in_context

        whole = self._tracer.start_span("step", start_time=start_ns, attributes=_attributes(step))
        inside = set_span_in_context(whole)
        for bar in bars_of(before, step):
            attributes = {"shoal.lane": bar.lane, "shoal.wait": bar.is_wait}
            one = self._tracer.start_span(
                f"{bar.lane}: {bar.does}", context=inside, start_time=at(bar.start_s), attributes=attributes
            )
            one.end(at(bar.start_s + bar.took_s))
        whole.end(at(number(step, "time_s")))

    def close(self) -> None:
        """Sends what is left, within a few seconds."""
        self._provider.shutdown()


def _attributes(record: Record) -> dict[str, float | str]:
    return {f"shoal.{name}": value for name, value in record.items() if value is not None and name != "kind"}
