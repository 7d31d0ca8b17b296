"""Repair a program until its tests pass: the sandbox runs them after each attempt, and a hint names the failure."""

import asyncio
import json
import os
import random
import re
from functools import cached_property

import msgspec

from shoal.interfaces import Chat
from shoal.sandbox.program import Ended, Program, ProgramLimits
from shoal.sandbox.runner import run_async
from shoal.tasks.games.programs import PROGRAMS
from shoal.tasks.games.seeded_game import Posed, SeededGame, hidden_of
from shoal.types import Outcome, Task

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = ProgramLimits(wall_s=5.0, cpu_s=5.0, output_bytes=1 << 16, file_bytes=1 << 16)
DRIVER = """
import contextlib, io, json, sys
source, calls = json.loads(sys.stdin.read())
scope, quiet = {}, io.StringIO()
with contextlib.redirect_stdout(quiet):
    exec(compile(source, "program.py", "exec"), scope)
for arguments in calls:
    try:
        with contextlib.redirect_stdout(quiet):
            line = json.dumps(scope["f"](*arguments))
    except Exception as error:
        line = "!" + type(error).__name__ + ": " + str(error)[:200].replace(chr(10), " ")
    print(line, flush=True)
"""
"""Source that prints the program's value of each call; the comparison happens outside the sandbox."""


class RepairParameters(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of a rollout."""

    attempts: int = 4
    tests: int = 5

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 1 <= self.tests <= 64:
            raise ValueError("expected at least 1 attempt and 1 to 64 tests")


class Tests(msgspec.Struct, frozen=True):
    """Calls of `f` and their right values."""

    calls: list[list[object]]
    values: list[object]


class Repair(SeededGame):
    """The reward is 1 when all tests pass within the attempts."""

    parameters = RepairParameters

    def posed(self, rng: random.Random) -> Posed:
        """A right program with a slip, which mostly shows in one of the tests."""
        chosen = rng.choice(PROGRAMS)
        calls: list[list[object]] = [
            [_argument(rng, kind) for kind in chosen.takes] for _ in range(self._parameters.tests)
        ]
        before, after = rng.choice(chosen.slips)
        wrong = chosen.source.replace(before, after, 1)
        text = (
            f"This program should give {chosen.what}, and does not:\n```python\n{wrong}```\n"
            "Answer with the whole program, repaired."
        )
        return Posed(text, Tests(calls, [chosen.value(*call) for call in calls]), chosen.source)

    async def play(self, task: Task, chat: Chat) -> Outcome:
        """Each attempt runs in the sandbox. Raises `SandboxUnavailable`."""
        tests, messages = hidden_of(task, Tests), list(task.messages)
        for attempts_left in reversed(range(self._parameters.attempts)):
            said = await chat.answer(messages)
            why = await self._why_wrong(program_in(said.content), tests)
            if not why:
                return Outcome(reward=1.0)
            if attempts_left:
                messages += [said, self.reply(f"A test fails: {why}")]
        return Outcome(reward=0.0)

    async def _why_wrong(self, source: str, tests: Tests) -> str:
        """The first test that fails; empty when all pass."""
        program = Program(DRIVER, stdin=json.dumps([source, tests.calls]).encode())
        async with self._at_once:
            ended = await run_async(program, LIMITS)
        lines = ended.stdout.decode(errors="replace").splitlines()
        for call, value, line in zip(tests.calls, tests.values, lines, strict=False):
            if line != json.dumps(value):
                return f"f({', '.join(map(json.dumps, call))}) should be {json.dumps(value)}, got {line[:200]}"
        if len(lines) == len(tests.calls):
            return ""
        if ended.ended is not Ended.EXITED:
            return f"the program was stopped ({ended.ended})"
        said = ended.stderr.decode(errors="replace").strip().splitlines()
        return said[-1][:200] if said else "the program ended before its tests"

    @cached_property
    def _at_once(self) -> asyncio.Semaphore:
        return asyncio.Semaphore(os.cpu_count() or 1)

    @property
    def _parameters(self) -> RepairParameters:
        assert isinstance(self._given, RepairParameters)
        return self._given


def program_in(answer: str) -> str:
    """The last fenced block of an answer, else all of it."""
    blocks: list[str] = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def _argument(rng: random.Random, kind: str) -> int | list[int]:
    if kind == "int":
        return rng.randint(0, 9)
    return [rng.randint(-20, 20) for _ in range(rng.randint(1, 6))]
