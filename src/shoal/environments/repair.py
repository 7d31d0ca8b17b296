"""Repair a program until its tests pass: the sandbox runs them after each attempt, and a hint names the failure."""

import json
import random
import re
from typing import Any

import msgspec

from shoal.environments.programs import PROGRAMS
from shoal.interfaces import Model
from shoal.net.process import cores
from shoal.sandbox.program import Ended, Program, ProgramLimits
from shoal.sandbox.runner import run_async, strongest
from shoal.tasks.sdk import Question, task
from shoal.types import Json, Message, Outcome, Role, Task

_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = ProgramLimits(wall_s=60.0, cpu_s=5.0, output_bytes=1 << 16, file_bytes=1 << 16)
"""Processor time decides, also on a busy machine; wall time ends sleepers."""
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


class Repair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The reward is 1 when all tests pass within the attempts."""

    attempts: int = 4
    tests: int = 5

    def __post_init__(self) -> None:
        if self.attempts < 1 or not 1 <= self.tests <= 64:
            raise ValueError("expected at least 1 attempt and 1 to 64 tests")

    def check(self) -> None:
        """Raises `SandboxUnavailable` when this machine has no sandbox."""
        strongest()

    def draw(self, rng: random.Random) -> Question:
        """A right program with a slip, which mostly shows in one of the tests."""
        chosen = rng.choice(PROGRAMS)
        calls: list[list[Json]] = [[_argument(rng, kind) for kind in chosen.takes] for _ in range(self.tests)]
        before, after = rng.choice(chosen.slips)
        wrong = chosen.source.replace(before, after, 1)
        text = (
            f"This program should give {chosen.what}, and does not:\n```python\n{wrong}```\n"
            "Answer with the whole program, repaired."
        )
        tests: Json = [[call, chosen.value(call)] for call in calls]
        return Question(text, chosen.source, info=tests)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Each attempt runs in the sandbox. Raises `SandboxUnavailable`."""
        tests, messages = json.loads(task.info)["info"], list(task.messages)
        for attempts_left in reversed(range(self.attempts)):
            said = await model.answer(messages)
            why = await _why_wrong(program_in(said.content), tests)
            if not why:
                return Outcome(reward=1.0)
            if attempts_left:
                messages += [said, Message(Role.USER, f"A test fails: {why}")]
        return Outcome(reward=0.0)


repair = task("repair", max_running=4 * cores())(Repair)


async def _why_wrong(source: str, tests: list[list[Any]]) -> str:
    """The first test that fails; empty when all pass."""
    program = Program(DRIVER, stdin=json.dumps([source, [call for call, _ in tests]]).encode())
    ended = await run_async(program, LIMITS)
    lines = ended.stdout.decode(errors="replace").splitlines()
    for (call, value), line in zip(tests, lines, strict=False):
        if line != json.dumps(value):
            return f"f({', '.join(map(json.dumps, call))}) should be {json.dumps(value)}, got {line[:200]}"
    if len(lines) == len(tests):
        return ""
    if ended.ended is not Ended.EXITED:
        return f"the program was stopped ({ended.ended})"
    said = ended.stderr.decode(errors="replace").strip().splitlines()
    return said[-1][:200] if said else "the program ended before its tests"


def program_in(answer: str) -> str:
    """The last fenced block of an answer, else all of it."""
    blocks: list[str] = _FENCE.findall(answer)
    return blocks[-1] if blocks else answer


def _argument(rng: random.Random, kind: str) -> Json:
    if kind == "int":
        return rng.randint(0, 9)
    return [rng.randint(-20, 20) for _ in range(rng.randint(1, 6))]
