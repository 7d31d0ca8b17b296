"""A user's command as a child process: its output goes to a log, and it ends with this process."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from shoal.errors import ChildDied
from shoal.net.process import GRACE_S, PARENT, die_with_parent


class Command:
    """A running command, as an async context manager; leaving it ends the command and its process group."""

    def __init__(self, words: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        """`env` replaces the environment of this process."""
        self._words, self._log, self._env = list(words), log, dict(os.environ if env is None else env)

    async def __aenter__(self) -> Self:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        os.environ.pop(PARENT, None)
        try:
            with self._log.open("ab") as output:
                self._process = await asyncio.create_subprocess_exec(
                    *self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise ChildDied(f"{self._words[0]}: cannot be started: {error.strerror}") from error
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GRACE_S):
                    await self._process.wait()

    async def died(self) -> str:
        """Waits until the command has ended; returns how, with the last line of its log."""
        code = await self._process.wait()
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return f"it ended with code {code}: {lines[-1] if lines else 'no output'}"
