"""Each promise about the log is broken by a buffer, a gate or a loop that is wrong, and `shoal audit` finds it.

Nothing here writes SQL of its own: what is wrong goes through the code that writes every log.
"""

import asyncio
from dataclasses import replace

import pytest

from buffer_values import META, group, masked_rows, run_group, train
from shoal.experience import checkpoint, log
from shoal.experience.audit import Check, audit
from shoal.experience.balance import Balance, BatchChoice
from shoal.experience.buffer import Buffer
from shoal.experience.log import open_log
from shoal.experience.schema import ConsumedGroup, RunMeta, StepRecord
from shoal.staleness import Staleness
from shoal.types import Completion, FinishReason, Group, Reward, RewardStatus, RolloutStatus, Turn

MASKED = RunMeta(max_staleness=1, late="mask_tokens", groups_per_step=1, push_every=1)


def unchecked(token_ids, logprobs, versions):
    """A completion whose construction checked nothing."""
    completion = object.__new__(Completion)
    for name, value in zip(
        ("token_ids", "logprobs", "versions", "finish_reason"),
        (token_ids, logprobs, versions, FinishReason.STOP),
        strict=True,
    ):
        object.__setattr__(completion, name, value)
    return completion


async def logged(run_dir, first, kind=Buffer, meta=META):
    """A run of one group, whose first rollout is what `first` makes of a right one."""
    buffer = kind.open(run_dir, meta, max_running=64)
    admitted = await buffer.admit("a", "chain_sum")
    right = group("a", admitted=admitted)
    await buffer.add(replace(right, rollouts=(first(right.rollouts[0]), *right.rollouts[1:])))
    await buffer.close()


def with_completion(*streams):
    return lambda rollout: replace(rollout, turns=(Turn((1, 2, 3), unchecked(*streams)),))


async def two_turns_of_two_engines(run_dir):
    turns = (
        Turn((1, 2), Completion((3, 4), (-0.5, -0.5), (5, 5), FinishReason.STOP)),
        Turn((6,), Completion((7,), (-0.5,), (0,), FinishReason.STOP), parent=0),
    )
    await logged(run_dir, lambda rollout: replace(rollout, turns=turns))


async def a_turn_that_goes_on_from_itself(run_dir):
    def knotted(rollout):
        object.__setattr__(rollout.turns[0], "parent", 0)
        return rollout

    await logged(run_dir, knotted)


class Twice(Buffer):
    """Forgets what it gave away, and its log has lost the key that would refuse a second use."""

    def __init__(self, opened, meta, **options):
        opened.connection.executescript(
            "DROP TABLE consumed; CREATE TABLE consumed(finished_seq, step, position, horizon, trained_from, "
            "masked_tokens)"
        )
        super().__init__(opened, meta, **options)

    async def consumed(self, step, version, group_ids, **options):
        taken = dict(self._taken)
        await super().consumed(step, version, group_ids, **options)
        self._taken = taken


async def a_group_used_by_two_steps(run_dir):
    buffer = Twice.open(run_dir, META, max_running=64)
    await run_group(buffer, "a")
    await buffer.take(1, 0)
    await buffer.consumed(0, 0, ["a"], version_after=1)
    buffer._taken = {name: replace(taken, version=1) for name, taken in buffer._taken.items()}
    await buffer.consumed(1, 1, ["a"], version_after=2)
    await buffer.close()


async def a_group_used_and_then_dropped(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    await run_group(buffer, "a")
    taken = await buffer.take(1, 0)
    await buffer.consumed(0, 0, ["a"], version_after=1)
    buffer._record_dropped(taken, "stale")
    await buffer.close()


class NewestFirst(Balance):
    def next(self, waiting, n, used, now_s):
        return BatchChoice(tuple(reversed(waiting[-n:])))


async def the_newest_group_first(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    buffer._balance = NewestFirst()
    for group_id in ("a", "b", "c"):
        await run_group(buffer, group_id)
    await train(buffer, 0, 0)
    await buffer.close()


class Lingering(Buffer):
    """Does not look at how old groups are."""

    def _drop_late(self, version):
        pass


async def a_group_older_than_the_bound(run_dir):
    buffer = Lingering.open(run_dir, META, max_running=64)
    for step in range(3):
        if step == 0:
            await run_group(buffer, "old")
            kept = buffer._waiting.pop()
        for name in "ab":
            await run_group(buffer, f"{step}{name}")
        if step == 2:
            buffer._waiting[0] = kept
        await train(buffer, step, step)
    await buffer.close()


async def tokens_of_weights_to_come(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    await run_group(buffer, "a", (0, 4))
    await train(buffer, 0, 0, n=1)
    await buffer.close()


async def late_tokens(run_dir, kind=Buffer, rows=None):
    """A run whose third step has a group with tokens of versions 0 and 2, under a bound of 1."""
    buffer = kind.open(run_dir, MASKED, max_running=64)
    for step in range(2):
        await run_group(buffer, f"g{step}")
        await train(buffer, step, step, n=1)
    await run_group(buffer, "late", (0, 2))
    (late,) = await buffer.take(1, 2)
    await buffer.consumed(2, 2, ["late"], version_after=3, rows=rows(late) if rows else None)
    await buffer.close()


async def late_tokens_that_a_loop_did_not_mask(run_dir):
    await late_tokens(run_dir, rows=lambda late: masked_rows([late], bound=-1))


async def late_tokens_of_which_one_was_masked_too_few(run_dir):
    def rows(late):
        masked, bare = masked_rows([late], bound=1), masked_rows([late], bound=-1)
        return {late.id: (masked[late.id][0], bare[late.id][1])}

    await late_tokens(run_dir, rows=rows)


class Believing(Buffer):
    """Writes down what should have been masked, as it once did."""

    masked_tokens = 0

    async def consumed(self, step, version, group_ids, *, version_after, rows=None, external=()):
        uses = []
        for group_id in group_ids:
            one = self._taken.pop(group_id)
            trained_from = max(one.waited.oldest_version, self.gate.staleness.oldest(version))
            uses.append(ConsumedGroup(one.waited.finished_seq, one.horizon, trained_from, self.masked_tokens))
        self._last_step = step
        await self._writer.commit(lambda c: log.insert_step(c, StepRecord(step, version, version_after), uses))


async def late_tokens_that_the_buffer_says_are_masked(run_dir):
    await late_tokens(run_dir, kind=Believing)


class Miscounting(Believing):
    """Counts what was masked, and takes the bound for the oldest trained token, of which there is none."""

    masked_tokens = 2


async def an_oldest_trained_token_that_no_rollout_has(run_dir):
    await late_tokens(run_dir, kind=Miscounting)


async def more_groups_than_the_bound_allows(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    buffer.gate.staleness = Staleness(9)
    for number in range(2 * META.groups_per_step + 1):
        await run_group(buffer, f"g{number}")
    await buffer.close()


class Generous(Buffer):
    """Offers whatever ran."""

    async def add(self, group):
        service, after = self._end_running(group.id), self._last_step
        await self._writer.commit(
            lambda c: log.insert_group(c, group, after), lambda seq: self._offer(group, service, seq)
        )
        return True


async def a_group_of_which_half_failed(run_dir):
    buffer = Generous.open(run_dir, META, max_running=64)
    await run_group(buffer, "a", size=4, failed=2)
    await train(buffer, 0, 0, n=1)
    await buffer.close()


async def a_group_that_ran_to_nothing(run_dir):
    buffer = Generous.open(run_dir, META, max_running=64)
    await buffer.admit("a", "chain_sum")
    await buffer.add(Group("a", group("a").task, (), 0))
    await buffer.close()


async def an_answer_that_nobody_scored(run_dir):
    unscored = Reward(0.0, RewardStatus.TIMED_OUT)
    await logged(run_dir, lambda rollout: replace(rollout, reward=unscored))


async def a_failure_without_a_reason(run_dir):
    await logged(run_dir, lambda rollout: replace(rollout, status=RolloutStatus.FAILED))


class Silent(Buffer):
    """Starts groups without writing it down."""

    async def admit(self, group_id, service):
        version = self.gate.admit()
        self._running[group_id] = service
        self.counts[service].started += 1
        return version


async def a_group_that_never_started(run_dir):
    await logged(run_dir, lambda rollout: rollout, Silent)


class Tidy(Buffer):
    """Removes what was trained, to save room."""

    async def consumed(self, step, version, group_ids, **options):
        await super().consumed(step, version, group_ids, **options)
        await self._writer.commit(lambda c: [c.execute(f"DELETE FROM {t}") for t in ("rollouts", "groups", "started")])


async def trained_groups_that_are_gone(run_dir):
    buffer = Tidy.open(run_dir, META, max_running=64)
    await run_group(buffer, "a")
    await train(buffer, 0, 0, n=1)
    await buffer.close()


async def steps(run_dir, *records, meta=META):
    """A run whose loop counts as it likes: (step, version, version after) each."""
    buffer = Buffer.open(run_dir, meta, max_running=64)
    for step, version, after in records:
        await run_group(buffer, f"g{step}", (0, 0))
        await buffer.take(1, version)
        await buffer.consumed(step, version, [f"g{step}"], version_after=after)
    await buffer.close()


async def a_step_that_is_left_out(run_dir):
    await steps(run_dir, (0, 0, 1), (2, 1, 2))


async def a_step_under_weights_of_another_one(run_dir):
    await steps(run_dir, (0, 0, 1), (1, 0, 1))


async def a_loop_that_never_pushes(run_dir):
    await steps(run_dir, (0, 0, 0))


async def a_step_with_too_many_groups(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    for number in range(3):
        await run_group(buffer, f"g{number}")
    await train(buffer, 0, 0, n=3)
    await buffer.close()


async def weights_that_were_published_before_their_step(run_dir):
    buffer = Buffer.open(run_dir, META, max_running=64)
    await run_group(buffer, "a")
    await buffer.take(1, 0)
    await buffer.record_version(1, "aa")
    await buffer.close()


async def a_checkpoint_that_knows_more_than_the_log(run_dir):
    await steps(run_dir, (0, 0, 1))
    (checkpoint.begin(run_dir, 4) / "model").write_text("weights")
    checkpoint.seal(run_dir, 4)


async def a_checkpoint_beside_a_log_without_steps(run_dir):
    await logged(run_dir, lambda rollout: rollout)
    (checkpoint.begin(run_dir, 0) / "model").write_text("weights")
    checkpoint.seal(run_dir, 0)


class Garbled(Buffer):
    """Cuts what it writes."""

    async def add(self, group):
        written = await super().add(group)
        await self._writer.commit(lambda c: c.execute("UPDATE rollouts SET body = substr(body, 1, 20)") and None)
        return written


async def bodies_that_are_cut(run_dir):
    await logged(run_dir, lambda rollout: rollout, Garbled)


SEEDED = {
    Check.USED_ONCE: [a_group_used_by_two_steps, a_group_used_and_then_dropped],
    Check.OLDEST_FIRST: [the_newest_group_first],
    Check.STALENESS: [
        a_group_older_than_the_bound,
        tokens_of_weights_to_come,
        late_tokens_that_a_loop_did_not_mask,
        late_tokens_of_which_one_was_masked_too_few,
        late_tokens_that_the_buffer_says_are_masked,
        an_oldest_trained_token_that_no_rollout_has,
    ],
    Check.STREAMS: [
        lambda run_dir: logged(run_dir, with_completion((1, 2), (-0.5,), (0, 0))),
        lambda run_dir: logged(run_dir, with_completion((1,), (-0.5,), (0, 0))),
        a_turn_that_goes_on_from_itself,
    ],
    Check.VERSIONS: [
        lambda run_dir: logged(run_dir, with_completion((1, 2), (-0.5, -0.5), (1, 0))),
        two_turns_of_two_engines,
    ],
    Check.LOGPROBS: [
        lambda run_dir: logged(run_dir, with_completion((1, 2), (-0.5, 0.5), (0, 0))),
        lambda run_dir: logged(run_dir, with_completion((1, 2), (-0.5, float("nan")), (0, 0))),
    ],
    Check.ACCOUNTING: [a_group_that_never_started, trained_groups_that_are_gone],
    Check.READABLE: [a_group_that_ran_to_nothing, bodies_that_are_cut],
    Check.ADMISSION: [more_groups_than_the_bound_allows],
    Check.USABLE: [a_group_of_which_half_failed],
    Check.FAILURES: [an_answer_that_nobody_scored, a_failure_without_a_reason],
    Check.STEPS: [
        a_step_that_is_left_out,
        a_step_under_weights_of_another_one,
        a_loop_that_never_pushes,
        a_step_with_too_many_groups,
    ],
    Check.PUBLISHED: [weights_that_were_published_before_their_step],
    Check.CHECKPOINTS: [a_checkpoint_that_knows_more_than_the_log, a_checkpoint_beside_a_log_without_steps],
}


@pytest.mark.parametrize(("check", "violate"), [(check, one) for check, ones in SEEDED.items() for one in ones])
def test_a_violation_written_by_broken_code_is_found(tmp_path, check, violate):
    asyncio.run(violate(tmp_path))
    report = audit(tmp_path)
    assert check in report.findings, report.sentences()
    assert not report.ok
    told = report.sentences()
    assert all(f"       {who}: {what}" in told and who and what for who, what in report.findings[check].offenders)


def test_every_promise_has_a_seeded_violation():
    assert set(SEEDED) == set(Check)


def test_late_tokens_that_were_masked_are_no_violation(tmp_path):
    asyncio.run(late_tokens(tmp_path, rows=lambda late: masked_rows([late], bound=1)))
    report = audit(tmp_path)
    assert report.ok, report.sentences()
    assert (report.staleness_max, report.staleness_steps) == (0, 0)  # what was trained is of version 2


def test_staleness_is_told_in_steps_too_when_a_version_is_several(tmp_path):
    meta = RunMeta(max_staleness=0, late="drop", groups_per_step=1, push_every=4)
    asyncio.run(steps(tmp_path, *((step, 0, step // 3) for step in range(4)), meta=meta))
    report = audit(tmp_path)
    assert report.ok, report.sentences()
    assert (report.staleness_max, report.staleness_steps) == (0, 3)


def test_an_own_group_is_own_whatever_its_id_says(tmp_path):
    async def main():
        buffer = Buffer(open_log(tmp_path, META, resume=False), META, max_running=64)
        buffer.gate.staleness = Staleness(9)  # a gate that lets too many start
        for number in range(9):
            await buffer.admit(f"external/{number}", "chain_sum")
        await buffer.close()

    asyncio.run(main())
    assert list(audit(tmp_path).findings) == [Check.ADMISSION]


def test_groups_of_peers_are_in_no_bound_of_admission(tmp_path):
    async def main():
        opened = open_log(tmp_path, META, resume=False)
        buffer = Buffer(opened, META, max_running=64)
        await run_group(buffer, "a")
        taken = await buffer.take(1, 0)
        foreign = [group(f"g{number}", peer="reef") for number in range(9)]
        await buffer.consumed(0, 0, [taken[0].id], version_after=1, external=foreign)
        await buffer.close()

    asyncio.run(main())
    report = audit(tmp_path)
    assert report.ok, report.sentences()
