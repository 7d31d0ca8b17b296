"""Who is asked next: by expected information, without starving anyone, and the same after a resume."""

import asyncio
import itertools
import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer_values import group as made_group
from buffer_values import open_buffer
from shoal.config import parse
from shoal.experience.buffer import Buffer
from shoal.experience.log import snapshot, usable_groups
from shoal.experience.schema import RunMeta
from shoal.interfaces import Environment, TurnsOf
from shoal.rollout.orchestrator import Orchestrator, Source
from shoal.rollout.question_pool import CANDIDATES, IN_TURN, MEMORY, QuestionPool, differing
from shoal.run.parts import question_pool
from shoal.tasks.jsonl import JsonlService
from shoal.tasks.sdk import environment
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Sampling, Task

MANY = RunMeta(max_staleness=1, late="drop", groups_per_step=64, push_every=1)


def tasks(count: int) -> list[Task]:
    return [Task(f"sums/{number}", "sums", ()) for number in range(count)]


def pool(count: int, seed: int = 0) -> QuestionPool:
    return QuestionPool(tasks(count), 8, seed)


def answered(task: Task, rewards: list[float], failed: int = 0) -> Group:
    """A group of the task with these rewards, of which the first `failed` count as failures."""
    made = made_group(f"g-{task.id}", service=task.service, size=len(rewards), failed=failed)
    rollouts = tuple(replace(one, reward=Reward(value)) for one, value in zip(made.rollouts, rewards, strict=True))
    return replace(made, task=task, rollouts=rollouts)


def test_the_expected_chance_of_differing_rewards_is_the_beta_binomials() -> None:
    def beta_binomial(right: Fraction, wrong: Fraction, n: int, k: int) -> Fraction:
        """Chance of k right ones of n, in exact arithmetic, by rising factorials."""

        def rising(start: Fraction, count: int) -> Fraction:
            product = Fraction(1)
            for i in range(count):
                product *= start + i
            return product

        return comb(n, k) * rising(right, k) * rising(wrong, n - k) / rising(right + wrong, n)

    for right, wrong, n in itertools.product((0.5, 1.5, 8.5), (0.5, 3.25), (1, 2, 8)):
        exact = sum(beta_binomial(Fraction(right), Fraction(wrong), n, k) for k in range(1, n))
        assert differing(right, wrong, n) == pytest.approx(float(exact), abs=1e-12)


def test_questions_whose_answers_differ_are_asked_more_than_easy_and_hard_ones() -> None:
    chosen, asked = pool(90), Counter[int]()
    for index in range(1800):
        task = chosen.draw(index)
        number = int(task.id.split("/")[1])
        asked[number % 3] += 1
        right = (0, 4, 8)[number % 3]
        chosen.answered(answered(task, [1.0] * right + [0.0] * (8 - right)))
        chosen.ended(task)
    assert asked[1] > 1800 * 0.75
    assert min(asked.values()) >= 1800 / IN_TURN / 3 - 1


@given(st.integers(1, 12), st.integers(0, 99), st.lists(st.integers(0, 8), max_size=40))
@settings(deadline=None)
def test_no_question_starves_or_runs_twice_while_another_is_free(count: int, seed: int, rights: list[int]) -> None:
    chosen, running, last = pool(count, seed), list[Task](), dict[str, int]()
    for index in range(3 * IN_TURN * count):
        task = chosen.draw(index)
        question = task.id.rpartition("/")[0]
        busy = {one.id.rpartition("/")[0] for one in running}
        assert question not in busy or len(busy) == count
        last[question] = index
        running.append(task)
        if len(running) > 3:
            over = running.pop(0)
            right = rights[index % len(rights)] if rights else 0
            chosen.answered(answered(over, [1.0] * right + [0.0] * (8 - right)))
            chosen.ended(over)
        if index >= IN_TURN * count:
            assert min(last.values()) > index - IN_TURN * count - IN_TURN * 3
    assert len(last) == count


def test_questions_are_counted_by_what_their_answers_tell() -> None:
    chosen = pool(4)
    for task, right in zip(tasks(3), (8, 4, 0), strict=True):
        chosen.answered(answered(replace(task, id=f"{task.id}/0"), [1.0] * right + [0.0] * (8 - right)))
    assert chosen.counts() == {"open": 1, "easy": 1, "hard": 1, "unknown": 1}


def test_old_answers_weigh_less_and_are_forgotten() -> None:
    chosen = pool(4)
    first, other = tasks(4)[0], tasks(4)[1]
    chosen.answered(answered(replace(first, id=f"{first.id}/0"), [1.0] * 8))
    assert chosen.posterior(0) == (8.5, 0.5)
    for _ in range(4):
        chosen.answered(answered(replace(other, id=f"{other.id}/1"), [0.0] * 8))
    assert chosen.posterior(0) == (4.5, 0.5)
    for _ in range(4 * MEMORY - 4):
        chosen.answered(answered(replace(other, id=f"{other.id}/1"), [0.0] * 8))
    assert chosen.posterior(0) == (0.5, 0.5)


async def test_a_resumed_pool_is_bit_for_bit_the_one_that_was_killed_with_groups_in_flight(tmp_path) -> None:
    buffer, chosen = open_buffer(tmp_path, MANY), pool(3)
    buffer.follow("sums", chosen)
    for index in range(3 * MEMORY + 5):
        task = chosen.draw(index)
        await buffer.admit(f"sums-{index}", "sums")
        finished = answered(task, [(index % 7) / 7, 1.0, 0.3, 0.0], failed=4 if index == 9 else index % 2)
        if index < 3 * MEMORY + 2:  # the last ones are in flight
            await buffer.add(replace(finished, id=f"sums-{index}"))
            chosen.ended(task)
            if index == 4:
                await buffer.drop([one.id for one in await buffer.take(2, 0)], "uninformative")
    await buffer.close()
    resumed, again = open_buffer(tmp_path, MANY, resume=True), pool(3)
    resumed.follow("sums", again)
    with snapshot(tmp_path) as connection:
        assert len(list(usable_groups(connection, "sums", 1000))) == 3 * MEMORY + 1  # all but the failed one
    assert [again.posterior(number) for number in range(3)] == [chosen.posterior(number) for number in range(3)]
    assert again.draw(99) == pool_without_running(chosen).draw(99)
    await resumed.close()


def pool_without_running(chosen: QuestionPool) -> QuestionPool:
    for number, running in list(chosen._running.items()):
        for _ in range(running):
            chosen.ended(replace(tasks(3)[number], id=f"{tasks(3)[number].id}/0"))
    return chosen


def test_a_source_with_a_pool_draws_from_it_and_gives_each_question_back_when_its_group_fails() -> None:
    async def failing(task: Task, *, turns: object):
        raise RuntimeError(task.id)

    chosen = pool(CANDIDATES)
    source = Source(None, failing, pool=chosen)  # type: ignore[arg-type]

    async def main() -> list[str]:
        drawn = [await source.draw(index) for index in range(CANDIDATES)]
        for task in drawn:
            with pytest.raises(RuntimeError):
                await source.rollouts(task)
        return [task.id.rpartition("/")[0] for task in drawn]

    assert sorted(asyncio.run(main())) == [task.id for task in tasks(CANDIDATES)]
    assert not any(chosen._running.values())


def test_answers_to_another_files_question_of_the_same_number_tell_nothing() -> None:
    chosen, task = pool(2), replace(tasks(2)[1], id="sums/1/0")
    for other in (replace(task, answer="5"), replace(task, messages=(Message(Role.USER, "?"),))):
        chosen.answered(answered(other, [1.0] * 8))
    assert chosen.counts()["unknown"] == 2
    chosen.answered(answered(task, [1.0] * 8))
    assert chosen.counts()["easy"] == 1


def test_a_resumed_pool_knows_the_groups_that_go_on_before_it_draws(tmp_path) -> None:
    async def main() -> list[str]:
        buffer, asked = open_buffer(tmp_path, MANY), list[str]()
        would = pool(CANDIDATES).draw(1)  # the question that the resumed pool would draw first
        before = replace(would, id=f"{would.id.rpartition('/')[0]}/0")
        await buffer.admit("sums-0", "sums")
        one = Completion((1,), (-0.5,), (0,), FinishReason.STOP)
        (await buffer.turns("sums-0", before)).of(0).keep((5,), Sampling(4), one)
        await buffer.close()
        resumed, both = open_buffer(tmp_path, MANY, resume=True), asyncio.Event()

        async def answer(task: Task, *, turns: TurnsOf | None):
            asked.append(task.id.rpartition("/")[0])
            if len(asked) == 2:
                both.set()
            await asyncio.Event().wait()

        environment = Environment()
        environment.name = "sums"
        source = Source(environment, answer, pool=pool(CANDIDATES))
        running = asyncio.create_task(Orchestrator([source], {"sums": 1.0}, resumed).run())
        await both.wait()
        running.cancel()
        await asyncio.wait([running])
        await resumed.close()
        return asked

    asked = asyncio.run(main())
    assert len(set(asked)) == len(asked)


def test_the_pool_of_a_run_is_on_for_a_files_questions_and_off_with_the_reason_where_they_are_fresh(tmp_path) -> None:
    rows = [{"prompt": f"What is 1 + {n}?", "answer": str(n + 1)} for n in range(20)]
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, rows)))
    file = {"name": "sums", "service": "jsonl", "path": str(tmp_path / "sums.jsonl")}
    config = parse({"tasks": [file], "train": {"dynamic_sampling": "pool"}})
    buffer, events = Buffer.in_memory(MANY, max_running=4), dict[str, str]()

    def on_event(name: str, **details: str) -> None:
        events[details["task"]] = f"{name}: {details['reason']}"

    service = JsonlService(config.tasks[0], 0)
    made = question_pool(service, config, buffer, on_event)
    assert made is buffer.followers["sums"]
    assert {made.draw(index).id.rpartition("/")[0] for index in range(200)} == {one.id for one in service.questions}
    assert question_pool(fresh, config, buffer, on_event) is None
    assert question_pool(service, parse({"tasks": [file]}), buffer, on_event) is None
    assert events["sums"] == f"question_pool: chooses among {len(service.questions)} questions"
    assert events["fresh"].startswith("question_pool: off: each question is fresh")


@environment("fresh")
def fresh(rng: random.Random) -> str:
    return f"What is 1 + {rng.randrange(9)}?"
