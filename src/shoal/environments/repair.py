"""Repair a program until its tests pass: the sandbox runs them after each attempt, and a hint names the failure."""

import json
import random
from typing import Annotated

import msgspec
from msgspec import Meta

from shoal.checker import Code, UnitTest, unit_tests
from shoal.environments.programs import argument, slipped
from shoal.errors import SandboxUnavailable
from shoal.interfaces import Model
from shoal.net.process import cores
from shoal.reward.code import code_of, jobs_of, verdicts
from shoal.reward.code_runner import CodeScorer
from shoal.sandbox.runner import strongest
from shoal.tasks.sdk import Question, environment
from shoal.types import Json, Message, Outcome, Role, Task

CHECKER = Code()
"""Processor time decides, also on a busy machine; wall time ends sleepers."""


class Repair(msgspec.Struct, frozen=True):
    """The reward is 1 when all tests pass within the attempts."""

    attempts: Annotated[int, Meta(ge=1)] = 4
    tests: Annotated[int, Meta(ge=1, le=64)] = 5

    def check(self) -> None:
        """Raises `SandboxUnavailable` when this machine has no sandbox."""
        strongest()

    def draw(self, rng: random.Random) -> Question:
        """A right program with a slip, which mostly shows in one of the tests."""
        chosen, wrong = slipped(rng)
        calls: list[list[Json]] = [[argument(rng, kind) for kind in chosen.takes] for _ in range(self.tests)]
        text = (
            f"This program should give {chosen.what}, and does not:\n```python\n{wrong}```\n"
            "Answer with the whole program, repaired."
        )
        tests: Json = [{"call": "f", "args": call, "returns": chosen.value(call)} for call in calls]
        return Question(text, chosen.source, info=tests)

    async def rollout(self, task: Task, model: Model) -> Outcome:
        """Each attempt runs in the sandbox. Raises `SandboxUnavailable`."""
        tests, messages = unit_tests(json.loads(task.info)["info"], "info"), list(task.messages)
        for attempts_left in reversed(range(self.attempts)):
            said = await model.answer(messages)
            why = await _why_wrong(code_of(said.content), tests)
            if not why:
                return Outcome(reward=1.0)
            if attempts_left:
                messages += [said, Message(Role.USER, f"A test fails: {why}")]
        return Outcome(reward=0.0)


repair = environment("repair", max_running=4 * cores())(Repair)


async def _why_wrong(program: str, tests: list[UnitTest]) -> str:
    """The first test that fails; empty when all pass. Raises `SandboxUnavailable`."""
    (job,) = jobs_of(CHECKER, tests)
    (runs,) = await CodeScorer(1).run([(job, program)])
    if isinstance(runs, SandboxUnavailable):
        raise runs
    for test, verdict in zip(tests, verdicts(job, runs, CHECKER.tolerance), strict=True):
        if verdict.why:
            return f"f({', '.join(map(json.dumps, test.args))}): {verdict.why}"
    return ""
