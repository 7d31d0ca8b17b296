"""The groups that a step trains, and the log's record of their use. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.experience.balance import WaitingGroup
from shoal.experience.log import ConsumedGroup
from shoal.types import Sample


@dataclass(frozen=True, slots=True)
class Taken:
    """A group being trained on."""

    waited: WaitingGroup
    version: int
    horizon: int

    def use(self, rows: Sequence[Sample] = (), bound: int = 0) -> ConsumedGroup:
        """The record of a use. The trainer masks tokens older than `bound` in `rows`.

        Masked tokens are counted in the rows and not derived from the bound, because the audit compares the two.
        """
        oldest: int | None = self.waited.oldest_version
        masked = 0
        if rows and self.waited.oldest_version < bound:
            oldest, masked = late_tokens(rows, bound)
        return ConsumedGroup(self.waited.finished_seq, self.horizon, oldest, masked)


def late_tokens(rows: Sequence[Sample], bound: int) -> tuple[int | None, int]:
    """The oldest Version of a trained token of these rows, and the number of masked tokens older than `bound`."""
    oldest, masked = None, 0
    for row in rows:
        for drawn, version, advantage in zip(row.mask, row.versions, row.advantages, strict=True):
            if drawn and advantage != 0:
                oldest = version if oldest is None else min(oldest, version)
            elif drawn and version < bound:
                masked += 1
    return oldest, masked
