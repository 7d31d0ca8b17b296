"""First failures of a run: where all fail for one reason, the next ones would too, so the run ends with that reason."""

import re
from collections.abc import Sequence

from shoal.errors import TaskError
from shoal.types import Rollout, RolloutStatus

ALIKE, ROLLOUTS = 4, 16
"""Groups (or questions) and their rollouts: as many must fail for one reason before any other ending."""
_VARYING = re.compile(r"0x[0-9a-f]+|[0-9a-f]{8,}|\d+", re.IGNORECASE)


class FirstFailures:
    """Watcher of the first groups or questions of a run, in the order of their start. Pure.

    A failure counts when all that started before it have ended, since failures are often quicker than answers.
    Any rollout that finishes, or a second reason, ends the watch: later failures are for those who count them.
    """

    def __init__(self, what: str) -> None:
        """`what` names the watched things in the plural, such as `groups`."""
        self._what = what
        self._started = self._seen = self._rollouts = 0
        self._failed: dict[int, int] = {}  # rollouts of those that ended before an earlier one, by place
        self._kind: str | None = None
        self._over = False

    def started(self) -> int:
        """Notes that one more starts. Returns its place, counted from 0."""
        self._started += 1
        return self._started - 1

    def ended(self, place: int, rollouts: Sequence[Rollout]) -> None:
        """Takes the rollouts of one. Raises `TaskError` when all of the first ones failed for one reason."""
        reasons = [rollout.reason for rollout in rollouts if rollout.status is RolloutStatus.FAILED]
        kinds = {_VARYING.sub("#", reason) for reason in reasons}
        self._over |= len(reasons) < len(rollouts) or not reasons or len(kinds | {self._kind or min(kinds)}) > 1
        if self._over:
            return
        (self._kind,) = kinds
        self._failed[place] = len(rollouts)
        while self._seen in self._failed:
            self._rollouts += self._failed.pop(self._seen)
            self._seen += 1
            if self._seen >= ALIKE and self._rollouts >= ROLLOUTS:
                raise TaskError(
                    f"expected answers that can be trained, got {self._rollouts} failures of the first {self._seen} "
                    f"{self._what}, all for one reason: {reasons[0]}; mend that, then start again or go on "
                    "with --resume"
                )
