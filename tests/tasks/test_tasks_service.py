"""Who works on what: a service by itself, and processes of real services at a real run."""

import asyncio
import contextlib
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

import service_tasks
from shoal.config import Config, TaskConfig
from shoal.errors import ConfigError, TaskError, WorkerLost
from shoal.interfaces import Environment, Model
from shoal.net.client import authorization
from shoal.net.joining import JOIN, NUMBER
from shoal.net.listening import free_port, own_token, token_file
from shoal.net.run_server import LeasedWorker, NotWanted, RunServer
from shoal.rehearsal.clock import run_virtual
from shoal.tasks.library import Library, library_of, written
from shoal.tasks.remote_environment import NO_PROCESS, RemoteEnvironment, Service, ServiceLate, TaskServer
from shoal.tasks.remote_protocol import DrawJob, RolloutJob, ScoreJob, TaskRole
from shoal.tasks.remote_worker import HttpModel, RemoteWorker
from shoal.tasks.sdk import Definition, EnvironmentFailed, PolicyFailed, definition_at
from shoal.types import Message, Outcome, Reward, RewardStatus, Role, Split, Task
from until import until

ASKED = Task("t", "sums", (Message(Role.USER, "1+1"),))
ROLLOUT = RolloutJob(ASKED, "http://127.0.0.1:1/v1", "http://127.0.0.1:1", "key")

SERVER = RunServer()
numbers = itertools.count()


def joined(service: Service, most: int = 64, version: str = "1") -> LeasedWorker:
    worker = LeasedWorker(f"task-joined-{next(numbers)}", SERVER)
    service.join(TaskRole("sums", version, converses=True, max_running=most), worker)
    return worker


def left(service: Service, worker: LeasedWorker) -> None:
    worker.lose()
    service.leave(worker.name)


def submitted(service: Service, plays: bool = True) -> "asyncio.Task[bytes]":
    async def asked() -> bytes:
        async with service.worker(plays=plays) as worker:
            return await worker.called(b"job", 1e9)

    return asyncio.create_task(asked())


async def sent(worker: LeasedWorker) -> list[bytes]:
    """What has come to the worker since it was asked last."""
    for _ in range(8):
        await asyncio.sleep(0)
    return [worker.outgoing.get_nowait() for _ in range(worker.outgoing.qsize())]


def number_of(message: bytes) -> bytes:
    return message[: NUMBER.size]


async def test_work_goes_to_a_worker_up_to_its_limit_and_more_when_it_hands_in() -> None:
    service = Service()
    waiting = [submitted(service) for _ in range(3)]
    worker = joined(service, most=2)
    first, _ = await sent(worker)
    worker.take(number_of(first) + b"done")
    assert len(await sent(worker)) == 1
    assert [one.result() for one in waiting if one.done()] == [b"done"]


async def test_work_goes_to_the_worker_with_less_of_it() -> None:
    service = Service()
    workers = [joined(service), joined(service)]
    waiting = [submitted(service, plays) for plays in (True,) * 4 + (False,) * 2]
    assert [len(await sent(worker)) for worker in workers] == [3, 3]
    assert not any(one.done() for one in waiting)


async def test_draws_and_scores_take_no_rollout_s_place() -> None:
    service = Service()
    waiting = [submitted(service, plays) for plays in (True, True, False, False)]
    assert len(await sent(joined(service, most=1))) == 3
    assert not any(one.done() for one in waiting)


async def test_a_lost_worker_s_jobs_are_lost_once_and_its_late_results_are_dropped() -> None:
    service = Service()
    worker, waiting = joined(service), submitted(service)
    (job,) = await sent(worker)
    left(service, worker)
    with pytest.raises(WorkerLost, match="has left"):
        await waiting
    worker.take(number_of(job) + b"late")


async def test_a_job_without_a_waiting_caller_is_cancelled_and_its_result_dropped() -> None:
    service = Service()
    waiting = submitted(service)
    await asyncio.sleep(0)
    waiting.cancel()
    worker = joined(service)
    assert await sent(worker) == []
    taken = submitted(service)
    (job,) = await sent(worker)
    taken.cancel()
    assert await sent(worker) == [number_of(job)]
    worker.take(number_of(job) + b"late")
    assert (waiting.cancelled(), taken.cancelled(), worker.running) == (True, True, 0)


def test_a_service_has_one_version_at_a_time() -> None:
    service = Service()
    first = joined(service)
    with pytest.raises(NotWanted, match="served in version '1'"):
        joined(service, version="2")
    left(service, first)
    joined(service, version="2")


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(1, 60))
def test_each_job_ends_once_while_workers_die_and_callers_leave(seed, most, jobs) -> None:
    """Workers join, hand in, repeat and die at random; callers ask again for lost jobs."""
    dice, ended = random.Random(seed), []

    async def ask(service: Service, number: int) -> None:
        while True:
            with contextlib.suppress(WorkerLost):
                await submitted(service)
                break
        ended.append(number)

    async def main() -> list[int]:
        service, workers = Service(), []
        waiting = {number: asyncio.create_task(ask(service, number)) for number in range(jobs)}
        for turn in range(4000):
            if all(one.done() for one in waiting.values()):
                break
            calm = turn > 300
            if not workers or (len(workers) < 3 and dice.random() < 0.1):
                workers.append(([], joined(service, most)))
            jobs_sent, worker = dice.choice(workers)
            jobs_sent += await sent(worker)
            event = dice.random()
            assert worker.running <= most
            if event < 0.8 and jobs_sent:
                for _ in range(dice.randint(1, 2)):
                    worker.take(number_of(dice.choice(jobs_sent)) + b"done")
            elif event < 0.9 and not calm:
                workers.remove((jobs_sent, worker))
                left(service, worker)
            elif not calm:
                dice.choice(list(waiting.values())).cancel()
        return [number for number, one in waiting.items() if one.cancelled()]

    withdrawn = asyncio.run(main())
    assert sorted([*ended, *withdrawn]) == list(range(jobs))


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


def lettered(**settings: object) -> Definition:
    return written(TaskConfig(name="l", service="python", path="service_tasks:Letters", **settings), 0)


def test_an_author_s_class_takes_params_as_its_fields_and_the_task_s_prompt_and_rewriting() -> None:
    asked = lettered(params={"count": 9}, system_prompt="Spell.", rewrite=[("a", "_")]).draw(Split.TRAIN, 0)
    assert [(one.role, len(one.content)) for one in asked.messages] == [(Role.SYSTEM, 6), (Role.USER, 9)]
    few = lettered(params={"count": 9}, rewrite=[("[a-d]", "_"), ("[e-h]{8}", "")])
    halves = [{few.draw(split, i).messages for i in range(40)} for split in Split]
    assert not set.intersection(*halves), "the text that is asked decides"
    assert {letter for half in halves for (one,) in half for letter in one.content} <= set("_efgh")
    for params, why in (({"counts": 9}, "no field counts"), ({"count": "x"}, "count"), (3, "expected a table")):
        with pytest.raises(TaskError, match=why):
            lettered(params=params)


class Keyed:
    """Its answer is the key with which it reached the model."""

    def draw(self, rng: random.Random) -> str:
        return "a"

    async def rollout(self, task: Task, model: Model) -> str:
        return model.api_key


async def test_a_rollout_that_shortens_what_it_says_reaches_its_session_too() -> None:
    async with aiohttp.ClientSession() as http:
        model = HttpModel("http://unasked", "http://unasked", "key", http)
        outcome = await replace(Definition("keyed", Keyed()), rewrite=[("a", "_")]).rollout(ASKED, model)
    assert outcome.answer == "key"


def test_the_run_s_seed_moves_the_training_questions_and_no_held_out_one() -> None:
    one, other = (replace(lettered(params={"count": 9}), seed=seed) for seed in (1, 2))
    assert one.draw(Split.EVAL, 3) == other.draw(Split.EVAL, 3)
    assert one.draw(Split.TRAIN, 3) != other.draw(Split.TRAIN, 3)


def serving(task: str, url: str, **environment: str) -> "subprocess.Popen[str]":
    here = Path(__file__).parents[1].joinpath("support")
    command = [sys.executable, "-m", "shoal.cli", "task", "serve", task, "--orchestrator", url]
    return subprocess.Popen(command, cwd=here, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)


def test_a_service_of_another_process_draws_and_scores_and_leaves_when_told_to() -> None:
    with (
        TaskServer(["fast"], token="secret") as server,
        serving("service_tasks:Fast", f"{server.url}/", SHOAL_RUN_TOKEN="secret") as other,
    ):
        service = RemoteEnvironment("fast", server)
        service.await_worker(120.0)
        assert (service.converses, service.scores, service.max_running) == (True, True, 64)
        assert service.draw(Split.TRAIN, 7) == service_tasks.Fast.draw(Split.TRAIN, 7)
        asked = service.draw(Split.EVAL, 0)
        assert asyncio.run(service.score(asked, ["a", "b" * 5_000_000])) == [Reward(1.0), Reward(0.0)]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server.url}/v1/status")
        told = urllib.request.Request(f"{server.url}/v1/status", headers={"Authorization": "Bearer secret"})
        with urllib.request.urlopen(told) as answer:
            status = json.load(answer)["fast"]
        assert (status["members"], status["max_running"], status["running"]) == (1, 64, 0)
        assert status["jobs"] == {"draw done": 2, "score done": 1}
        other.terminate()
        assert other.wait(60) == 0
        with pytest.raises(ServiceLate, match="nothing came of a draw"):
            server.wait(server.call("fast", DrawJob(Split.TRAIN, 0), Task, 0.3))


def test_the_library_of_a_configuration_waits_for_workers_at_its_address() -> None:
    async def main(port: int) -> None:
        serving = asyncio.create_task(RemoteWorker(service_tasks.Fast, f"http://127.0.0.1:{port}").run())
        tables = [
            {"name": "fast", "service": "remote", "path": f"127.0.0.1:{port}"},
            {"name": "hanoi", "service": "turns"},
        ]
        config = Config.model_validate({"tasks": tables, "seed": 3})
        library = await asyncio.to_thread(library_of, config)
        fast, hanoi = await asyncio.gather(*(one.drawn(Split.TRAIN, 1) for one in library.services))
        assert fast == service_tasks.Fast.draw(Split.TRAIN, 1)
        assert hanoi == written(config.tasks[1], 3).draw(Split.TRAIN, 1)
        await asyncio.to_thread(library.__exit__)
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(main(free_port()))


def test_a_worker_says_once_that_it_waits_for_a_run_and_then_that_it_joined_it() -> None:
    async def main(port: int) -> None:
        heard: list[str] = []
        worker = RemoteWorker(service_tasks.Fast, f"http://127.0.0.1:{port}")
        serving = asyncio.create_task(worker.run(heard.append))
        await until(lambda: bool(heard))
        config = Config.model_validate({"tasks": [{"name": "fast", "service": "remote", "path": f"127.0.0.1:{port}"}]})
        library = await asyncio.to_thread(library_of, config)
        await until(lambda: len(heard) > 1)  # its greeting may come after the library has it
        waits, joined = heard
        assert waits.startswith(f"waiting for a run at {worker.url}: Connect call failed")
        assert joined == f"joined {worker.url} as task-joined-1"
        await asyncio.to_thread(library.__exit__)
        serving.cancel()
        await asyncio.wait([serving])

    asyncio.run(main(free_port()))


def test_a_process_that_is_stopped_loses_its_jobs() -> None:
    with TaskServer(["slow"]) as server, serving("service_tasks:Slow", server.url) as other:
        service = RemoteEnvironment("slow", server)
        service.await_worker(120.0)
        asked = service.draw(Split.TRAIN, 0)
        other.send_signal(signal.SIGSTOP)
        with pytest.raises(EnvironmentFailed, match="is gone") as lost:
            server.wait(server.call("slow", ScoreJob(asked, ["a"]), list[Reward], 60.0))
        assert lost.value.retry
        other.kill()


def test_a_service_without_a_process_for_long_is_not_served_and_what_waits_for_it_is_given_up() -> None:
    noted: list[tuple[str, bool]] = []

    async def main(server: TaskServer) -> None:
        left, loop = asyncio.Event(), asyncio.get_running_loop()

        def note(name: str, served: bool) -> None:
            noted.append((name, served))
            if len(noted) == 2:
                loop.call_soon_threadsafe(left.set)

        server.on_workers = note
        serving = asyncio.create_task(RemoteWorker(service_tasks.Fast, server.url).run())
        await server.done(server.services["fast"].served.wait())
        serving.cancel()
        await asyncio.wait([serving])
        await left.wait()
        with pytest.raises(EnvironmentFailed, match=NO_PROCESS):
            await server.done(server.call("fast", ROLLOUT, Outcome, 60.0))

    with TaskServer(["fast"], away_s=0.3) as server:
        asyncio.run(main(server))
    assert noted == [("fast", True), ("fast", True), ("fast", False)], "it came, it left, it was not there for long"


class Wordy(Environment):
    """Its first question is larger than a result may be."""

    def draw(self, split: Split, index: int) -> Task:
        return Task("", "", (Message(Role.USER, "x" * (5_000_000 if index == 0 else 5)),))


def test_a_result_that_is_too_large_fails_its_job_and_holds_up_no_other() -> None:
    async def main(server: TaskServer) -> None:
        serving = asyncio.create_task(RemoteWorker(Definition("wordy", Wordy()), server.url).run())
        jobs = [server.done(server.call("wordy", DrawJob(Split.TRAIN, i), Task, 10.0)) for i in range(2)]
        large, small = await asyncio.gather(*jobs, return_exceptions=True)
        assert isinstance(large, EnvironmentFailed)
        assert "expected a result of at most 4000000 bytes" in str(large)
        assert isinstance(small, Task)
        serving.cancel()
        await asyncio.wait([serving])

    with TaskServer(["wordy"]) as server:
        asyncio.run(main(server))


class Halves(Environment):
    """Half of a surrogate pair, which JSON cannot carry, in questions and failures."""

    def draw(self, split: Split, index: int) -> Task:
        if index == 1:
            raise PolicyFailed("x" * 5000 + " \ud800")
        if index == 2:
            raise EnvironmentFailed("\ud800")
        if index == 3:
            raise ValueError("\ud800")
        return Task("", "", (Message(Role.USER, "\ud800"),))


def test_a_result_or_a_failure_that_json_cannot_carry_is_answered_as_a_failure() -> None:
    async def main(server: TaskServer) -> None:
        serving = asyncio.create_task(RemoteWorker(Definition("halves", Halves()), server.url).run())
        draws = [server.done(server.call("halves", DrawJob(Split.TRAIN, i), Task, 60.0)) for i in range(4)]
        found = await asyncio.gather(*draws, return_exceptions=True)
        assert [type(one) for one in found] == [EnvironmentFailed, PolicyFailed, *[EnvironmentFailed] * 2]
        assert not any(getattr(one, "retry", False) for one in found), "no other process would do better"
        serving.cancel()
        await asyncio.wait([serving])

    with TaskServer(["halves"]) as server:
        asyncio.run(main(server))


async def test_a_service_has_as_many_free_places_as_its_workers_however_often_others_came() -> None:
    service = Service()
    joined(service, most=2)
    waiting = submitted(service)
    for _ in range(20):
        left(service, joined(service, most=4))
    assert service.free.qsize() <= 2
    waiting.cancel()
    await asyncio.wait({waiting})
    assert service.free.qsize() == 2


def test_a_process_that_scores_too_few_answers_scored_none() -> None:
    class Absent:
        def __init__(self) -> None:
            self.services = {"fast": Service()}

        async def call(self, name, job, kind, timeout_s):
            return [Reward(1.0)]

        done = staticmethod(asyncio.ensure_future)

    server: Any = Absent()
    why = "fast: expected 2 rewards, got 1"
    rewards = asyncio.run(RemoteEnvironment("fast", server).score(ASKED, ["2", "3"]))
    assert rewards == [Reward(0.0, RewardStatus.FAILED, evidence=why)] * 2


class Inside(TaskServer):
    """A server whose callers are on its loop."""

    done = staticmethod(asyncio.ensure_future)


def test_a_process_that_never_draws_or_scores_is_waited_for_half_a_minute_or_a_whole_one() -> None:
    async def main() -> None:
        server: Any = Inside(["fast"])
        joined(server.services["fast"])
        with pytest.raises(EnvironmentFailed, match="fast: nothing came of a draw within 30 s"):
            await RemoteEnvironment("fast", server).drawn(Split.TRAIN, 0)
        why = "fast: nothing came of a score within 60 s"
        rewards = await RemoteEnvironment("fast", server).score(ASKED, ["2"])
        assert rewards == [Reward(0.0, RewardStatus.TIMED_OUT, evidence=why)]

    run_virtual(main())


@pytest.mark.parametrize(
    "scorer",
    [
        {"name": "function", "path": "evil.py:reward"},
        {"name": "judge", "url": "https://evil/v1", "model": "m", "rubric": "r", "key_env": "HF_TOKEN"},
    ],
)
async def test_a_task_of_another_process_names_no_function_and_no_judge(scorer: dict[str, str]) -> None:
    class Rogue:
        def __init__(self) -> None:
            self.services = {"fast": Service()}
            self.services["fast"].served.set()

        async def call(self, name, job, kind, timeout_s):
            return replace(ASKED, info=json.dumps({"scorer": scorer}))

        done = staticmethod(asyncio.ensure_future)

    server: Any = Rogue()
    with pytest.raises(EnvironmentFailed, match="expected no function and no judge"):
        await RemoteEnvironment("fast", server).drawn(Split.TRAIN, 0)


HELLO = b'{"type":"task","name":"fast","version":"1"}'
HOSTILE = (
    *(b"", b"{", b"[" * 5000, b"\x00", HELLO.replace(b'"1"', b"1"), HELLO.replace(b"task", b"rank")),
    *(HELLO.replace(b"fast", b"slow"), HELLO.replace(b"}", b',"protocol":1}')),
)


@pytest.mark.parametrize("first", [*HOSTILE, HELLO])
@pytest.mark.parametrize("binary", [False, True])
def test_what_is_no_message_ends_its_connection_with_a_reason_and_no_other(first: bytes, binary: bool) -> None:
    async def main(server: TaskServer) -> None:
        own = authorization(server.token)
        async with aiohttp.ClientSession(headers=own) as http, http.ws_connect(server.url + JOIN) as socket:
            await (socket.send_bytes(first) if binary else socket.send_str(first.decode()))
            said = [json.loads(one.data) async for one in _answered(socket, first == HELLO)]
            assert said[-1]["type"] == "refused"
            assert said[-1]["reason"] not in ("", "None")
        async with aiohttp.ClientSession(headers=own) as http, http.ws_connect(server.url + JOIN) as socket:
            await socket.send_str(HELLO.decode())
            assert (await socket.receive_json())["type"] == "joined"

    async def _answered(socket, greeted: bool):
        async for one in socket:
            yield one
            if greeted:
                greeted = False
                await socket.send_bytes(b"short")

    with TaskServer(["fast"]) as server:
        asyncio.run(main(server))


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the connection that is given up
def test_a_worker_that_reads_nothing_does_not_hold_up_the_end_of_the_server() -> None:
    async def main(server: TaskServer) -> None:
        own = authorization(server.token)
        async with aiohttp.ClientSession(headers=own) as http, http.ws_connect(server.url + JOIN) as socket:
            await socket.send_str(HELLO.decode())
            jobs = [ScoreJob(ASKED, ["x" * 1_000_000])] * 20
            scoring = [asyncio.create_task(server.done(server.call("fast", job, list[Reward], 60.0))) for job in jobs]
            await until(lambda: server.status_of("fast")["running"] == len(jobs))
            await asyncio.to_thread(server.__exit__, None, None, None)
            assert {type(one) for one in await asyncio.gather(*scoring, return_exceptions=True)} == {EnvironmentFailed}

    asyncio.run(main(TaskServer(["fast"], lease_s=600.0).__enter__()))
    gc.collect()


def test_no_page_of_another_site_opens_a_worker_s_socket() -> None:
    async def main(server: TaskServer) -> list[int]:
        found = []
        async with aiohttp.ClientSession() as http:
            page = {"Origin": "http://127.0.0.1", **authorization(server.token)}
            for headers in (page, {"Host": "evil.example"}):
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(server.url + JOIN, headers=headers)
                found.append(refused.value.status)
        return found

    with TaskServer(["fast"]) as server:
        assert asyncio.run(main(server)) == [403, 421]


def test_a_worker_without_the_token_or_with_another_name_ends_with_a_sentence() -> None:
    with TaskServer(["fast"], token="secret") as server:
        with pytest.raises(ConfigError, match="wants its token"):
            asyncio.run(RemoteWorker(service_tasks.Fast, server.url).run())
        with pytest.raises(ConfigError, match="wants another token; set SHOAL_RUN_TOKEN to its own, or unset it"):
            asyncio.run(RemoteWorker(service_tasks.Fast, server.url, token="other").run())
        with pytest.raises(ConfigError, match="expected one of fast, got 'slow'"):
            asyncio.run(RemoteWorker(service_tasks.Slow, server.url, token="secret").run())


@pytest.mark.parametrize("path", [JOIN, "/v1/status", "/v1/roles"])
async def test_a_server_without_a_token_makes_one_that_only_its_user_can_read(path: str) -> None:
    server = TaskServer(["fast"])
    await asyncio.to_thread(server.__enter__)
    file = token_file(server.url)
    try:
        assert (file.read_text(), file.stat().st_mode & 0o777) == (server.token, 0o600)
        async with aiohttp.ClientSession() as other, other.get(server.url + path) as answer:
            assert answer.status == 401
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)
    assert not file.exists()


def test_a_server_whose_user_has_no_folder_for_its_token_says_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"Not a directory: .*; set SHOAL_RUN_TOKEN"):
        TaskServer(["fast"]).__enter__()


@pytest.mark.parametrize("url", ["http://[x", "http://a\0b:1", "nonsense", "http://127.0.0.1:1"])
def test_an_address_without_a_server_of_this_user_has_no_token(url: str) -> None:
    assert own_token(url) == ""


def test_a_worker_that_read_the_token_of_another_run_joins_with_the_new_one() -> None:
    async def main(server: TaskServer) -> list[str]:
        file, heard = token_file(server.url), list[str]()
        file.write_text("of a killed run")
        worker = RemoteWorker(service_tasks.Fast, server.url.replace("127.0.0.1", "localhost"))
        serving = asyncio.create_task(worker.run(heard.append))
        await asyncio.sleep(0)  # its first connection has begun
        file.write_text(server.token)
        await asyncio.wait({serving, asyncio.create_task(until(lambda: bool(heard)))}, return_when="FIRST_COMPLETED")
        serving.cancel()
        await asyncio.wait({serving})
        return heard

    with TaskServer(["fast"]) as server:
        assert asyncio.run(main(server)) == [f"joined {server.url} as task-joined-1"]


async def test_a_worker_without_a_token_ends_when_it_is_refused_twice() -> None:
    """The first time the run may be ending: its file is gone before its socket."""
    asked = 0

    async def refuse(_: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        return web.Response(status=401)

    app = web.Application()
    app.router.add_get(JOIN, refuse)
    async with TestServer(app) as server:
        with pytest.raises(ConfigError, match="wants its token"):
            await RemoteWorker(service_tasks.Fast, str(server.make_url("")).rstrip("/")).run()
    assert asked == 2


def test_nothing_listens_beyond_loopback_without_a_token() -> None:
    with pytest.raises(ConfigError, match="token"):
        TaskServer(["fast"], host="0.0.0.0")


class Losing:
    """A task server whose worker is lost so often before it draws; or one that nobody joins."""

    url = "http://127.0.0.1:1"
    done, wait = staticmethod(asyncio.ensure_future), staticmethod(run_virtual)

    def __init__(self, losses: int = 0, *, retry: bool = True) -> None:
        self.services, self.calls, self.losses, self.retry = {"fast": Service()}, 0, losses, retry

    async def call(self, name: str, job: object, kind: object, timeout_s: float) -> Task:
        self.calls += 1
        if self.calls <= self.losses:
            raise EnvironmentFailed("the process that had the job is gone", retry=self.retry)
        return ASKED


@pytest.mark.parametrize(("losses", "retry", "calls"), [(0, True, 1), (3, True, 4), (9, True, 4), (1, False, 1)])
def test_a_draw_is_had_from_another_worker_three_times_when_one_is_lost_and_not_when_it_fails(
    losses: int, retry: bool, calls: int
) -> None:
    server: Any = Losing(losses, retry=retry)
    server.services["fast"].served.set()
    if losses < calls:
        assert run_virtual(RemoteEnvironment("fast", server).drawn(Split.TRAIN, 0)).messages == ASKED.messages
    else:
        with pytest.raises(EnvironmentFailed, match="is gone"):
            run_virtual(RemoteEnvironment("fast", server).drawn(Split.TRAIN, 0))
    assert server.calls == calls


class Unserved(Library):
    """A library whose task server nobody joins."""

    def __init__(self) -> None:
        server: Any = Losing()
        self.task_server = server


def test_a_library_waits_ten_minutes_for_the_first_worker_of_a_task_and_says_how_to_start_one() -> None:
    with pytest.raises(TaskError, match="none registered within 600 s; start one with: shoal task serve MODULE:TASK"):
        Unserved()._made(TaskConfig(name="fast", service="remote"), 0)
