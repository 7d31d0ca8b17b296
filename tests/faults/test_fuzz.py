"""A short run of `make fuzz`."""

from fuzz_servers import fuzz

REQUESTS = 1400
GROWTH_MB = 40.0
"""A large body leaves its pages with the allocator; a leak of 30 kB per request would be more."""


def test_hostile_requests_to_every_server_get_no_5xx_and_no_silence_and_leave_no_memory_behind() -> None:
    report = fuzz(REQUESTS)
    assert report["found"] == []
    assert report["requests"] == REQUESTS
    assert len(report["servers"]) == 7
    for name, statuses in report["servers"].items():
        assert statuses["200"] > REQUESTS / 7 / 20, f"{name} was never reached"
    for name, before in report["rss_before_mb"].items():
        assert report["rss_after_mb"][name] - before < GROWTH_MB
