"""Chromium without a window, driven over its DevTools protocol as a person would: by keys, seeing what is shown."""

import asyncio
import atexit
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import pytest

START_TIMEOUT_S = 120.0
WAIT_S = 120.0
KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), "ArrowRight": (39, "")}
NAVIGATED = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)
"""What DevTools says of a page that was left before its answer."""
FOCUS_SHOWN = "getComputedStyle(document.activeElement).outlineStyle != 'none'"


def browser_path() -> str:
    """Where a Chromium is; skips the test when there is none."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no chromium: install it, or run `make test` as root on Debian or Ubuntu")
    return found


class Navigated(AssertionError):
    """The page went elsewhere before it could answer."""


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
                if not (reply := self._replies.pop(said["id"])).done():
                    reply.set_result(said)
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
        if said.get("error", {}).get("message") in NAVIGATED:
            raise Navigated(method)
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
                value = None
                while not value:
                    with contextlib.suppress(Navigated):  # a page that asks again by itself
                        value = await self.value(expression)
                    await asyncio.sleep(0 if value else 0.05)
        except TimeoutError:
            seen = await self.value("document.body.innerText")
            raise AssertionError(f"{expression} never came true; the page says:\n{seen}") from None
        return value

    async def resize(self, width: int, height: int, scale: int = 1) -> None:
        """Gives the window another size; a narrow one is a phone's."""
        size = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600}
        await self.command("Emulation.setDeviceMetricsOverride", **size)

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

    async def tab_to(self, condition: str, most: int = 60) -> None:
        """Presses Tab until a condition on the focused element `at` is true; each focus on the way can be seen."""
        for _ in range(most):
            await self.press("Tab")
            if await self.value(f"document.activeElement != document.body && !({FOCUS_SHOWN})"):
                raise AssertionError(f"focus unseen: {await self.value('document.activeElement.outerHTML')}")
            if await self.value(f"(at => {condition})(document.activeElement)"):
                return
        raise AssertionError(f"no focus of {most} fulfils: {condition}")

    async def screenshot(self) -> bytes:
        """Everything, as PNG."""
        shot = await self.command("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


class Browser:
    """A Chromium process with a profile of its own, shared by the tests of a process, each in its own context."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="shoal-chromium-")
        ends_with_us = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
        arguments = [
            *ends_with_us,
            browser_path(),
            "--headless=new",
            "--remote-debugging-port=0",
            f"--user-data-dir={self._folder.name}/profile",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            *(["--no-sandbox"] if os.geteuid() == 0 else []),
            "about:blank",
        ]
        self._process = subprocess.Popen(
            arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        port = Path(self._folder.name, "profile", "DevToolsActivePort")
        ends_s = time.monotonic() + START_TIMEOUT_S
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < ends_s, "Chromium did not say where its DevTools are"
            time.sleep(0.05)
        number, path = port.read_text().split("\n")
        self.devtools = f"ws://127.0.0.1:{number}"
        self.url = f"{self.devtools}{path}"

    def close(self) -> None:
        """Ends the process."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._folder.cleanup()


@cache
def browser() -> Browser:
    """The browser of this process, which ends with it; `close_browser` ends it sooner."""
    opened = Browser()
    atexit.register(opened.close)
    return opened


def close_browser() -> None:
    """Ends the browser of this process, if there is one."""
    if browser.cache_info().currsize:
        atexit.unregister(browser().close)
        browser().close()
        browser.cache_clear()


@asynccontextmanager
async def connected(http: aiohttp.ClientSession, url: str) -> AsyncIterator[Page]:
    """A DevTools socket."""
    async with http.ws_connect(url, max_msg_size=0) as socket:
        page = Page(socket)
        listening = asyncio.create_task(page.listen())
        yield page
        listening.cancel()


@asynccontextmanager
async def chromium(*, width: int = 360, height: int = 640, scale: int = 2) -> AsyncIterator[Page]:
    """A page of the size of a small phone, without cookies or a cache of any other."""
    opened = browser()
    async with aiohttp.ClientSession() as http, connected(http, opened.url) as control:
        context = (await control.command("Target.createBrowserContext"))["browserContextId"]
        target = await control.command("Target.createTarget", url="about:blank", browserContextId=context)
        try:
            async with connected(http, f"{opened.devtools}/devtools/page/{target['targetId']}") as page:
                for domain in ("Page", "Runtime", "Log"):
                    await page.command(f"{domain}.enable")
                await page.resize(width, height, scale)
                yield page
        finally:
            await control.command("Target.disposeBrowserContext", browserContextId=context)
