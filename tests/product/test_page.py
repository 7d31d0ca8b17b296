"""The page of `shoal view` in a real browser."""

from pathlib import Path

import pytest

from view_pages import DRAWN, lines_of, made, seen

TITLES = {
    *("Reward", "Held-out reward", "Staleness, versions", "Busy"),
    *(
        "Tokens per second",
        "Mismatch of engine and trainer, nats",
        "Answer length, tokens",
        "Answers cut at max_tokens",
    ),
}


async def test_the_overview_draws_two_runs_over_one_another_and_says_what_differs(tmp_path: Path) -> None:
    first = await made(tmp_path / "first", 12, train={"lr": 1e-3})
    second = await made(tmp_path / "second", 6, train={"lr": 1e-4})
    async with seen(first, second) as (page, url):
        await page.goto(url)
        await page.until(DRAWN)
        assert await page.value(lines_of("Reward")) == ["first", "second"]
        newest = "document.querySelector('.plot').data[0].y.at(-1)"
        assert await page.value(newest) == pytest.approx(12 / 20)
        select = "document.getElementById('smooth')"
        await page.value(f"{select}.value = 5, {select}.dispatchEvent(new Event('change'))")
        assert await page.value(newest) == pytest.approx(10 / 20)
        layout = "document.querySelector('.plot').layout"
        assert await page.value(f"[{layout}.dragmode, {layout}.hovermode]") == ["zoom", "x unified"]
        assert "train.lr" in await page.value("document.querySelector('table').innerText")
        assert "run_dir" not in await page.value("document.querySelector('table').innerText")
        loaded = await page.value("performance.getEntriesByType('resource').map(one => one.name)")
        assert loaded
        titles = set(await page.value("[...document.querySelectorAll('.chart')].map(one => one.dataset.title)"))
        assert titles >= TITLES
        assert all(one.startswith(url) or one.startswith("data:") for one in loaded)
