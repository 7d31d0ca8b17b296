"""The staleness that training accepts. Pure.

Every age bound of Shoal is computed here: at a group's admission, at its consumption, in the mask of late tokens, and
in the audit.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Late: TypeAlias = Literal["drop", "mask_tokens", "train"]
"""Treatment of what is older than the bound: drop the group, mask its late tokens, or train it all the same."""


@dataclass(frozen=True, slots=True)
class Staleness:
    """Versions that a token may lag behind the trained weights, and the treatment of older ones.

    A token sampled under Version `s` is late in training under Version `v` when `s < oldest(v)`.
    Source of the bound: AReaL (arXiv 2505.24298, section 5.1), eta.
    """

    bound: int
    late: Late = "drop"

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise ValueError(f"max_staleness: expected a number >= 0, got {self.bound}")

    def oldest(self, version: int) -> int:
        """The oldest Version whose tokens are not late in training under `version`."""
        return version - self.bound

    def masked_below(self, version: int) -> int:
        """The Version below which training under `version` masks tokens; 0, so no token, unless late ones are masked.

        >>> Staleness(2, "mask_tokens").masked_below(7), Staleness(2, "drop").masked_below(7)
        (5, 0)
        """
        return max(0, self.oldest(version)) if self.late == "mask_tokens" else 0

    def refuses(self, oldest: int, newest: int, version: int) -> bool:
        """Whether a group is dropped that has tokens of Versions `oldest` to `newest`, all inclusive."""
        if self.late == "train":
            return False
        return (newest if self.late == "mask_tokens" else oldest) < self.oldest(version)

    def versions_admitted(self, version: int) -> int:
        """Versions whose groups may have been accepted or be running while engines serve `version`.

        Training under Version `version + bound` then takes no group that was admitted before `version`.
        """
        return version + self.bound + 1
