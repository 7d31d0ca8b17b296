"""The benchmark of the gateway, run for seconds; its figures count only when it has the machine for itself."""

from benchmarks import run_bench
from benchmarks.echo import answer_ids, tokenizer
from benchmarks.gateway import Seen, _check
from shoal.gateway.sessions import Export, SampledTurn


def test_the_gateway_benchmark_loses_and_retokenises_nothing() -> None:
    report = run_bench("gateway", quick=True)
    assert {"p50_ms", "p99_ms", "requests_per_s", "lost", "retokenised"} <= report.keys()
    assert (report["lost"], report["retokenised"]) == (0, 0)
    assert isinstance(report["p50_ms"], float)
    assert report["p50_ms"] > 0


def test_the_benchmark_counts_what_text_in_text_out_would_change() -> None:
    made = tokenizer()
    drawn = list(answer_ids(1))
    spelled = made.encode(made.decode(drawn), add_special_tokens=False)
    assert spelled != drawn
    first = SampledTurn([1, 2], drawn, [], [], "stop", False)
    exact = SampledTurn([1, 2, *drawn, 3], list(answer_ids(2)), [], [], "stop", False)
    retokenised = SampledTurn([1, 2, *spelled, 3], list(answer_ids(2)), [], [], "stop", False)
    for second, wrong in ((exact, 0), (retokenised, 1)):
        seen = Seen()
        _check(Export((), [first, second], False), [1, 2], seen)
        assert (seen.lost, min(1, seen.retokenised)) == (0, wrong)
    seen = Seen()
    _check(Export((), [first], False), [1, 2], seen)
    assert seen.lost == 1
