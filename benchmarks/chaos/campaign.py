"""One seed: a run, the faults that its schedule brings, and what two judges say of it afterwards."""

import asyncio
import contextlib
import json
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import JsonValue

from benchmarks.chaos.faults import DISK, Faults, false_clock, small_disk, workplace
from benchmarks.chaos.schedule import Fault, schedule
from benchmarks.chaos.victim import STANDSTILL_S, Victim
from benchmarks.chaos.witness import Witness
from benchmarks.flood import hostile_frames
from benchmarks.processes import commit
from shoal.config import Config, parse
from shoal.experience.audit import AuditReport, Check, audit
from shoal.run.commands.swarm import generate
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.swarm.generator import GeneratorPace, RuleSolver
from shoal.swarm.wire.server import NatsServer, ServerOptions

SWARM = "reef"
QUESTIONS = 64
LAST_STEPS = 3
"""That a run makes without faults at the end."""
STEPS = 1_000_000
POLL_S = 0.05
AT_ONCE = 4
"""Faults that go on together."""
LOST = {Check.ACCOUNTING, Check.READABLE, Check.CHECKPOINTS, Check.STEPS, Check.PUBLISHED}
KEPT = 20
"""Sentences of each sort that a report keeps."""


@dataclass(slots=True)
class Report:
    """What became of a run. `lost`, `doubled` and `stale` are what either judge found."""

    seed: int
    faults: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    """Faults that were done, by kind and role."""
    missed: int = 0
    """Faults that found nothing to be done to, such as no sandbox at that moment; they do not count."""
    left_out: dict[str, str] = field(default_factory=dict)
    resumed: int = 0
    lost: int = 0
    doubled: int = 0
    stale: int = 0
    standstills: int = 0
    unnamed: int = 0
    """Ends without a sentence."""
    inexact: int = 0
    """Replays that gave other weights."""
    audit_ok: bool = False
    steps: int = 0
    groups: int = 0
    seconds: float = 0.0
    load: float = 0.0
    """Processes that wanted a core of the machine, mean of the last quarter of an hour."""
    commit: str = ""
    """Of the source checkout; a seed replays its schedule there."""
    sentences: dict[str, int] = field(default_factory=dict)
    """How the run ended, in its own words."""
    evidence: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the run kept all its promises."""
        broken = self.lost + self.doubled + self.stale + self.standstills + self.unnamed + self.inexact
        return self.audit_ok and not broken


async def campaign(seed: int, seconds: float, most: int | None = None) -> Report:
    """Does faults to one run for so long, at most so many; the schedule is the seed's."""
    report, began_s = Report(seed), time.monotonic()
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(workplace())
        disk = stack.enter_context(small_disk(root))
        await asyncio.to_thread(_prepare, root)
        async with _swarm(root, seed) as url:
            config = config_of(seed, root, root / DISK / "run", url)
            await _endure(config, root, disk, url, report, began_s + seconds, most)
    report.commit = commit()
    report.seconds, report.load = round(time.monotonic() - began_s, 1), round(os.getloadavg()[2], 1)
    return report


def config_of(seed: int, root: Path, run_dir: Path, url: str) -> Config:
    """A run of very short steps that uses every kind of process; what its promises depend on differs by seed."""
    dice = random.Random(f"chaos configuration {seed}")
    swarm: dict[str, JsonValue] = {"servers": [url], "name": SWARM, "external_groups": 1} if url else {}
    code: JsonValue = {"name": "code", "timeout_s": 1.0}
    return parse(
        {
            "run_dir": str(run_dir),
            "seed": seed,
            "stall_s": STANDSTILL_S / 4,
            "model": {"path": str(root / "model")},
            "tasks": [
                {"name": "gcd", "rewrite": [[r"^.*numbers: ([\d, ]+).*$", r"gcd \1"]]},
                {"name": "say", "service": "jsonl", "path": str(root / "say.jsonl"), "scorer": "contains"},
                {"name": "code", "service": "jsonl", "path": str(root / "code.jsonl"), "scorer": code, "weight": 0.3},
            ],
            "rollout": {"group_size": dice.choice([2, 4]), "max_tokens": dice.choice([8, 16])},
            "asynchrony": {"max_staleness": dice.choice([0, 1, 2]), "late": dice.choice(["drop", "mask_tokens"])},
            "train": {
                "steps": STEPS,
                "groups_per_step": dice.choice([2, 3]),
                "push_every": dice.choice([1, 1, 2]),
                "lr": 1e-4,
            },
            "eval": {"every_steps": 50, "questions": 2},
            "checkpoint": {"every_steps": dice.choice([3, 10])},
            "log": {"keep_steps": dice.choice([20, 200])},
            "swarm": swarm,
        }
    )


def _prepare(root: Path) -> None:
    save(untrained(Shape(width=32, heads=2, feed_forward=64, context=256), 0), root / "model")
    say = [{"prompt": f"say {letter}{n}", "answer": letter} for letter in "abcdefgh" for n in range(QUESTIONS // 8)]
    tests = {"tests": [{"stdin": "", "stdout": "4"}]}
    code = [{"prompt": f"print 4, {n}", "info": tests} for n in range(QUESTIONS)]
    for name, rows in (("say", say), ("code", code)):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@contextlib.asynccontextmanager
async def _swarm(root: Path, seed: int) -> AsyncIterator[str]:
    """A server with one honest generator, for every second seed; else no address."""
    if seed % 2:
        yield ""
        return
    async with NatsServer(ServerOptions(root / "server")) as server:
        honest = config_of(seed, root, root / "honest", server.url)
        giving = asyncio.create_task(generate(honest, RuleSolver("truth", 0), GeneratorPace(2, 0.5)))
        try:
            yield server.url
        finally:
            giving.cancel()
            await asyncio.gather(giving, return_exceptions=True)


async def _endure(
    config: Config, root: Path, disk: bool, url: str, report: Report, deadline_s: float, most: int | None
) -> None:
    """All faults, some quiet steps, and the judgement."""
    clock = false_clock(root)
    lies = await asyncio.to_thread(hostile_frames, SWARM, time.time(), []) if url else []
    subjects = [(f"shoal.{SWARM}.offer.{author}", frame) for author, frame in lies]
    witness = Witness(config.asynchrony.late, config.asynchrony.max_staleness)

    def look() -> None:
        if not faults.full:
            witness.look(victim.run_dir)

    victim = Victim(config, root, clock, look)
    faults = Faults(victim, root, disk, bool(clock), url, subjects)
    report.left_out = dict(faults.left_out())
    living = asyncio.create_task(victim.live())
    kinds: Counter[str] = Counter()

    async def do(fault: Fault) -> None:
        if await faults.done(fault):
            kinds[fault.name] += 1
        else:
            report.missed += 1

    try:
        async with asyncio.TaskGroup() as under_way:
            going: set[asyncio.Task[None]] = set()
            for fault in schedule(config.seed):
                if fault.kind in report.left_out:
                    continue
                await _until_due(victim, fault, living)
                while going and (len(going) >= AT_ONCE or (most is not None and kinds.total() + len(going) >= most)):
                    _, going = await asyncio.wait(going, return_when=asyncio.FIRST_COMPLETED)
                if time.monotonic() > deadline_s or kinds.total() == most or living.done():
                    break
                going.add(under_way.create_task(do(fault)))
        await _quiet_steps(victim, living)
        victim.ending = True
        await asyncio.wait([living])
    finally:
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
    living.result()
    report.faults, report.kinds = kinds.total(), dict(sorted(kinds.items()))
    judged(report, victim, witness, await asyncio.to_thread(audit, victim.run_dir))


async def _until_due(victim: Victim, fault: Fault, living: "asyncio.Task[None]") -> None:
    """Waits until the run has made a step since it was started, or is as old as the fault wants; then a while."""

    def may_come() -> bool:
        return victim.has_stepped or (fault.at_start and victim.age_s >= fault.age_s)

    while not may_come() and not living.done():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    await asyncio.sleep(fault.after_s)


async def _quiet_steps(victim: Victim, living: "asyncio.Task[None]") -> None:
    """Some steps of the last process; each time that this takes too long is a standstill, which the victim notes."""
    steps = None
    while not living.done():
        if victim.has_stepped:
            steps = victim.steps if steps is None else steps
            if victim.steps >= steps + LAST_STEPS:
                return
        await asyncio.sleep(POLL_S)


def judged(report: Report, victim: Victim, witness: Witness, found: AuditReport) -> None:
    """Puts what was seen into the report."""
    counts = {check: finding.count for check, finding in found.findings.items()}
    report.resumed = victim.resumed
    report.lost = len(witness.lost) + sum(counts.get(check, 0) for check in LOST)
    report.doubled = len(witness.doubled) + counts.get(Check.USED_ONCE, 0)
    report.stale = len(witness.stale) + counts.get(Check.STALENESS, 0)
    report.standstills, report.unnamed = len(victim.standstills), len(victim.unnamed)
    report.inexact = victim.events().count("replay_not_exact")
    report.audit_ok, report.steps, report.groups = found.ok, found.steps, found.consumed
    report.sentences = dict(Counter(victim.sentences))
    report.evidence = [
        *witness.lost[:KEPT],
        *witness.doubled[:KEPT],
        *witness.stale[:KEPT],
        *victim.standstills[:KEPT],
        *victim.unnamed[:KEPT],
        *(f"{check}: {finding.offenders[:KEPT]}" for check, finding in found.findings.items()),
    ]


def as_values(report: Report) -> dict[str, object]:
    """For a line of JSON."""
    return asdict(report)
