"""A network namespace with one link to this machine, which can be taken down."""

import contextlib
import os
import subprocess
from types import TracebackType

NAME = "shoal-churn"
HERE, THERE = "10.77.31.1", "10.77.31.2"


class Cut:
    """Use as a context manager. Without root or `ip` there is no namespace, and nobody can be cut off."""

    def __init__(self) -> None:
        self.possible = False

    def __enter__(self) -> "Cut":
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            if os.geteuid() == 0:
                self._make()
                self.possible = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.possible:
            subprocess.run(["ip", "netns", "delete", NAME], check=False)  # its end of the link goes, and so does ours

    @property
    def host(self) -> str:
        """Where members reach the servers."""
        return HERE if self.possible else "127.0.0.1"

    @property
    def listen(self) -> str:
        """Where the servers listen."""
        return "0.0.0.0" if self.possible else "127.0.0.1"

    @property
    def prefix(self) -> list[str]:
        """Of the command of the member that is to be cut off."""
        return ["ip", "netns", "exec", NAME] if self.possible else []

    def down(self) -> None:
        """Cuts it off."""
        _ip("link", "set", "shoal-churn0", "down")

    def up(self) -> None:
        """Heals."""
        _ip("link", "set", "shoal-churn0", "up")

    def _make(self) -> None:
        subprocess.run(["ip", "netns", "delete", NAME], check=False, capture_output=True)
        _ip("netns", "add", NAME)
        _ip("link", "add", "shoal-churn0", "type", "veth", "peer", "name", "shoal-churn1")
        _ip("link", "set", "shoal-churn1", "netns", NAME)
        _ip("address", "add", f"{HERE}/24", "dev", "shoal-churn0")
        _ip("link", "set", "shoal-churn0", "up")
        for arguments in (
            ("address", "add", f"{THERE}/24", "dev", "shoal-churn1"),
            ("link", "set", "shoal-churn1", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", NAME, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
