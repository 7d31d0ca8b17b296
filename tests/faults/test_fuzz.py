"""A short run of `make fuzz`, and what a page of another site may ask of its servers."""

import asyncio
from pathlib import Path

from starlette.types import ASGIApp, Message

from fuzz_large import PLAIN, measured
from fuzz_servers import applications, fuzz

REQUESTS = 1400
LONGEST_WAIT_S = 0.2
"""Processor time of the server while another client waits."""
GROWTH_MB = 40.0
"""A large body leaves its pages with the allocator; a leak of 30 kB per request would be more."""


def test_hostile_requests_to_every_server_get_no_5xx_and_no_silence_and_leave_no_memory_behind() -> None:
    report = fuzz(REQUESTS)
    assert report["found"] == []
    assert report["requests"] == REQUESTS
    assert len(report["servers"]) == 6
    for name, statuses in report["servers"].items():
        assert statuses["200"] > REQUESTS / 6 / 20, f"{name} was never reached"
    for name, before in report["rss_before_mb"].items():
        assert report["rss_after_mb"][name] - before < GROWTH_MB


def test_the_largest_bodies_of_small_servers_hardly_delay_another_client() -> None:
    report = measured(("human", "judge"), {"names": PLAIN["names"]})
    for name, found in report["servers"].items():
        assert found["bodies"] >= 5, name
        assert found["wait_s"]["value"] <= LONGEST_WAIT_S, (name, found)


async def status(app: ASGIApp, method: str, **headers: str) -> int:
    """What an application says to a request for its first page."""
    said: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"{}"}

    async def send(message: Message) -> None:
        said.append(message)

    given = {
        "host": "localhost",
        "content-length": "2",
        **{name.replace("_", "-"): text for name, text in headers.items()},
    }
    scope = {
        "type": "http", "method": method, "path": "/", "query_string": b"", "root_path": "", "scheme": "http",
        "headers": [(name.encode(), text.encode()) for name, text in given.items()],
        "server": ("127.0.0.1", 80), "client": ("127.0.0.1", 9),
    }  # fmt: skip
    await app(scope, receive, send)
    return int(said[0]["status"])


def test_no_server_answers_to_a_name_of_another_site_or_reads_a_body_that_needs_no_preflight(tmp_path: Path) -> None:
    async def asked() -> dict[str, list[int]]:
        async with applications(tmp_path) as apps:
            return {
                name: [
                    await status(app, "GET", host="evil.example"),
                    await status(app, "POST", host="evil.example:80", content_type="application/json"),
                    await status(app, "POST", content_type="text/plain", authorization="Bearer t"),
                    await status(app, "POST", authorization="Bearer t"),
                ]
                for name, app in apps.items()
            }

    refused = [421, 421, 415, 415]
    names = ("gateway", "tasks", "human", "judge", "view")
    assert asyncio.run(asked()) == dict.fromkeys(names, refused)
