"""When a group may start. Pure: no I/O, no clock."""


class AdmissionGate:
    """Keeps generation from running further ahead of training than eta versions, counted in groups.

    Invariant: `accepted + running <= (version + eta + 1) * groups_per_version`, where `accepted` counts the groups
    that finished and were not dropped (consumed ones and waiting ones), and `groups_per_version` is how many groups
    training consumes under one Version: `groups_per_step * push_every`. Source: AReaL (arXiv 2505.24298, section
    5.1), floor((N_r - 1) / B) <= i + eta. Failed and dropped groups give their budget back.

    eta = 0 is exactly synchronous. Training publishes Version v only after it consumed v * groups_per_version groups.
    Until then the invariant held with version v - 1, that is accepted + running <= v * groups_per_version; of these,
    v * groups_per_version are consumed, so nothing waits and nothing runs when v is published. Hence every group
    consumed under v was admitted under v, and as `publish` is called when every engine serves v, no token of it is
    older than v.

    It never deadlocks. Let training be `s` steps in, so that version = floor(s / push_every), with nothing running
    and fewer than groups_per_step groups waiting. Then accepted < (s + 1) * groups_per_step <= (version + 1) *
    groups_per_version, so the capacity is at least 1.

    Admission is not a bound for eta > 0: a slow group is overtaken by later ones and ages. The bound is the check at
    consumption, in `Buffer.take`.

    Groups of peers may take places of own ones (`fill`), as soon as training knows how many: it then consumes as many
    fewer of its own. All above holds with these counted as accepted and consumed.
    """

    def __init__(self, *, max_staleness: int, groups_per_step: int, push_every: int, max_running: int) -> None:
        if max_staleness < 0 or min(groups_per_step, push_every, max_running) < 1:
            raise ValueError(
                f"expected eta >= 0 and groups_per_step, push_every, max_running >= 1, "
                f"got {max_staleness}, {groups_per_step}, {push_every}, {max_running}"
            )
        self.max_staleness = max_staleness
        self.groups_per_version = groups_per_step * push_every
        self.max_running = max_running
        self.version = 0
        self.accepted = 0
        self.running = 0
        self.filled = 0

    @property
    def capacity(self) -> int:
        """How many groups may start now; 0 while more run than may by now."""
        return max(min(self.max_running - self.running, self.budget - (self.accepted + self.running)), 0)

    @property
    def budget(self) -> int:
        """Groups that may have been accepted or be running in all; it grows with the Version."""
        return (self.version + self.max_staleness + 1) * self.groups_per_version - self.filled

    def admit(self) -> int:
        """Starts one group; gives the Version it is admitted under."""
        assert self.capacity > 0, "a group was started without capacity"
        self.running += 1
        return self.version

    def accept(self) -> None:
        """A running group finished and waits to be consumed."""
        assert self.running > 0, "a group finished that was not running"
        self.running -= 1
        self.accepted += 1

    def fail(self) -> None:
        """A running group ended with nothing to train on."""
        assert self.running > 0, "a group failed that was not running"
        self.running -= 1

    def drop(self) -> None:
        """A group that had finished will not be consumed."""
        assert self.accepted > 0, "a group was dropped that had not been accepted"
        self.accepted -= 1

    def fill(self, groups: int) -> None:
        """A step will consume so many fewer of the groups that pass here."""
        assert 0 <= groups < self.groups_per_version, f"{groups} places were filled of {self.groups_per_version}"
        self.filled += groups

    def publish(self, version: int) -> None:
        """Every engine serves `version` now."""
        assert version >= self.version, f"version {version} was published after {self.version}"
        self.version = version

    def recover(self, *, version: int, accepted: int, filled: int = 0) -> None:
        """Starts counting where a run left off: nothing runs, `accepted` groups are consumed or waiting."""
        self.version, self.accepted, self.running, self.filled = version, accepted, 0, filled
