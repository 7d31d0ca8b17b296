"""Who works on what: the registry on any clock, and a process of a real service at a real hub."""

import asyncio
import json
import os
import random
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import service_tasks
from shoal.errors import ConfigError, TaskError
from shoal.tasks.openapi import document
from shoal.tasks.remote_protocol import (
    Capability,
    DrawJob,
    Hello,
    JobFailed,
    JobScores,
    JobTask,
    Lost,
    Registry,
    RolloutJob,
    ScoreJob,
    SessionAt,
    UnknownWorker,
    WorkRequest,
)
from shoal.tasks.remote_server import MOST_BODY_BYTES, ServiceLate, TaskServerThread
from shoal.tasks.remote_tasks import RemoteService
from shoal.tasks.remote_worker import RemoteWorker
from shoal.tasks.sdk import Definition, definition_at
from shoal.types import Message, Reward, Role, Split, Task

ASKED = Task("t", "sums", (Message(Role.USER, "1+1"),))
SESSION = SessionAt("http://127.0.0.1:1/v1", "http://127.0.0.1:1", "key")
BOTH = [Capability.DRAW, Capability.ROLLOUT]


def registry() -> Registry:
    return Registry(["sums", "other"], lease_s=6.0)


def joined(one: Registry, now_s: float = 0.0, most: int = 64, version: str = "1") -> str:
    return one.join(Hello("sums", version, BOTH, most), now_s)


def submitted(one: Registry, results: list[object], job=None):
    return one.submit("sums", job or RolloutJob(ASKED, SESSION), due_s=100.0, done=results.append)


def test_work_goes_to_a_member_up_to_its_limit_and_more_when_it_hands_in() -> None:
    one, results = registry(), []
    member = joined(one, most=2)
    for _ in range(3):
        submitted(one, results)
    jobs = one.work(member, [], 1.0).jobs
    assert len(jobs) == 2
    assert [job.deadline_s for job in jobs] == [99.0, 99.0]
    assert one.work(member, [], 1.0).jobs == []
    done = JobScores(jobs[0].lease, [])
    assert one.results(member, [done]) == [jobs[0].lease]
    assert results == [done]
    assert len(one.work(member, [], 2.0).jobs) == 1


def test_draws_and_scores_take_no_rollout_s_place() -> None:
    one = registry()
    member = joined(one, most=1)
    for job in (RolloutJob(ASKED, SESSION), RolloutJob(ASKED, SESSION), DrawJob(Split.TRAIN, 3), ScoreJob(ASKED, [])):
        submitted(one, [], job)
    assert [type(job) for job in one.work(member, [], 0.0).jobs] == [DrawJob, ScoreJob, RolloutJob]


def test_a_silent_member_s_work_is_lost_once_and_its_late_results_are_nobody_s() -> None:
    one, results = registry(), []
    member = joined(one)
    submitted(one, results)
    (job,) = one.work(member, [], 0.0).jobs
    one.expire(5.0)
    assert results == []
    one.expire(7.0)
    assert [type(result) for result in results] == [Lost]
    with pytest.raises(UnknownWorker):
        one.results(member, [JobScores(job.lease, [])])
    assert len(results) == 1


def test_a_member_whose_connection_broke_is_lost_sooner_unless_it_is_heard_of_again() -> None:
    one, results = registry(), []
    member = joined(one)
    submitted(one, results)
    (job,) = one.work(member, [], 0.0).jobs
    one.on_disconnect(member, 1.0)
    one.renew(member, WorkRequest(holding=[job.lease]), 2.0)
    one.expire(6.0)
    assert results == []
    one.on_disconnect(member, 6.0)
    one.expire(8.1)
    assert [type(result) for result in results] == [Lost]


def test_work_that_a_member_does_not_know_of_was_never_received_and_is_given_up() -> None:
    one, results = registry(), []
    member = joined(one)
    submitted(one, results)
    one.work(member, [], 0.0)
    one.renew(member, WorkRequest(holding=[]), 2.0)
    assert "did not arrive" in results[0].reason


def test_what_nobody_waits_for_is_cancelled_and_its_result_not_taken() -> None:
    one, results = registry(), []
    member = joined(one)
    ticket = submitted(one, results)
    (job,) = one.work(member, [], 0.0).jobs
    one.withdraw(ticket)
    assert one.work(member, [job.lease], 1.0).cancelled == [job.lease]
    assert one.results(member, [JobScores(job.lease, [])]) == []
    assert results == []


def test_a_service_has_one_version_at_a_time_and_a_name_that_is_wanted() -> None:
    one = registry()
    member = joined(one)
    with pytest.raises(TaskError, match="served in version '1'"):
        joined(one, version="2")
    one.leave(member)
    joined(one, version="2")
    with pytest.raises(TaskError, match="expected one of other, sums, got 'nobody'"):
        one.join(Hello("nobody", "1", BOTH), 0.0)
    with pytest.raises(TaskError, match="protocol: expected 1"):
        one.join(Hello("sums", "1", BOTH, protocol=9), 0.0)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60))
def test_whatever_dies_is_cancelled_or_comes_late_each_job_ends_once(seed, most, jobs) -> None:
    """Members join, take, hand in, lose answers and die at random; who waits asks again for what was lost."""
    dice, one, ended = random.Random(seed), registry(), []
    waiting, held, now_s = {}, {}, 0.0

    def submit(number: int) -> None:
        def done(result) -> None:
            del waiting[number]
            if isinstance(result, Lost):
                submit(number)
            else:
                ended.append(number)

        waiting[number] = one.submit("sums", RolloutJob(ASKED, SESSION), due_s=1e9, done=done)

    withdrawn = []
    for number in range(jobs):
        submit(number)
    for turn in range(4000):
        if not waiting:
            break
        now_s += dice.random()
        one.expire(now_s)
        calm = turn > 300
        if not held or (len(held) < 3 and dice.random() < 0.1):
            held[joined(one, now_s, most)] = set()
        member = dice.choice(list(held))
        event = dice.random()
        try:
            if event < 0.5:
                one.renew(member, WorkRequest(list(held[member])), now_s)
                work = one.work(member, list(held[member]), now_s)
                held[member] -= set(work.cancelled)
                if calm or dice.random() > 0.2:
                    held[member] |= {job.lease for job in work.jobs}
                assert len(held[member]) <= most
            elif event < 0.9 and held[member]:
                lease = dice.choice(list(held[member]))
                again = [JobScores(lease, [])] * dice.randint(1, 2)
                assert one.results(member, again) in ([], [lease])
                held[member].discard(lease)
            elif event < 0.95 and not calm:
                del held[member]  # killed: says nothing any more
            elif waiting and not calm:
                number = dice.choice(list(waiting))
                one.withdraw(waiting.pop(number))
                withdrawn.append(number)
        except UnknownWorker:
            held.pop(member, None)
    assert sorted([*ended, *withdrawn]) == list(range(jobs))


def test_the_protocol_is_described_by_an_openapi_document() -> None:
    described = json.loads(json.dumps(document()))
    assert set(described["paths"]) == {
        "/v1/members",
        "/v1/members/{member}",
        "/v1/members/{member}/work",
        "/v1/members/{member}/results",
    }
    assert {"Hello", "Work", "RolloutJob", "JobFailed"} <= set(described["components"]["schemas"])


def test_a_task_of_a_few_lines_draws_the_same_again_and_keeps_questions_held_out() -> None:
    served = definition_at("service_tasks:Fast")
    train = [served.draw(Split.TRAIN, index) for index in range(200)]
    assert train == [served.draw(Split.TRAIN, index) for index in range(200)]
    held_out = {served.draw(Split.EVAL, index).messages for index in range(200)}
    assert not held_out & {task.messages for task in train}
    assert service_tasks.words.draw(Split.TRAIN, 0).info == '{"scorer": "contains"}'
    for wrong in ("nothing", "nowhere:x", "json:dumps", "service_tasks:nothing"):
        with pytest.raises((ConfigError, TaskError), match="task: "):
            definition_at(wrong)


def serving(task: str, url: str, **environment: str) -> "subprocess.Popen[str]":
    here = Path(__file__).parents[1].joinpath("support")
    command = [sys.executable, "-m", "shoal.cli", "task", "serve", task, "--orchestrator", url]
    return subprocess.Popen(command, cwd=here, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_a_service_of_another_process_draws_and_scores_and_leaves_when_told_to() -> None:
    with (
        TaskServerThread(["fast"], token="secret") as server,
        serving("service_tasks:Fast", server.url, SHOAL_TASKS_TOKEN="secret") as other,
    ):
        service = RemoteService("fast", server)
        hello = service.present(30.0)
        assert (hello.version, hello.max_running) == ("1", 64)
        assert service.draw(Split.TRAIN, 7) == service_tasks.Fast.draw(Split.TRAIN, 7)
        asked = service.draw(Split.EVAL, 0)
        scored = server.call("fast", ScoreJob(asked, ["a", "bb"]), 10.0)
        assert isinstance(scored, JobScores)
        assert scored.rewards == [Reward(1.0), Reward(0.0)]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/v1/status")
        other.terminate()
        assert other.wait(10) == 0
        with pytest.raises(ServiceLate, match="nothing came of a draw"):
            server.call("fast", DrawJob(Split.TRAIN, 0), 0.3)


class Wordy:
    """Its first question is larger than a result may be."""

    def draw(self, split: Split, index: int) -> Task:
        return Task("", "", (Message(Role.USER, "x" * (5_000_000 if index == 0 else 5)),))


def test_a_result_that_is_too_large_fails_its_job_and_holds_up_no_other() -> None:
    async def main(server: TaskServerThread) -> None:
        serving = asyncio.create_task(RemoteWorker(Definition("wordy", Wordy()), server.url).run())
        jobs = [server.call_async("wordy", DrawJob(Split.TRAIN, index), 10.0) for index in range(2)]
        large, small = await asyncio.gather(*jobs)
        assert isinstance(large, JobFailed)
        assert "expected a result of at most 4000000 bytes" in large.reason
        assert isinstance(small, JobTask)
        serving.cancel()
        await asyncio.wait([serving])

    with TaskServerThread(["wordy"]) as server:
        asyncio.run(main(server))
        large = urllib.request.Request(f"{server.url}/v1/members", bytes(MOST_BODY_BYTES + 1))
        large.add_header("Content-Type", "application/json")
        with pytest.raises(urllib.error.HTTPError, match="413"):
            urllib.request.urlopen(large)


def test_nothing_listens_beyond_loopback_without_a_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        TaskServerThread(["fast"], host="0.0.0.0")
