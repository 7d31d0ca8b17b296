"""Screenshots of every view of a run's page, for docs/figures: `python tools/figures.py RUN`, or `make figures`."""

import asyncio
import io
import os
import sys
import tempfile
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
    "tokens": "/tokens?seq={group}&position=1",
    "waits": "/waits",
}
CHARTS = ("overview", "waits")


async def shot(page: Page, url: str, name: str) -> bytes:
    """One page, as PNG."""
    await page.goto(url)
    if name in CHARTS:
        await page.until("document.querySelectorAll('.plot .main-svg').length > 0 && window.Plotly !== undefined")
        await page.value("new Promise(done => setTimeout(done, 500))")
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


async def main(run: Path, folder: Path) -> None:
    """All views at both sizes."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "shoal.cli", "view", str(run), "--no-open", stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    try:
        for suffix, (width, height) in SIZES.items():
            with tempfile.TemporaryDirectory() as profile:
                async with chromium(Path(profile) / "browser", width=width, height=height, scale=1) as page:
                    group = await some_group(page, url)
                    for name, path in VIEWS.items():
                        save(
                            await shot(page, url + path.format(group=group), name), folder / f"view_{name}{suffix}.png"
                        )
    finally:
        process.terminate()
        await process.wait()


if __name__ == "__main__":
    folder = Path(os.environ.get("FIGURES", ROOT / "docs" / "figures"))
    asyncio.run(main(Path(sys.argv[1]), folder))
