"""A network namespace with one link to this machine, which can be taken down."""

import contextlib
import os
import subprocess
from types import TracebackType

# Two of these may run on one machine.
NAME = f"churn{os.getpid()}"
OURS, THEIRS = f"{NAME}a", f"{NAME}b"
HERE, THERE = (f"10.77.{os.getpid() % 256}.{end}" for end in (1, 2))


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
        _ip("link", "set", OURS, "down")

    def up(self) -> None:
        """Heals."""
        _ip("link", "set", OURS, "up")

    def _make(self) -> None:
        subprocess.run(["ip", "netns", "delete", NAME], check=False, capture_output=True)
        _ip("netns", "add", NAME)
        _ip("link", "add", OURS, "type", "veth", "peer", "name", THEIRS)
        _ip("link", "set", THEIRS, "netns", NAME)
        _ip("address", "add", f"{HERE}/24", "dev", OURS)
        _ip("link", "set", OURS, "up")
        for arguments in (
            ("address", "add", f"{THERE}/24", "dev", THEIRS),
            ("link", "set", THEIRS, "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", NAME, *arguments)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
