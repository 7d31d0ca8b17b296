"""Dynamic sampling on a real buffer and log."""

import asyncio
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from buffer_values import group, open_buffer
from shoal.experience.audit import audit
from shoal.experience.buffer import Buffer
from shoal.experience.counts import task_counts
from shoal.experience.schema import RunMeta
from shoal.rollout.reward_hooks import shorter_is_better
from shoal.run.learning import UNINFORMATIVE
from shoal.run.policy import REDRAWS_PER_GROUP, informative_groups, outcome_returns
from shoal.trainer.advantage import is_informative
from shoal.types import Group, Reward


def graded(group_id: str, admitted: int, rewards: tuple[float, float]) -> Group:
    plain = group(group_id, (admitted, admitted), admitted=admitted)
    rollouts = (replace(r, reward=Reward(x)) for r, x in zip(plain.rollouts, rewards, strict=True))
    return replace(plain, rollouts=tuple(rollouts))


async def generate(buffer: Buffer, every: int) -> None:
    """Runs groups for ever, as many as are admitted; each `every`-th is informative (0: none)."""
    for n in count():
        admitted = await buffer.admit(f"g{n:03}", "chain_sum")
        useful = every and n % every == every - 1
        await buffer.add(graded(f"g{n:03}", admitted, (0.0, 1.0) if useful else (1.0, 1.0)))


def steps(run_dir: Path, every: int, max_staleness: int, n: int = 2, of: int = 3) -> list[list[str]]:
    """The groups that each of some steps trains on."""

    async def main() -> list[list[str]]:
        buffer = open_buffer(run_dir, RunMeta(max_staleness, "drop", n, 1))
        generator = asyncio.create_task(generate(buffer, every))
        result = []
        for step in range(of):
            groups = await asyncio.wait_for(informative_groups(buffer, n, step), 120)
            await buffer.consumed(step, step, [g.id for g in groups], version_after=step + 1)
            buffer.on_loaded(step + 1)
            result.append([g.id for g in groups])
        generator.cancel()
        await buffer.close()
        return result

    return asyncio.run(main())


@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_step_trains_on_informative_groups_only_and_every_promise_of_the_log_holds(
    tmp_path: Path, max_staleness: int
) -> None:
    assert steps(tmp_path, every=3, max_staleness=max_staleness) == [
        ["g002", "g005"],
        ["g008", "g011"],
        ["g014", "g017"],
    ]
    counts = task_counts(tmp_path)["chain_sum"]
    assert (counts.consumed, counts.dropped[UNINFORMATIVE]) == (6, 12)
    assert audit(tmp_path).ok


def test_where_nothing_is_informative_a_step_gives_up_a_bounded_number_of_groups(tmp_path: Path) -> None:
    trained = steps(tmp_path, every=0, max_staleness=1)
    assert [len(groups) for groups in trained] == [2, 2, 2]
    assert task_counts(tmp_path)["chain_sum"].dropped[UNINFORMATIVE] == 3 * 2 * REDRAWS_PER_GROUP
    assert audit(tmp_path).ok


def test_an_all_wrong_group_teaches_nothing_though_its_answers_differ_in_length(tmp_path: Path) -> None:
    """What is taken off for length is no outcome."""
    plain = graded("g", 0, (0.0, 0.0))
    longer = replace(plain.rollouts[1], turns=plain.rollouts[1].turns * 2)
    group_ = shorter_is_better(replace(plain, rollouts=(plain.rollouts[0], longer)), per_token=0.01)
    assert len({rollout.reward.value for rollout in group_.rollouts}) == 2
    assert not is_informative(group_, outcome_returns)
    assert is_informative(shorter_is_better(graded("g", 0, (0.0, 1.0)), per_token=0.01), outcome_returns)
