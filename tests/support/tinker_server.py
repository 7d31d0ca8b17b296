"""A running `shoal serve tinker` and the environment of its clients."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.net.listening import free_port

KEYS = ("tml-first", "tml-second")
WAIT_S = 120


@dataclass
class TinkerServer:
    """The server's process, its URL, and how to start another one on the same folder and port."""

    process: subprocess.Popen[str]
    url: str
    folder: Path
    model: str
    arguments: tuple[str, ...] = ()

    def kill(self) -> None:
        """Ends the server at once; its children die with it."""
        self.process.send_signal(signal.SIGKILL)
        self._reap()

    def end(self) -> None:
        """Asks the server to end."""
        self.process.terminate()
        self._reap()

    def _reap(self) -> None:
        self.process.wait(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def start_again(self) -> None:
        """Starts the server on the same folder and port."""
        port = int(self.url.rpartition(":")[2])
        self.process, self.url = _started(self.model, self.folder, port, self.arguments)


@contextmanager
def tinker_serving(model: Path, folder: Path, *arguments: str, name: str = "tiny") -> Iterator[TinkerServer]:
    """Serves one model under a name."""
    process, url = _started(f"{name}={model}", folder, free_port(), arguments)
    server = TinkerServer(process, url, folder, f"{name}={model}", arguments)
    try:
        yield server
    finally:
        server.end()


def _started(model: str, folder: Path, port: int, arguments: Sequence[str]) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "shoal.cli", "serve", "tinker", "--model", model, "--device", "cpu"]
    process = subprocess.Popen(
        [*command, "--port", str(port), "--folder", str(folder), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TINKER_API_KEY": ",".join(KEYS)},
    )
    assert process.stdout is not None
    found = re.match(r"TINKER_BASE_URL=(\S+)", process.stdout.readline())
    assert found is not None
    return process, found[1]
