"""Any order of events: groups start, finish, fail, are trained, Versions come late, the process dies and resumes."""

import asyncio
import os
import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from buffer_values import group
from shoal.experience.audit import audit
from shoal.experience.buffer import Buffer
from shoal.experience.counts import task_counts
from shoal.experience.log import open_log, read
from shoal.experience.schema import RunMeta
from shoal.experience.turns import GroupTurns
from shoal.types import Completion, FinishReason, Group, Sampling, Task

WHICH = st.integers(0, 1000)
PROMPT = (5, 6)
ASKED, AGAIN = Sampling(4, seed=1), Sampling(4, seed=2)


MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
"""A file system in memory, where a thousand logs are opened in a third of the time."""


def service_of(group_id):
    return "ab"[(int(group_id[1:]) + 1) % 2]


def in_turns(connection):
    return connection.execute("SELECT DISTINCT group_id FROM turns").fetchall()


class BufferMachine(RuleBasedStateMachine):
    """The run beside the buffer: what runs, what was trained, which Version the trainer and the engines have."""

    @initialize(
        max_staleness=st.integers(0, 2),
        late=st.sampled_from(["drop", "drop", "mask_tokens", "train"]),
        per_step=st.integers(1, 3),
        push_every=st.integers(1, 2),
    )
    def begin(self, max_staleness, late, per_step, push_every):
        self.run_dir = Path(tempfile.mkdtemp(dir=MEMORY))
        self.meta = RunMeta(max_staleness, late, per_step, push_every)
        self.loop = asyncio.new_event_loop()
        self.started = 0
        self.running: dict[str, int] = {}
        self.turns: dict[str, list[Completion]] = {}
        self.logs: dict[str, GroupTurns] = {}
        self.added: set[str] = set()
        self.used: list[str] = []
        self.kept: list[Group] = []
        self.step = 0
        self.served = 0
        self.open(resume=False)

    def open(self, *, resume):
        log = open_log(self.run_dir, self.meta, resume=resume)
        log.connection.execute("PRAGMA synchronous=OFF")
        self.buffer = Buffer(log, self.meta, max_running=5, threaded=False)

    def do(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 5))

    @property
    def version(self):
        """Of the trainer's weights."""
        return self.step // self.meta.push_every

    @precondition(lambda self: self.buffer.gate.capacity > 0)
    @rule()
    def start(self):
        group_id = f"g{self.started}"
        self.started += 1
        self.running[group_id] = self.do(self.buffer.admit(group_id, "ab"[self.started % 2]))

    @precondition(lambda self: self.running)
    @rule(which=WHICH, first=WHICH, failed=st.sampled_from([0, 0, 0, 1, 2]))
    def finish(self, which, first, failed):
        group_id, admitted = self.pick(which)
        drawn = (admitted + first % (self.served - admitted + 1), self.served)
        one = group(group_id, drawn, admitted=admitted, size=3, failed=failed, service=service_of(group_id))
        assert self.do(self.buffer.add(one)) == (failed < 2)
        if failed < 2:
            self.added.add(group_id)

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def fail(self, which):
        self.do(self.buffer.fail(self.pick(which)[0], "service down"))

    @precondition(lambda self: self.running)
    @rule(which=WHICH, token=st.integers(0, 9))
    def turn(self, which, token):
        group_id = sorted(self.running)[which % len(self.running)]
        one = Completion((token,), (-0.5,), (self.served,), FinishReason.STOP)
        self.of(group_id, lambda turns: turns.keep(PROMPT, ASKED, one))
        self.turns.setdefault(group_id, []).append(one)

    @precondition(lambda self: self.logs.keys() - self.running.keys())
    @rule(which=WHICH)
    def turn_after_the_end_of_its_group(self, which):
        ended = sorted(self.logs.keys() - self.running.keys())
        one = Completion((1,), (-0.5,), (self.served,), FinishReason.STOP)
        self.of(ended[which % len(ended)], lambda turns: turns.keep(PROMPT, ASKED, one))

    @precondition(lambda self: self.running)
    @rule(which=WHICH)
    def begin_again(self, which):
        group_id = sorted(self.running)[which % len(self.running)]
        self.of(group_id, lambda turns: turns.forget())
        if group_id in self.turns:
            self.turns[group_id] = []

    @precondition(lambda self: self.buffer.waiting >= self.meta.groups_per_step - len(self.kept))
    @rule(give_up=st.booleans())
    def train(self, give_up):
        """A step; or its beginning, when a group teaches nothing and another one shall take its place."""
        missing = self.meta.groups_per_step - len(self.kept)
        taker = self.loop.create_task(self.buffer.take(missing, self.version))
        self.loop.run_until_complete(asyncio.sleep(0))
        if not taker.done():  # late groups were dropped, so too few are left
            taker.cancel()
            self.loop.run_until_complete(asyncio.wait([taker]))
            return
        groups = taker.result()
        if give_up:
            self.do(self.buffer.drop([groups[0].id], "uninformative"))
            self.added.discard(groups[0].id)
            self.kept += groups[1:]
            return
        groups = [*self.kept, *groups]
        self.kept.clear()
        ids = [one.id for one in groups]
        for one in groups:
            if self.meta.late == "drop":
                assert self.version - one.oldest_version <= self.meta.max_staleness
            if self.meta.max_staleness == 0 and self.meta.late == "drop":
                assert one.admitted_version == one.oldest_version == self.version
        after = (self.step + 1) // self.meta.push_every
        self.do(self.buffer.consumed(self.step, self.version, ids, version_after=after))
        self.used += ids
        self.step += 1

    @precondition(lambda self: self.served < self.version)
    @rule()
    def serve(self):
        self.served = self.version
        self.buffer.on_loaded(self.version)

    @rule()
    def crash_and_resume(self):
        self.do(self.buffer.close())
        self.open(resume=True)
        recovered = self.buffer.recovered
        assert recovered.version == self.version
        assert recovered.last_step == (self.step - 1 if self.step else None)
        begun = {name: at for name, at in self.running.items() if name in self.turns}
        assert {one.group_id: one.admitted_version for one in recovered.begun} == begun
        assert recovered.interrupted == len(self.running) - len(begun)
        self.logs.clear()
        for name in begun:
            turns = self.do(self.turns_of(name))
            assert turns.of(0).take(PROMPT, ASKED) is turns.of(1).take((5,), ASKED) is None
            assert [turns.of(1).take(PROMPT, AGAIN) for _ in self.turns[name]] == self.turns[name]
            assert turns.of(1).take(PROMPT, ASKED) is None
        self.running = begun
        self.kept.clear()  # taken and never consumed: they are on offer again
        self.served = self.version

    @invariant()
    def used_once_and_never_too_far_ahead(self):
        assert len(set(self.used)) == len(self.used)
        assert set(self.used) <= self.added
        gate = self.buffer.gate
        assert gate.accepted + gate.running <= (gate.version + self.meta.max_staleness + 1) * gate.groups_per_version
        assert gate.running == len(self.running)
        if not self.running and self.served == self.version and gate.accepted == len(self.used) + self.buffer.waiting:
            assert self.buffer.waiting >= self.meta.groups_per_step or gate.capacity > 0

    async def turns_of(self, group_id):
        if group_id not in self.logs:
            self.logs[group_id] = await self.buffer.turns(group_id, Task(f"{group_id}/0", service_of(group_id), ()))
        return self.logs[group_id]

    def of(self, group_id, use):
        async def main():
            use((await self.turns_of(group_id)).of(1))

        self.do(main())

    def pick(self, which):
        group_id = sorted(self.running)[which % len(self.running)]
        self.turns.pop(group_id, None)
        return group_id, self.running.pop(group_id)

    def teardown(self):
        try:
            self.do(self.buffer.close())
            assert task_counts(self.run_dir) == self.buffer.counts
            report = audit(self.run_dir)
            assert report.ok, report.sentences()
            assert report.consumed == len(self.used)
            assert report.in_flight == len(self.running)
            assert {name for (name,) in read(self.run_dir, in_turns)} == self.turns.keys()
        finally:
            self.loop.close()
            shutil.rmtree(self.run_dir)


BufferMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_no_order_of_events_trains_twice_loses_or_trains_too_old = BufferMachine.TestCase
