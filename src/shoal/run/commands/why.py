"""`shoal why`: what moved the weights in one step, from the log, the metrics and a replay of the step."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from shoal.observe.metrics import Record, number, read_records
from shoal.run.commands.replay import opened_replay, reading_steps
from shoal.types import Group, Role

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
        group, rewards = self.group, [one.reward.value for one in self.group.finished]
        asked = [one.content for one in group.task.messages if one.role is Role.USER][-1:] or [""]
        question = " ".join(asked[0].split())[:MOST_QUESTION]
        whose = "peer" if group.external else "own"
        spread = f"{fmean(rewards):.2f} ({min(rewards):g} to {max(rewards):g})"
        versions = str(group.oldest_version)
        return f"{self.influence:.3f}", f"{self.along:+.3f}", spread, versions, whose, group.task.service, question


HEADS = ("influence", "along", "reward", "oldest Version", "from", "task", "question")


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


async def reasons(run_dir: Path, step: int, threads: int | None = None) -> Reasons:
    """Takes a step of a run again, counted from 0, and weighs its groups. Raises a `ShoalError`."""
    with reading_steps(run_dir) as logged:
        (record,) = logged.between(step, step)
        async with opened_replay(logged, threads=threads) as replay:
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
