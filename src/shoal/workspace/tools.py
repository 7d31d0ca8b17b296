"""Tools on a workspace by the conventions of coding agents: bash, edit, read, python.

All of them run in the workspace's sandbox, so no path leads a tool outside. What they return is shortened in the
middle, and a limit that was hit is said.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.sandbox.program import Ended, Finished, ProgramLimits
from shoal.workspace.changes import Worklog
from shoal.workspace.fork import LIMITS, Workspace

if TYPE_CHECKING:
    from mcp.server.mcpserver import MCPServer

MOST_LINES = 2000
MOST_COMMAND_BYTES = 50_000
"""Bytes of a command. Linux takes 131,071 in one argument, and the sandbox's launcher two for each byte."""
_FILES = Path(__file__).parent / "in_sandbox" / "files.py"
_PYTHON = ("/usr/bin/env", "python3", "-I", "-S", "-X", "utf8", "-c")
_ENDS = {
    Ended.KILLED_WALL: "it took longer than {limits.wall_s:g} s",
    Ended.KILLED_CPU: "it used more than {limits.cpu_s:g} s of processor time",
    Ended.KILLED_MEMORY: "it used more than {limits.memory_bytes} bytes of memory",
    Ended.KILLED_OUTPUT: "it wrote more than {limits.output_bytes} bytes of output",
    Ended.KILLED_PROCESSES: "it had more than {limits.processes} processes and threads",
    Ended.KILLED_FILES: "the workspace's changes exceeded {limits.file_bytes} bytes",
    Ended.SIGNALLED: "a signal ended it",
}
Tool = Callable[..., Awaitable[str]]


@dataclass(frozen=True)
class Tools:
    """The tools of one workspace. Each raises `SandboxUnavailable` when the sandbox failed."""

    workspace: Workspace
    limits: ProgramLimits = LIMITS
    most_characters: int = 16_000
    """Characters of one result."""
    worklog: Worklog | None = None
    """Record of each command, if given."""

    def all(self) -> Sequence[Tool]:
        """The tools, in the order in which a model sees them."""
        return (self.bash, self.edit, self.read, self.python)

    async def bash(self, command: str) -> str:
        """Runs a command in bash. The directory, variables and functions stay for the next command.

        Args:
            command: The command. It has no network and no terminal.
        """
        if (size := len(command.encode(errors="replace"))) > MOST_COMMAND_BYTES or "\0" in command:
            return f"[expected a command of at most {MOST_COMMAND_BYTES} bytes without NUL, got {size} bytes]"
        return await self._said(await self.workspace.run(command, self.limits))

    async def edit(self, path: str, old_text: str, new_text: str) -> str:
        """Replaces a text that occurs once in a file. With an empty old_text it writes a new file.

        Args:
            path: The file, relative to the task's folder or absolute.
            old_text: The text as it is in the file, with its spaces and line ends.
            new_text: The text in its place.
        """
        return await self._file({"path": path, "old": old_text, "new": new_text})

    async def read(self, path: str, first_line: int = 1, lines: int = MOST_LINES) -> str:
        """Shows lines of a file with their numbers, or the names in a folder.

        Args:
            path: The file, relative to the task's folder or absolute.
            first_line: The number of the first line to show.
            lines: How many lines to show.
        """
        return await self._file({"path": path, "first": first_line, "lines": min(lines, MOST_LINES)})

    async def python(self, code: str) -> str:
        """Runs a Python program in the task's folder and shows what it prints.

        Args:
            code: The program.
        """
        argv = ("/usr/bin/env", "python3", "-")
        stdin = code.encode(errors="replace")
        return await self._said(await self.workspace.run_program(argv, self.limits, stdin=stdin))

    async def _file(self, request: dict[str, str | int]) -> str:
        stdin = json.dumps(request).encode()
        argv = (*_PYTHON, _FILES.read_text())
        return await self._said(await self.workspace.run_program(argv, self.limits, stdin=stdin))

    async def _said(self, finished: Finished) -> str:
        """Output of a command and how it ended, as a model sees it."""
        if self.worklog is not None:
            await asyncio.to_thread(self.worklog.add, finished)
        text = (finished.stdout + finished.stderr).decode(errors="replace")
        if len(text) > self.most_characters:
            half = self.most_characters // 2
            text = f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
        if finished.ok:
            return text
        why = f"exit code {finished.exit_code}"
        if finished.ended is not Ended.EXITED:
            why = "ended: " + _ENDS.get(finished.ended, finished.ended.value).format(limits=self.limits)
        return f"{text}{'' if not text or text.endswith(chr(10)) else chr(10)}[{why}]"


def server(tools: Tools, name: str = "workspace") -> "MCPServer":
    """MCP server with the tools, for any MCP client. It needs the package `mcp`."""
    from mcp.server.mcpserver import MCPServer

    made = MCPServer(name)
    for tool in tools.all():
        made.add_tool(tool)
    return made
