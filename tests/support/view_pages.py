"""Made runs and the page of `shoal view`, served and shown in a browser."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import WAIT_S, Navigated, Page, browser_path, chromium
from shoal.net.server import serving
from shoal.observe.metrics import watched
from shoal.observe.view.server import ViewServer
from view_run import MadeRun

DRAWN = "document.querySelectorAll('.plot .main-svg').length > 3"


@asynccontextmanager
async def viewing(*run_dirs: Path, token: str = "") -> AsyncIterator[str]:
    """Where the page of some runs is served."""
    with TemporaryDirectory() as folder:
        view = ViewServer(watched(run_dirs), Path(folder), token=token)
        try:
            async with serving(view.app, grace_s=1) as url:
                yield url
        finally:
            view.close()


@asynccontextmanager
async def seen(*run_dirs: Path, width: int = 1440) -> AsyncIterator[tuple[Page, str]]:
    """A browser beside the page of some runs; nothing was blocked or went wrong in it, but for addresses not found."""
    browser_path()
    async with viewing(*run_dirs) as url, chromium(width=width, height=900, scale=1) as page:
        yield page, url
        assert [one for one in page.complaints if "responded with a status of 4" not in one] == []


async def made(run_dir: Path, steps: int, **settings: object) -> Path:
    run = MadeRun(run_dir, **settings)
    for _ in range(steps):
        await run.step()
    await run.close()
    return run_dir


async def found(page: Page, url: str, path: str, what: str) -> None:
    """Opens a page until something is there: a log is read in the background, and the page may ask again by itself."""
    async with asyncio.timeout(WAIT_S):
        while True:
            await page.goto(url + path)
            with suppress(Navigated):
                if await page.value(what):
                    return


def lines_of(title: str) -> str:
    """JavaScript for the names of a chart's lines."""
    return f"""[...document.querySelectorAll('.chart')].find(one => one.dataset.title == '{title}')
        .querySelector('.plot').data.map(line => line.name)"""
