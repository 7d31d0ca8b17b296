"""When a group may start, under any order of events."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.experience.gate import AdmissionGate
from shoal.staleness import Staleness


class Run:
    """A run reduced to what the gate sees: groups run, wait, are consumed; versions are published."""

    def __init__(self, max_staleness, groups_per_step, push_every, max_running):
        self.gate = AdmissionGate(
            Staleness(max_staleness), groups_per_step=groups_per_step, push_every=push_every, max_running=max_running
        )
        self.per_step, self.push_every = groups_per_step, push_every
        self.running, self.waiting, self.consumed = [], [], []  # admitted versions
        self.steps = 0

    def play(self, choice):
        """One event; `choice` says which, among those that can happen."""
        events = []
        if self.gate.capacity > 0:
            events += [self.start, self.start]
        if self.running:
            events += [self.finish, self.finish, self.fail]
        if self.waiting:
            events.append(self.drop)
        if len(self.waiting) >= self.per_step:
            events.append(self.train)
        assert events, "deadlock: nothing can happen"
        event, which = events[choice % len(events)], choice // len(events)
        event(which)

    def start(self, _):
        self.running.append(self.gate.admit())

    def finish(self, which):
        self.waiting.append(self.running.pop(which % len(self.running)))
        self.gate.accept()

    def fail(self, which):
        self.running.pop(which % len(self.running))
        self.gate.fail()

    def drop(self, which):
        self.waiting.pop(which % len(self.waiting))
        self.gate.drop()

    def train(self, _):
        self.waiting.sort()
        version = self.steps // self.push_every
        self.consumed += [(admitted, version) for admitted in self.waiting[: self.per_step]]
        del self.waiting[: self.per_step]
        self.steps += 1
        self.gate.on_loaded(self.steps // self.push_every)


@given(
    max_staleness=st.integers(0, 4),
    per_step=st.integers(1, 4),
    push_every=st.integers(1, 3),
    max_running=st.integers(1, 12),
    choices=st.lists(st.integers(0, 10_000), max_size=150),
)
@settings(max_examples=150, deadline=None)
def test_no_order_of_events_breaks_the_bound_or_stops_the_run(
    max_staleness, per_step, push_every, max_running, choices
):
    run = Run(max_staleness, per_step, push_every, max_running)
    for choice in choices:
        run.play(choice)
        gate = run.gate
        assert 0 <= gate.capacity <= max_running
        assert gate.accepted + gate.running <= (gate.version + max_staleness + 1) * gate.groups_per_version
        if not run.running and len(run.waiting) < run.per_step:
            assert gate.capacity > 0
    if max_staleness == 0:
        assert all(admitted == version for admitted, version in run.consumed)


@given(choices=st.lists(st.integers(0, 10_000), min_size=60, max_size=200), push_every=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_with_eta_0_nothing_waits_or_runs_when_a_version_is_published(choices, push_every):
    run = Run(max_staleness=0, groups_per_step=2, push_every=push_every, max_running=8)
    version = 0
    for choice in choices:
        run.play(choice)
        if run.gate.version > version:
            version = run.gate.version
            assert not run.running
            assert not run.waiting


def test_a_slow_group_can_outlive_the_bound_so_admission_alone_is_no_bound():
    run = Run(max_staleness=1, groups_per_step=1, push_every=1, max_running=8)
    run.start(0)
    for _ in range(3):
        run.start(0)
        run.finish(1)
        run.train(0)
    run.finish(0)
    run.train(0)
    assert run.consumed[-1] == (0, 3)


def test_failed_and_dropped_groups_give_their_budget_back():
    gate = AdmissionGate(Staleness(0), groups_per_step=2, push_every=1, max_running=8)
    gate.admit(), gate.admit()
    assert gate.capacity == 0
    gate.fail()
    assert gate.capacity == 1
    gate.accept()
    assert gate.capacity == 1
    gate.drop()
    assert gate.capacity == 2


def test_a_push_every_third_step_gives_budget_for_three_steps():
    gate = AdmissionGate(Staleness(1), groups_per_step=4, push_every=3, max_running=100)
    assert gate.capacity == 2 * 12


def test_a_recovered_gate_counts_what_is_consumed_and_waiting():
    gate = AdmissionGate(Staleness(1), groups_per_step=4, push_every=1, max_running=100)
    gate.recover(version=5, accepted=22)
    assert gate.capacity == (5 + 1 + 1) * 4 - 22


def test_starting_without_capacity_is_a_bug():
    gate = AdmissionGate(Staleness(0), groups_per_step=1, push_every=1, max_running=1)
    gate.admit()
    with pytest.raises(AssertionError, match="without capacity"):
        gate.admit()


def test_a_gate_for_no_groups_is_refused():
    with pytest.raises(ValueError, match="groups_per_step"):
        AdmissionGate(Staleness(0), groups_per_step=0, push_every=1, max_running=1)
