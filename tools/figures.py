"""Screenshots of every view of a run's page, for docs/figures: `python tools/figures.py RUN SWARM`, or `make figures`.

SWARM is the folder of a `shoal swarm demo`, of whose nodes the first that took groups is shown.
"""

import asyncio
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from browser import Page, chromium  # noqa: E402

MOST_BYTES = 300_000
SIZES = {"": (1440, 900), "_phone": (390, 844)}
VIEWS = {
    "overview": "/",
    "rollouts": "/rollouts?step=20&sort=worst",
    "group": "/group?seq={group}",
    "tokens": "/tokens?seq={group}&position=1&by=gradient",
    "heldout": "/heldout?sort=better",
    "question": "/question?id={question}",
    "waits": "/waits",
    "cost": "/cost?core_hour=0.05",
}
OF_THE_SWARM = {"swarm": "/swarm"}
CHARTS = ("overview", "waits", "swarm")


async def shot(page: Page, url: str, name: str) -> bytes:
    """One page, as PNG."""
    await page.goto(url)
    if name in CHARTS:
        await page.until("document.querySelectorAll('.plot .main-svg').length > 0 && window.Plotly !== undefined")
        await page.value("new Promise(done => setTimeout(done, 500))")
    if name == "tokens":
        trained = "[...document.querySelectorAll('.tokens span')].filter(one => one.dataset.says.includes('weight'))"
        await page.value(f"{trained}[2]?.click()")
    return await page.screenshot()


def save(png: bytes, into: Path) -> None:
    """Writes a picture in few colours, cut until it has at most 300 kB."""
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    height = min(whole.height, whole.width * 3)
    for colors, part in ((128, 1), (64, 1), (64, 2)):
        whole.crop((0, 0, whole.width, height // part)).quantize(colors).save(into, optimize=True)
        if into.stat().st_size <= MOST_BYTES:
            return


async def some_group(page: Page, url: str) -> str:
    """The number of a group that the twentieth step trained."""
    await page.goto(f"{url}/rollouts?step=20")
    link = "document.querySelector('td a[href]')?.href"
    while not (found := await page.value(link)):
        await asyncio.sleep(0.5)
        await page.goto(f"{url}/rollouts?step=20")
    return str(found).partition("seq=")[2].partition("#")[0]


async def some_question(page: Page, url: str) -> str:
    """The id of the question that became better."""
    await page.goto(f"{url}/heldout?sort=better")
    link = await page.value("document.querySelector('td a[href]').href")
    return str(link).partition("id=")[2]


def node_of(swarm: Path) -> Path:
    """The run of a node in the swarm, the one with the most peers."""
    found = {
        file.parents[1]: len(json.loads(file.read_text()).get("peers", ())) for file in swarm.rglob("swarm/status.json")
    }
    return max(found, key=lambda run: found[run])


async def pictures(run: Path, views: Mapping[str, str], folder: Path) -> None:
    """Some views of a run at both sizes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shoal.cli", "view", str(run), "--no-open", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    try:
        for suffix, (width, height) in SIZES.items():
            async with chromium(width=width, height=height, scale=1) as page:
                places = {}
                if views is VIEWS:
                    places = {"group": await some_group(page, url), "question": await some_question(page, url)}
                for name, path in views.items():
                    save(await shot(page, url + path.format(**places), name), folder / f"view_{name}{suffix}.png")
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    folder = Path(os.environ.get("FIGURES", ROOT / "docs" / "figures"))
    asyncio.run(pictures(Path(sys.argv[1]), VIEWS, folder))
    asyncio.run(pictures(node_of(Path(sys.argv[2])), OF_THE_SWARM, folder))
