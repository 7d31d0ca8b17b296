"""Findings of an audit: the promises of a run, and the groups that broke them."""

from dataclasses import dataclass, field
from enum import StrEnum

from shoal.experience.schema import RunMeta

KEPT_IDS = 100
"""Number of offending ids remembered per check; all are counted."""


class Check(StrEnum):
    """A promise of every run."""

    USED_ONCE = "each group is used at most once"
    OLDEST_FIRST = "of each task the oldest groups are consumed first"
    STALENESS = "no token older than max_staleness versions is trained"
    STREAMS = "tokens, logprobs and versions have one length"
    VERSIONS = "versions do not decrease within a row"
    LOGPROBS = "logprobs are finite and <= 0"
    ACCOUNTING = "started = finished + failed + dropped + in flight"
    READABLE = "every record can be read"
    ADMISSION = "no more groups are accepted and running than the bound allows"
    USABLE = "no group is trained of which half or more failed"
    FAILURES = "failed rollouts have a reason, and unscored rollouts have no reward"
    STEPS = "steps follow one another and push when it is due"
    PUBLISHED = "no version is published before its step is recorded"
    CHECKPOINTS = "the log has every step that a checkpoint holds"


@dataclass(slots=True)
class Finding:
    """The groups or rollouts that broke one promise."""

    count: int = 0
    offenders: list[tuple[str, str]] = field(default_factory=list)
    """Id of each offending group or rollout with its fault; the first `KEPT_IDS`."""

    @property
    def ids(self) -> list[str]:
        """Ids of the offending groups or rollouts."""
        return [offender for offender, _ in self.offenders]


@dataclass(slots=True)
class AuditReport:
    """Figures and findings of an audit."""

    meta: RunMeta
    started: int = 0
    finished: int = 0
    """Number of usable groups that were not dropped since."""
    failed: int = 0
    dropped: int = 0
    in_flight: int = 0
    consumed: int = 0
    steps: int = 0
    rollouts: int = 0
    tokens: int = 0
    """Number of sampled tokens."""
    staleness_max: int = 0
    """Highest staleness of the trained tokens at consumption, in Versions."""
    staleness_steps: int = 0
    """Highest staleness in steps: with a new Version every K steps, one Version is up to K steps."""
    findings: dict[Check, Finding] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """True if every promise was kept."""
        return not self.findings

    def sentences(self) -> list[str]:
        """The report in words, a line each."""
        lines = [
            f"{self.started} groups started = {self.finished} finished + {self.failed} failed + {self.dropped} dropped "
            f"+ {self.in_flight} in flight",
            f"{self.consumed} groups consumed by {self.steps} steps; {self.rollouts} rollouts, {self.tokens} tokens; "
            f"staleness at most {self.staleness_max} versions, {self.staleness_steps} steps "
            f"(max_staleness {self.meta.max_staleness}, late groups: {self.meta.late})",
        ]
        for check in Check:
            finding = self.findings.get(check)
            lines.append(f"{'ok    ' if finding is None else 'BROKEN'} {check}")
            if finding is not None:
                lines += [f"       {offender}: {detail}" for offender, detail in finding.offenders]
                if finding.count > len(finding.offenders):
                    lines.append(f"       and {finding.count - len(finding.offenders)} more")
        return lines

    def found(self, check: Check, offender: str, detail: str) -> None:
        """Records one offence."""
        finding = self.findings.setdefault(check, Finding())
        finding.count += 1
        if len(finding.offenders) < KEPT_IDS:
            finding.offenders.append((offender, detail))
