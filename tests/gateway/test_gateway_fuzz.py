"""A short run of `make fuzz`."""

from gateway_fuzz import fuzz

REQUESTS = 1000
GROWTH_MB = 40.0
"""A large body leaves its pages with the allocator; a leak of 40 kB per request would be more."""


def test_hostile_requests_get_no_5xx_and_no_silence_and_leave_no_memory_behind() -> None:
    report = fuzz(REQUESTS)
    assert report["found"] == []
    assert report["requests"] == REQUESTS
    assert int(report["statuses"]["200"]) > REQUESTS / 20
    assert report["rss_after_mb"] - report["rss_before_mb"] < GROWTH_MB
