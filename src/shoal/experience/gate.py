"""Decides when a group may start. Pure: no I/O, no clock."""

from shoal.staleness import Staleness


class AdmissionGate:
    """Keeps generation from running further ahead of training than `max_staleness` Versions, counted in groups.

    Invariant: `accepted + running <= (version + max_staleness + 1) * groups_per_version`. `accepted` counts finished
    groups that were not dropped, consumed or waiting. `groups_per_version` is the number of groups that training
    consumes under one Version: `groups_per_step * push_every`. Source: AReaL (arXiv 2505.24298, section 5.1),
    floor((N_r - 1) / B) <= i + eta, where eta is `max_staleness`. Failed and dropped groups give their budget back.

    `max_staleness` 0 is exactly synchronous. Training writes Version v only after it consumed v * groups_per_version
    groups. Until then the invariant held with version v - 1: accepted + running <= v * groups_per_version. Of these,
    v * groups_per_version are consumed, so nothing waits and nothing runs when v is loaded. Hence every group consumed
    under v was admitted under v. `on_loaded` is called when every engine serves v, so it has no token older than v.

    The gate never deadlocks. Let training be `s` steps in, so version = floor(s / push_every), with nothing running
    and fewer than groups_per_step groups waiting. Then accepted < (s + 1) * groups_per_step <= (version + 1) *
    groups_per_version, so the capacity is at least 1.

    Admission is no bound for `max_staleness` > 0: later groups overtake a slow group, which ages. The bound is the
    check at consumption, in `Buffer.take`.
    """

    def __init__(self, staleness: Staleness, *, groups_per_step: int, push_every: int, max_running: int) -> None:
        if min(groups_per_step, push_every, max_running) < 1:
            raise ValueError(
                f"expected groups_per_step, push_every, max_running >= 1, "
                f"got {groups_per_step}, {push_every}, {max_running}"
            )
        self.staleness = staleness
        self.groups_per_version = groups_per_step * push_every
        self.max_running = max_running
        self.version = 0
        self.accepted = 0
        self.running = 0

    @property
    def capacity(self) -> int:
        """Number of groups that may start now; 0 while more groups run than the bound allows."""
        return max(min(self.max_running - self.running, self.budget - (self.accepted + self.running)), 0)

    @property
    def budget(self) -> int:
        """Number of groups that may be accepted or running; it grows with the Version."""
        return self.staleness.versions_admitted(self.version) * self.groups_per_version

    def admit(self) -> int:
        """Starts one group and returns its Version of admission."""
        assert self.capacity > 0, "a group was started without capacity"
        self.running += 1
        return self.version

    def accept(self) -> None:
        """Notes that a running group finished and waits to be consumed."""
        assert self.running > 0, "a group finished that was not running"
        self.running -= 1
        self.accepted += 1

    def fail(self) -> None:
        """Notes that a running group ended without a result."""
        assert self.running > 0, "a group failed that was not running"
        self.running -= 1

    def drop(self) -> None:
        """Notes that a finished group will not be consumed."""
        assert self.accepted > 0, "a group was dropped that had not been accepted"
        self.accepted -= 1

    def on_loaded(self, version: int) -> None:
        """Notes that every engine serves `version`."""
        assert version >= self.version, f"version {version} was loaded after {self.version}"
        self.version = version

    def recover(self, *, version: int, accepted: int, running: int = 0) -> None:
        """Starts counting at a run's last end: `accepted` groups are consumed or waiting, `running` ones go on."""
        self.version, self.accepted, self.running = version, accepted, running
