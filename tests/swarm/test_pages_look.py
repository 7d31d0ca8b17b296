"""The pages of people and of the judge: one look with the page of `shoal view`, and nothing is executed."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from itertools import cycle
from pathlib import Path

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from browser import Page, browser_path, chromium
from payloads import PAYLOADS
from shoal.net.server import PAGE_HEADERS, json, look, serving
from shoal.observe.metrics import JsonlTracker
from shoal.observe.report import write_report
from shoal.swarm.judge.judging import leaderboard_html
from shoal.swarm.judge.messages import Condition
from shoal.swarm.judge.store import Standing

LOOK = files("shoal.net").joinpath("look.css").read_text()
FOREIGN = "document.querySelectorAll('main :is(script, img, iframe, svg, style, object, base, meta, a)').length"


def luminance(color: str) -> float:
    """Relative luminance of #rrggbb or #rgb, as WCAG defines it."""
    digits = color[1:] if len(color) == 7 else "".join(2 * digit for digit in color[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_text_has_the_contrast_of_wcag_aa_in_both_themes(theme: int) -> None:
    palettes = [dict(re.findall(r"--(\w+): (#\w+)", line)) for line in LOOK.splitlines() if "--ink" in line]
    colors = {name: luminance(value) for name, value in palettes[theme].items()}
    for name in ("ink", "muted", "accent", "good", "bad"):
        for behind in ("paper", "ground"):
            light, dark = sorted((colors[name], colors[behind]), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 4.5, (name, behind)


@asynccontextmanager
async def opened(*routes: Route) -> AsyncIterator[tuple[Page, str]]:
    """A phone before a server of some routes."""
    browser_path()
    app = Starlette(routes=[Route("/look.css", look), *routes])
    async with serving(app, grace_s=1) as url, chromium(width=390, height=800, scale=1) as page:
        yield page, url
        assert page.complaints == []


def static(path: str, kind: str, text: str) -> Route:
    return Route(path, lambda _: Response(text, 200, PAGE_HEADERS, kind))


async def test_a_report_and_the_judges_page_fit_a_phone_with_their_figures_in_sight_and_execute_nothing(
    tmp_path: Path,
) -> None:
    standings = [
        Standing(
            peer_id=payload[:60], model=payload[:300], arm=Condition.SOLO, round=1, challenges=1, unanswered=0,
            score=0.5, at_least=0.1, specialties={payload[:60]: 1.0},
        )
        for payload in PAYLOADS
    ]  # fmt: skip
    style = files("shoal.swarm.judge").joinpath("static", "style.css").read_text()
    page_html = leaderboard_html("judge", standings, [payload[:60] for payload in PAYLOADS])
    (tmp_path / "run").mkdir()
    tracker = JsonlTracker(tmp_path / "run" / "metrics.jsonl")
    tracker.log(1, {"reward": 0.5, "tokens_per_s": 123456.0, "failed/a_task_whose_name_is_long_beyond_reason": 12})
    for payload in PAYLOADS:
        tracker.write("event", {"name": "x" * 40, "reason": payload[:500]})
    tracker.close()
    report = write_report(tmp_path / "run")[1].read_text()
    routes = (static("/", "text/html", page_html), static("/style.css", "text/css", style))
    async with opened(*routes) as (page, url):
        await page.goto((tmp_path / "run" / "report.html").as_uri())
        assert await page.value("document.documentElement.scrollWidth") <= 390
        widths = "[...document.images].map(one => one.complete && one.naturalWidth && one.width)"
        assert all(330 < width < 390 for width in await page.value(widths))  # drawn, and as wide as the phone
        for theme in ("dark", "light"):
            await page.command(
                "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}]
            )
            sources = f"document.querySelector('picture {'source' if theme == 'dark' else 'img'}')"
            await page.until(f"document.images[0].currentSrc == ({sources}.src || {sources}.srcset)")
        assert LOOK in report
        assert await page.value("document.querySelectorAll('script, iframe, svg, object, a').length") == 0
        await page.goto(url)
        assert await page.value("document.title") == "Leaderboard - Shoal"
        assert await page.value(FOREIGN) == 0
        assert await page.value("document.documentElement.scrollWidth") <= 390
        score = "[...document.querySelectorAll('th')].find(one => one.textContent == 'pass@1')"
        assert await page.value(f"{score}.getBoundingClientRect().right") <= 390


async def test_the_peoples_page_executes_nothing_of_questions_or_of_others_answers(tmp_path: Path) -> None:
    human = files("shoal.swarm.human").joinpath("static")
    payloads = cycle(PAYLOADS)

    async def question(_: Request) -> Response:
        text = next(payloads)
        return json({"id": "q", "task": text[:500], "instructions": text, "question": text, "tries_left": 2})

    async def answer(_: Request) -> Response:
        others = [
            {
                "text": text,
                "generator": text[:500],
                "model": text[:500],
                "status": "scored",
                "right": False,
                "reward": 0.0,
            }
            for text in PAYLOADS
        ]
        verdict = {
            "status": "scored",
            "right": False,
            "reward": 0.0,
            "tries_left": 0,
            "truth": PAYLOADS[2],
            "others": others,
        }
        return json(verdict)

    routes = (
        static("/", "text/html", human.joinpath("index.html").read_text()),
        static("/style.css", "text/css", human.joinpath("style.css").read_text()),
        static("/desk.js", "text/javascript", human.joinpath("desk.js").read_text()),
        Route("/api/question", question, methods=["POST"]),
        Route("/api/answer", answer, methods=["POST"]),
        Route("/api/state/{id}", lambda _: json({"state": "open"})),
        Route("/api/status", lambda _: json({"peer_id": PAYLOADS[0], "swarm": PAYLOADS[1], "answers": 1, "shared": 1})),
    )
    async with opened(*routes) as (page, url):
        await page.goto(url)
        for payload in PAYLOADS:
            await page.until("!document.getElementById('send').disabled")
            assert await page.value("document.getElementById('question').textContent") == payload
            assert await page.value("document.title") == "Answer a question - Shoal"
            assert await page.value("document.documentElement.scrollWidth") <= 390
            await page.value("document.getElementById('next').click()")
        await page.until("!document.getElementById('send').disabled")
        await page.goto(url)
        await page.until("!document.getElementById('send').disabled")
        await page.tab_to("at.id == 'answer'")  # the keyboard alone from here
        await page.type("x")
        await page.tab_to("at.id == 'send'", 1)
        await page.press("Enter")
        await page.until("!document.getElementById('verdict').hidden")
        assert await page.value("document.activeElement.id") == "next"
        assert await page.value("document.querySelectorAll('#list li').length") == len(PAYLOADS)
        assert await page.value(FOREIGN) == 0
        assert await page.value("document.title") == "Answer a question - Shoal"
