"""How long a newcomer needs from `pip install` to the worst answer of a run's last step, without reading docs.

python tests/support/newcomer.py [PIP_ARGUMENT ...]

The wheel is installed into a fresh environment with an empty cache (counted apart). From then on the clock runs. The
newcomer knows what `shoal --help` says, and follows what terminal and page show: `shoal demo --view`, whose page the
browser opens, one link to the worst answers of the newest step, and the first of them. When the run has ended, the same
link shows the last step's. Everything is a process as a person starts it, and Chromium sees the page.
"""

import asyncio
import json
import os
import pty
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from browser import Page, chromium, close_browser
from until import until

ROOT = Path(__file__).parents[2]
LINK = "[...document.querySelectorAll('a')].find(one => /^Worst answers of step [0-9]+$/.test(one.textContent))"
PATIENCE_S = 600.0
MOST_S = 120.0
"""Seconds to the worst answer of the step that was the last one by then."""


def installed(folder: Path, pip_arguments: list[str]) -> Path:
    """The commands of a fresh environment that has the wheel of this source."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "venv", with_pip=True)
    commands = folder / "venv" / "bin"
    constraints = ["-c", str(ROOT / "constraints.txt")]
    subprocess.run([commands / "pip", "install", "-q", *pip_arguments, *constraints, wheel], check=True)
    return commands


def environment(folder: Path) -> dict[str, str]:
    """A newcomer's, whose browser writes down what it is asked to open."""
    opened = folder / "browser"
    opened.write_text(f'#!/bin/sh\necho "$1" > {folder}/opened\n')
    opened.chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name in ("LANG", "OMP_NUM_THREADS")}
    path = f"{folder}/venv/bin:{os.defpath}"
    return {**kept, "PATH": path, "HOME": str(folder), "TERM": "xterm", "BROWSER": str(opened)}


@contextmanager
def terminal(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A command in a terminal of its own; `folder/terminal` has what it shows."""
    master, slave = pty.openpty()
    with (folder / "terminal").open("wb") as shown:
        copy = subprocess.Popen(["cat"], stdin=master, stdout=shown, stderr=subprocess.DEVNULL)
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment(folder),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        try:
            yield process
        finally:
            process.terminate()
            process.wait()
            os.close(master)
            copy.terminate()
            copy.wait()


async def worst_answer(page: Page) -> tuple[int, str]:
    """The step and the text of the first of the worst answers, by two clicks from the overview."""
    await page.value(f"{LINK}.click()")
    await page.until("location.pathname == '/rollouts' && document.querySelector('td a') !== null")
    step = int(await page.value("new URLSearchParams(location.search).get('step')"))
    await page.value("document.querySelector('td a').click()")
    await page.until("location.pathname == '/group' && document.readyState == 'complete'")
    return step, await page.value("document.querySelector(location.hash).innerText")


async def walked(folder: Path, *settings: str) -> dict[str, object]:
    """Seconds since the installation at which each thing was seen, and the answers that were found."""
    began_s = time.monotonic()
    figures: dict[str, object] = {}

    def seen(what: str) -> None:
        figures[what] = round(time.monotonic() - began_s, 1)

    said = subprocess.run(  # noqa: ASYNC221
        ["shoal", "--help"], cwd=folder, env=environment(folder), capture_output=True, text=True, check=True
    ).stdout
    assert re.search(r"demo +Train", said), said
    seen("help_s")
    with terminal(["shoal", "demo", "--view", *settings], folder) as demo:
        async with asyncio.timeout(PATIENCE_S), chromium(width=1440, height=900, scale=1) as page:
            await until((folder / "opened").exists)
            seen("browser_opens_s")
            url = (folder / "opened").read_text().strip()
            await page.goto(url)
            seen("page_s")
            await page.until(f"{LINK} !== undefined")
            seen("first_step_s")
            figures["first_step"], figures["first_answer"] = await worst_answer(page)
            seen("worst_answer_s")

            def ended() -> bool:
                assert demo.poll() is None, (folder / "terminal").read_text()
                return b"the page stays until" in (folder / "terminal").read_bytes()

            await until(ended, PATIENCE_S)
            seen("run_ended_s")
            await page.goto(url)
            await page.until(f"{LINK} !== undefined")
            figures["last_step"], figures["last_answer"] = await worst_answer(page)
            seen("last_worst_answer_s")
    close_browser()
    return figures


def main(pip_arguments: list[str]) -> None:
    with TemporaryDirectory(prefix="shoal-newcomer-") as name:
        folder, began_s = Path(name), time.monotonic()
        installed(folder, pip_arguments)
        install_s = round(time.monotonic() - began_s, 1)
        figures = asyncio.run(walked(folder))
    print(json.dumps({"install_s": install_s, **figures}, indent=2))
    if float(str(figures["worst_answer_s"])) > MOST_S:
        sys.exit(f"more than {MOST_S:.0f} s to the worst answer of the newest step")


if __name__ == "__main__":
    main(sys.argv[1:])
