"""`shoal replay` takes logged steps again on their logged groups, and compares them with what the run recorded.

`shoal why` tells what moved the weights in one step, from the log, the metrics and a replay of the step.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from sqlite3 import Connection
from statistics import fmean
from tempfile import TemporaryDirectory

from safetensors import safe_open

from shoal.config import Config, load
from shoal.errors import RunDirError
from shoal.experience import log
from shoal.experience.checkpoint import checkpoints
from shoal.experience.schema import StepRecord
from shoal.model.renderer_loading import load_renderer
from shoal.observe.metrics import Record, number, read_records
from shoal.run.machine.devices import Threads, devices_of
from shoal.run.policy import StepRows, Steps
from shoal.run.prepare import model_directory
from shoal.run.teacher import text_teacher
from shoal.trainer.messages import STATS_MEANINGS, StepStats, TokensFile
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Group, Role

BEGINNING = -1
"""The step before the first."""


@dataclass(frozen=True, slots=True)
class LoggedSteps:
    """Steps of a run as its log and its metrics have them. Steps count from 0 here, and from 1 for people."""

    run_dir: Path
    connection: Connection
    records: dict[int, StepRecord]
    metrics: dict[int, Record]
    """Metrics of each step, where the run wrote them."""

    def groups(self, step: int) -> list[Group]:
        """Groups of a step, in training order."""
        return log.read_step(self.connection, step)

    def weights(self, step: int) -> str | None:
        """Fingerprint of the weights after a step, if the run recorded it."""
        return log.weights_of(self.connection, step)

    def between(self, first: int, last: int) -> list[StepRecord]:
        """Records of the steps `first` to `last`. Raises `RunDirError` for steps that the log does not have."""
        if first > last or first not in self.records or last not in self.records:
            raise RunDirError(
                f"--step: expected steps of {self.run_dir}, whose log has 1 to {len(self.records)}, "
                f"got {first + 1} to {last + 1}"
            )
        return [self.records[step] for step in range(first, last + 1)]


@contextmanager
def reading_steps(run_dir: Path) -> Iterator[LoggedSteps]:
    """Opens the log of a run at one moment. Raises `RunDirError`."""
    metrics = read_records(run_dir / "metrics.jsonl")
    of_step = {int(str(one["step"])) - 1: one for one in metrics if one["kind"] == "step"}
    with log.snapshot(run_dir) as connection:
        records = {one.step: one for one in log.read_steps(connection)}
        yield LoggedSteps(run_dir, connection, records, of_step)


@dataclass(slots=True)
class Replay:
    """A trainer that goes to any step of a run and takes it again.

    Invariant: after `go_after(step)` its weights and moments are the run's after that step, on the run's hardware.
    """

    logged: LoggedSteps
    steps: Steps
    trainer: TrainerProcess
    folder: Path
    """Folder of saved states, which goes with the replay."""
    at: int | None = BEGINNING
    """The step whose outcome the trainer holds; None once it has been trained on anything else."""
    saved: dict[int, Path] = field(default_factory=dict)

    async def save(self) -> Path:
        """Saves the present state; `go_after` then begins there. Returns its folder."""
        directory = self.folder / f"state-{self.at}"
        directory.mkdir()
        await self.trainer.save(directory)
        if self.at is not None:
            self.saved[self.at] = directory
        return directory

    async def keep_after(self, step: int) -> None:
        """Brings the trainer to the end of a step, and saves that state for later."""
        await self.go_after(step)
        if step not in self.saved:
            await self.save()

    async def go_after(self, step: int) -> None:
        """Brings the trainer to the end of a step: from the nearest saved state before it, by the logged steps."""
        nearest = max(saved for saved in self.saved if saved <= step)
        if self.at is None or not nearest <= self.at <= step:
            await self.trainer.load(self.saved[nearest])
            self.at = nearest
        while self.at < step:
            await self.take(self.logged.records[self.at + 1])

    async def take(
        self,
        record: StepRecord,
        groups: Sequence[Group] | None = None,
        tokens_file: TokensFile | None = None,
        change: Callable[[StepRows], StepRows] = lambda rows: rows,
    ) -> StepStats | None:
        """Takes a recorded step from the present state, on its logged groups unless others are given; without any the
        weights stay. `change` is made to the rows of other groups."""
        as_logged = groups is None and self.at == record.step - 1
        self.at = None
        given = self.logged.groups(record.step) if groups is None else groups
        stats = await self.steps.repeat(record, given, tokens_file, change) if given else None
        if record.version_after != record.version:
            await self.trainer.write_version(None)
        self.at = record.step if as_logged else None
        return stats

    async def weigh(self, record: StepRecord) -> dict[str, tuple[float, float]]:
        """Takes a step on its logged groups; gives each group's influence on it, and its part along the update."""
        rows, since_push = await self.steps.rows(self.logged.groups(record.step), record.version), record.step
        since_push %= self.steps.config.train.push_every
        self.at = None
        found = await self.trainer.influences(list(rows.of_group.values()), record.version, since_push)
        return dict(zip(rows.of_group, found, strict=True))


@asynccontextmanager
async def opened_replay(logged: LoggedSteps, overrides: Sequence[str] = ()) -> AsyncIterator[Replay]:
    """Starts a trainer for the run's steps, with its own settings or others. Raises a `ShoalError`."""
    config = settings_of(logged.run_dir, overrides)
    model_dir, threads = await asyncio.to_thread(model_directory, config.model.path), Threads().trainer
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="shoal-replay-")))
        ranks = local_ranks(folder / "trainer.log", threads, config.train.ranks, devices_of(config).ranks)
        trainer = TrainerProcess(await stack.enter_async_context(ranks))
        await trainer.start(model_dir, config, threads)
        teacher = await stack.enter_async_context(text_teacher(config.train, load_renderer(model_dir)))
        replay = Replay(logged, Steps(config, trainer, teacher), trainer, folder)
        await replay.save()
        replay.saved |= {one.step: one.path for one in checkpoints(logged.run_dir)}
        yield replay


def numbers_by_row(file: Path, name: str) -> dict[int, list[float]]:
    """Numbers of the trained tokens of each computed row, from the files that ranks wrote; they are removed."""
    found: dict[int, list[float]] = {}
    for part in file.parent.glob(f"{file.stem}.*"):
        with safe_open(part, framework="numpy") as opened:
            has_rows = name in opened.keys()  # noqa: SIM118
            names = ("row_R", "count_R", name) if has_rows else ()
            row_R, count_R, number_N = [opened.get_tensor(one).tolist() for one in names] or ([], [], [])
        part.unlink()
        numbers: Iterator[float] = iter(number_N)
        found |= {row: list(islice(numbers, count)) for row, count in zip(row_R, count_R, strict=True)}
    return found


def settings_of(run_dir: Path, overrides: Sequence[str]) -> Config:
    """Settings of a run, and others in place of some."""
    return load(run_dir / "resolved.toml", [f"run_dir={json.dumps(str(run_dir))}", *overrides])


@dataclass(frozen=True, slots=True)
class Repeated:
    """A step that was taken again."""

    step: int
    weights: str
    recorded: str | None
    """Fingerprint in the log, or None."""
    other: dict[str, tuple[float, float]]
    """Statistics that differ from those of the run: recorded and repeated."""

    @property
    def same(self) -> bool:
        """Whether nothing that the run recorded differs."""
        return self.recorded in (None, self.weights) and not self.other

    @property
    def sentence(self) -> str:
        """One line for people."""
        known = {None: "not recorded", self.weights: "the same bits"}.get(self.recorded, f"DIFFER from {self.recorded}")
        others = "".join(f"; {name} {old!r} became {new!r}" for name, (old, new) in self.other.items())
        return f"step {self.step + 1}: weights {self.weights} {known}{others or '; all statistics equal'}"


def differing(stats: StepStats, recorded: Record) -> dict[str, tuple[float, float]]:
    """Statistics that differ from a recorded step's; those that either lacks are left out."""
    values = asdict(stats)
    pairs = {name: (recorded.get(name), values[name]) for name in STATS_MEANINGS}
    return {
        name: (float(old), float(new))
        for name, (old, new) in pairs.items()
        if isinstance(old, int | float) and isinstance(new, int | float) and old != new
    }


async def replay_steps(run_dir: Path, first: int, last: int, show: Callable[[Repeated], None]) -> list[Repeated]:
    """Takes the steps `first` to `last` of a run again, counted from 0, and shows each. Raises a `ShoalError`."""
    found = []
    with reading_steps(run_dir) as logged:
        records = logged.between(first, last)
        async with opened_replay(logged) as replay:
            await replay.go_after(first - 1)
            for record in records:
                stats = await replay.take(record)
                assert stats is not None, "a logged step has groups"
                other = differing(stats, logged.metrics.get(record.step, {}))
                found.append(Repeated(record.step, stats.weights, logged.weights(record.step), other))
                show(found[-1])
    return found


MOST_QUESTION = 48
"""Characters of a question in the table."""
REWARD = "reward/"


@dataclass(frozen=True, slots=True)
class GroupWeight:
    """A group of a step, and its influence on the update."""

    group: Group
    influence: float
    """Size of the change of the update without the group's gradient, over the size of the update (to first order)."""
    along: float
    """Share of the update that the group gives; below 0 it pulled against the update."""

    @property
    def row(self) -> tuple[str, ...]:
        """Cells of the table."""
        return f"{self.influence:.3f}", f"{self.along:+.3f}", *described(self.group)


GROUP_HEADS = ("reward", "oldest Version", "from", "task", "question")
HEADS = ("influence", "along", *GROUP_HEADS)


def described(group: Group) -> tuple[str, ...]:
    """Cells of a group under `GROUP_HEADS`."""
    rewards = [one.reward.value for one in group.finished]
    asked = [one.content for one in group.task.messages if one.role is Role.USER][-1:] or [""]
    question = " ".join(asked[0].split())[:MOST_QUESTION]
    spread = f"{fmean(rewards):.2f} ({min(rewards):g} to {max(rewards):g})"
    return spread, str(group.oldest_version), "peer" if group.external else "own", group.task.service, question


@dataclass(frozen=True, slots=True)
class Reasons:
    """Groups of one step by influence, with its numbers and events."""

    step: int
    version: int
    groups: Sequence[GroupWeight]
    """Groups by falling influence."""
    metrics: Record
    before: Record
    """Metrics of the step before; empty for the first."""
    events: Sequence[str]

    @property
    def sentences(self) -> list[str]:
        """Sentences on the groups and numbers of the step."""
        metrics, total = self.metrics, sum(one.influence for one in self.groups)
        half, most = 0.0, 0
        while half < total / 2:
            half, most = half + self.groups[most].influence, most + 1
        against = sum(one.along < 0 for one in self.groups)
        peers = sum(one.group.external for one in self.groups)
        lines = [
            f"step {self.step + 1} trained Version {self.version} on {len(self.groups)} groups, {peers} of peers.",
            f"{most} of {len(self.groups)} groups have half of the influence on the update; {against} pulled back.",
        ]
        if not metrics:
            return [*lines, "metrics.jsonl has no numbers of this step."]
        lines += [
            f"the weights moved by {number(metrics, 'update_norm'):.3g}, with a gradient of norm "
            f"{number(metrics, 'grad_norm'):.3g} and a rate of {number(metrics, 'lr'):.3g}.",
            f"{number(metrics, 'clipped_share'):.1%} of the tokens were clipped, {number(metrics, 'masked_share'):.1%} "
            f"masked and {number(metrics, 'capped_share'):.1%} capped; {number(metrics, 'late_tokens', 0):g} late.",
            f"staleness: {number(metrics, 'staleness_mean'):.2f} on average, {number(metrics, 'staleness_max'):g} at "
            f"most; trainer and engine differ by {number(metrics, 'mismatch'):.3g} nats per token.",
        ]
        lines += [self._changed(name) for name in sorted(metrics) if name == "reward" or name.startswith(REWARD)]
        return lines + [f"event: {event}" for event in self.events]

    def _changed(self, name: str) -> str:
        now, then = number(self.metrics, name), number(self.before, name)
        of = f" of {name.removeprefix(REWARD)}" if name.startswith(REWARD) else ""
        return f"mean reward{of}: {now:.3f}" + (f", {now - then:+.3f} since the step before." if then == then else ".")

    @property
    def values(self) -> dict[str, object]:
        """Values for programs."""
        groups = [{"id": one.group.id, "influence": one.influence, "along": one.along} for one in self.groups]
        return {"step": self.step + 1, "version": self.version, "groups": groups, "events": list(self.events)}


async def reasons(run_dir: Path, step: int) -> Reasons:
    """Takes a step of a run again, counted from 0, and weighs its groups. Raises a `ShoalError`."""
    with reading_steps(run_dir) as logged:
        (record,) = logged.between(step, step)
        async with opened_replay(logged) as replay:
            await replay.go_after(step - 1)
            weighed = await replay.weigh(record)
        by_id = {group.id: group for group in logged.groups(step)}
        groups = [GroupWeight(by_id[name], *pair) for name, pair in weighed.items()]
        ranked = sorted(groups, key=lambda one: -one.influence)
        now, before = logged.metrics.get(step, {}), logged.metrics.get(step - 1, {})
    events = _events(read_records(run_dir / "metrics.jsonl"), step + 1)
    return Reasons(step, record.version, ranked, now, before, events)


def _events(records: Sequence[Record], step: int) -> list[str]:
    """Events of a step: those that name it, and those between its record and that of the step before."""
    found, inside = [], step == 1
    for record in records:
        if record["kind"] == "step":
            inside = record.get("step") == step - 1
        elif record["kind"] == "event" and (record.get("step") == step or (inside and "step" not in record)):
            found.append(" ".join(str(record[key]) for key in ("name", "reason") if key in record))
    return found
