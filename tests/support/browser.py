"""Chromium without a window, driven over its DevTools protocol as a person would: by keys, seeing what is shown."""

import asyncio
import base64
import json
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

START_TIMEOUT_S = 60.0
WAIT_S = 30.0
KEYS = {"Tab": (9, ""), "Enter": (13, "\r")}


def browser_path() -> str:
    """Where a Chromium is; skips the test when there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium: install it, or run `make test` as root on Debian or Ubuntu")
    return found


class Page:
    """One tab. What the page logged as an error, or blocked by its policy, is in `complaints`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._sent = 0
        self.complaints: list[str] = []

    async def listen(self) -> None:
        """Sorts what the browser says, for ever."""
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                self._replies.pop(said["id"]).set_result(said)
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said["method"] == "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(said["params"]))

    async def command(self, method: str, **params: object) -> dict[str, Any]:
        """The result of one DevTools command."""
        self._sent += 1
        reply = self._replies[self._sent] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._sent, "method": method, "params": params})
        async with asyncio.timeout(WAIT_S):
            said = await reply
        assert "error" not in said, said
        result: dict[str, Any] = said["result"]
        return result

    async def value(self, expression: str) -> Any:
        """What an expression is in the page."""
        result = await self.command("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Waits until an expression is true, and gives it."""
        try:
            async with asyncio.timeout(WAIT_S):
                while not (value := await self.value(expression)):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        except TimeoutError:
            seen = await self.value("document.body.innerText")
            raise AssertionError(f"{expression} never came true; the page says:\n{seen}") from None
        return value

    async def goto(self, url: str) -> None:
        """Opens a page; returns when it is there."""
        await self.command("Page.navigate", url=url)
        await self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState == 'complete'")

    async def type(self, text: str) -> None:
        """Into whatever has the focus."""
        await self.command("Input.insertText", text=text)

    async def press(self, key: str, *, ctrl: bool = False) -> None:
        """One key, down and up."""
        code, text = KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 2 if ctrl else 0}
        await self.command("Input.dispatchKeyEvent", type="keyDown", text="" if ctrl else text, **common)
        await self.command("Input.dispatchKeyEvent", type="keyUp", **common)

    async def screenshot(self) -> bytes:
        """Everything, as PNG."""
        shot = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@asynccontextmanager
async def chromium(folder: Path, *, width: int = 360, height: int = 640, scale: int = 2) -> AsyncIterator[Page]:
    """A page of the size of a small phone, in a browser of its own."""
    arguments = [
        browser_path(),
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),
        "about:blank",
    ]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(*arguments, stdout=log, stderr=log, start_new_session=True)
        try:
            async with aiohttp.ClientSession() as http, http.ws_connect(await _page_url(folder, http)) as socket:
                page = Page(socket)
                listening = asyncio.create_task(page.listen())
                for domain in ("Page", "Runtime", "Log"):
                    await page.command(f"{domain}.enable")
                await page.command(
                    "Emulation.setDeviceMetricsOverride",
                    width=width,
                    height=height,
                    deviceScaleFactor=scale,
                    mobile=width < 600,
                )
                yield page
                listening.cancel()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


async def _page_url(folder: Path, http: aiohttp.ClientSession) -> str:
    """Of the first tab's DevTools, once the browser has said where they are."""
    async with asyncio.timeout(START_TIMEOUT_S):
        while True:
            try:
                port = (folder / "DevToolsActivePort").read_text().split()[0]
                async with http.get(f"http://127.0.0.1:{port}/json/list") as reply:
                    pages = [one for one in await reply.json() if one["type"] == "page"]
                return str(pages[0]["webSocketDebuggerUrl"])
            except (FileNotFoundError, IndexError, aiohttp.ClientConnectorError):
                await asyncio.sleep(0.05)
