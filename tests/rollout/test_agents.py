"""Agents of three kinds on sessions of a run: what they come to, and what is left of them when something goes wrong."""

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from cancelled import LOOPS, Loop, left_by
from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from played_agents import TASK, Truth, played
from shoal import wire
from shoal.errors import ConfigError, TaskError
from shoal.gateway.host import Host
from shoal.interfaces import Model
from shoal.rollout.agents import clients
from shoal.rollout.agents.clients import Named, agent_of, command_play, function_play
from shoal.rollout.agents.runner import AgentFailed, AgentRunner, Play
from shoal.tasks.remote_worker import HttpModel
from shoal.tasks.sdk import BEGINNING, Definition, EnvironmentFailed, PolicyFailed
from shoal.trainer.advantage import rows
from shoal.types import Completion, Message, Outcome, Reward, Role, Rollout, RolloutStatus, Sampling, Task
from until import until

ROOT = Path(__file__).parents[2]
GAME = Task("g/0", "g", (Message(Role.USER, "10-16"),), "15", '{"info": {"low": 10, "high": 16, "number": 15}}')


async def ask_twice(task: Task, client: openai.AsyncOpenAI) -> str:
    """Asks again whether the model is sure."""
    messages: list[Any] = [{"role": message.role.value, "content": message.content} for message in task.messages]
    said = ""
    for _ in range(2):
        answer = await client.chat.completions.create(model="policy", messages=messages)
        said = answer.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "are you sure?"}]
    return said


def test_an_async_function_with_openai_s_client_trains_on_one_row_of_what_was_drawn() -> None:
    (rollout,) = played(function_play(ask_twice), "it is 6", "it is 5", real_scorer=True)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)
    (row,) = rows(rollout, 1.0)
    assert sum(row.mask) == rollout.sampled_tokens
    assert {version for version, m in zip(row.versions, row.mask, strict=True) if m} == {0, 1}


def test_the_rollouts_of_an_environment_share_the_connections_of_one_openai_client() -> None:
    clients: list[openai.AsyncOpenAI] = []

    async def rollout(task: Task, model: Model) -> Outcome:
        clients.append(model.openai())
        await clients[-1].chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
        return Outcome(reward=1.0)

    done = played(contextlib.nullcontext(rollout), "a", "b", n=2)
    assert [one.status for one in done] == [RolloutStatus.FINISHED] * 2
    assert clients[0]._client is clients[1]._client
    assert clients[0].base_url != clients[1].base_url
    assert clients[0].is_closed(), "the run closes the connections"


async def one_answer(task: Task, client: openai.AsyncOpenAI) -> Outcome:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
    return Outcome(reward=0.5, turn_rewards=(0.25,))


def test_an_outcome_has_rewards_of_the_turns() -> None:
    (rollout,) = played(function_play(one_answer))
    assert (rollout.reward.value, rollout.turns[0].reward) == (0.5, 0.25)


async def crash(task: Task, client: openai.AsyncOpenAI) -> None:
    await one_answer(task, client)
    raise KeyError("my own fault")


async def hang(task: Task, client: openai.AsyncOpenAI) -> None:
    await one_answer(task, client)
    await asyncio.sleep(60)


async def wait_for_the_cancelled(task: Task, client: openai.AsyncOpenAI) -> None:
    await one_answer(task, client)
    waiting = asyncio.create_task(asyncio.sleep(60))
    asyncio.get_running_loop().call_soon(waiting.cancel)
    await waiting


async def talk_on(task: Task, client: openai.AsyncOpenAI) -> None:
    messages: list[Any] = []
    while True:
        messages.append({"role": "user", "content": "go on " * 20})
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})


async def say_nothing(task: Task, client: openai.AsyncOpenAI) -> float:
    return 1.0


def test_an_agent_that_crashes_hangs_or_never_asks_gives_a_failed_rollout_with_its_reason() -> None:
    reasons = {
        crash: f"agent: KeyError: 'my own fault' (test_agents.py:{crash.__code__.co_firstlineno + 2} in crash)",
        hang: "deadline: ",
        say_nothing: "agent: it asked the model",
        wait_for_the_cancelled: "agent: cancelled from inside",
    }
    for agent, reason in reasons.items():
        (rollout,) = played(function_play(agent), timeout_s=1.5 if agent is hang else 60)
        assert rollout.status is RolloutStatus.FAILED
        assert rollout.reason.startswith(reason)


HALF = '{"answer": "\\ud83d 5"}'


class Halves:
    """Reads half of a surrogate pair from an answer, and uses it wherever a text of the environment goes."""

    def __init__(self, use: str = "") -> None:
        self.use = use

    def draw(self, rng: object) -> str:
        return "hello"

    async def rollout(self, task: Task, model: Model) -> Outcome:
        said = json.loads((await model.answer(task.messages)).content)["answer"]
        if self.use == "policy":
            raise PolicyFailed(f"unknown move {said}")
        if self.use == "environment":
            raise EnvironmentFailed(f"unknown move {said}")
        return Outcome(1.0, evidence=said) if self.use == "evidence" else Outcome(answer=said)

    def score(self, task: Task, answer: str) -> Reward:
        return Reward(0.0, evidence=json.loads(answer)["answer"])


@pytest.mark.parametrize("use", ["answer", "policy", "environment", "evidence"])
def test_half_of_a_surrogate_pair_in_an_answer_does_not_keep_a_rollout_out_of_the_log(use: str) -> None:
    (rollout,) = played(contextlib.nullcontext(Halves(use).rollout), HALF, real_scorer=True)
    assert wire.decode(wire.encode(rollout), Rollout) == rollout
    assert rollout.reward.value == float(use in ("answer", "evidence"))
    assert use == "answer" or "? 5" in rollout.reason + rollout.reward.evidence


async def test_half_of_a_surrogate_pair_in_an_author_s_evidence_is_a_question_mark() -> None:
    assert await Definition("halves", Halves()).score(TASK, [HALF]) == [Reward(0.0, evidence="? 5")]


@pytest.mark.parametrize(("max_at_once", "most"), [(2, 2), (None, 4)])
def test_no_more_rollouts_play_at_once_than_may(max_at_once: int | None, most: int) -> None:
    playing: list[int] = []

    async def looks_around(task: Task, client: openai.AsyncOpenAI) -> str:
        playing.append(1)
        seen.append(len(playing))
        said = await ask_twice(task, client)
        playing.pop()
        return said

    seen: list[int] = []
    rollouts = played(function_play(looks_around), *["it is 5"] * 8, n=4, max_at_once=max_at_once, delay_s=0.05)
    assert [one.status for one in rollouts] == [RolloutStatus.FINISHED] * 4
    assert max(seen) == most


async def overflowed(client: openai.AsyncOpenAI) -> None:
    """One good answer, then a request that does not fit a context of 400 tokens."""
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "hello"}])
    with contextlib.suppress(openai.BadRequestError):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go on " * 400}])


async def compact_and_crash(task: Task, client: openai.AsyncOpenAI) -> None:
    await overflowed(client)
    await crash(task, client)


async def overflow_and_crash(task: Task, client: openai.AsyncOpenAI) -> None:
    await overflowed(client)
    raise KeyError("my own fault")


async def overflow_and_lose_the_world(task: Task, client: openai.AsyncOpenAI) -> None:
    await overflowed(client)
    raise EnvironmentFailed("the game server is gone")


async def lose_the_world_by_an_overflow(client: openai.AsyncOpenAI, lost: Exception) -> None:
    await overflowed(client)
    try:
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go on " * 400}])
    except openai.BadRequestError as error:
        raise lost from error


async def overflow_and_lose_a_file(task: Task, client: openai.AsyncOpenAI) -> None:
    await lose_the_world_by_an_overflow(client, ConnectionError("the game server is gone"))


async def overflow_and_lose_the_world_inside(task: Task, client: openai.AsyncOpenAI) -> None:
    try:
        await lose_the_world_by_an_overflow(client, EnvironmentFailed("the game server is gone"))
    except EnvironmentFailed as error:
        raise RuntimeError("no game") from error


async def overflow_and_hang(task: Task, client: openai.AsyncOpenAI) -> None:
    await overflowed(client)
    await asyncio.sleep(60)


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        (compact_and_crash, "agent: KeyError: 'my own fault' (test_agents.py:"),
        (overflow_and_crash, "agent: KeyError: 'my own fault' (test_agents.py:"),
        (overflow_and_lose_the_world, "environment: the game server is gone"),
        (overflow_and_lose_a_file, "agent: ConnectionError: the game server is gone"),
        (overflow_and_lose_the_world_inside, "agent: RuntimeError: no game"),
        (overflow_and_hang, "deadline: "),
    ],
)
def test_what_fails_after_a_full_context_is_a_failure_with_its_own_reason(agent: Any, reason: str) -> None:
    timeout_s = 1.5 if agent is overflow_and_hang else 60
    (rollout,) = played(function_play(agent), max_model_len=400, timeout_s=timeout_s)
    assert (rollout.status, rollout.reward.status) == (RolloutStatus.FAILED, "failed")
    assert rollout.reason.startswith(reason)


async def overflow_in_other_words(task: Task, client: openai.AsyncOpenAI) -> None:
    await lose_the_world_by_an_overflow(client, RuntimeError("the model refused"))


async def take_a_cut_answer(task: Task, client: openai.AsyncOpenAI) -> float:
    answer = await client.responses.create(model="policy", input="go on", max_output_tokens=1)
    assert answer.status == "incomplete"
    return 0.5


async def refuse_a_cut_answer(task: Task, client: openai.AsyncOpenAI) -> None:
    await take_a_cut_answer(task, client)
    raise RuntimeError("the response is incomplete")


async def lose_a_file_after_a_cut_answer(task: Task, client: openai.AsyncOpenAI) -> None:
    await take_a_cut_answer(task, client)
    raise RuntimeError("no world") from FileNotFoundError("world.json")


async def compact_and_answer(task: Task, client: openai.AsyncOpenAI) -> float:
    await overflowed(client)
    return (await one_answer(task, client)).reward or 0.0


async def give_up_in_words(task: Task, client: openai.AsyncOpenAI) -> float:
    await overflowed(client)
    return 0.25


async def too_long_from_the_start(task: Task, client: openai.AsyncOpenAI) -> None:
    await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go on " * 400}])


@pytest.mark.parametrize(
    ("agent", "status", "value", "reason"),
    [
        (talk_on, RolloutStatus.TRUNCATED, 0.0, "context: "),
        (overflow_in_other_words, RolloutStatus.TRUNCATED, 0.0, ""),
        (refuse_a_cut_answer, RolloutStatus.TRUNCATED, 0.0, "policy: max_tokens cut its answer, and then "),
        (take_a_cut_answer, RolloutStatus.TRUNCATED, 0.5, "policy: max_tokens cut its answer"),
        (lose_a_file_after_a_cut_answer, RolloutStatus.FAILED, 0.0, ""),
        (give_up_in_words, RolloutStatus.TRUNCATED, 0.25, ""),
        (compact_and_answer, RolloutStatus.FINISHED, 0.5, ""),
        (too_long_from_the_start, RolloutStatus.FAILED, 0.0, ""),
    ],
)
def test_a_full_context_or_a_cut_answer_is_the_policy_s_where_it_was_the_end_and_something_had_been_sampled(
    agent: Any, status: RolloutStatus, value: float, reason: str
) -> None:
    (rollout,) = played(function_play(agent), max_model_len=400)
    assert (rollout.status, rollout.reward.value) == (status, value)
    assert rollout.reason.startswith(reason)


async def ask_often(task: Task, client: openai.AsyncOpenAI) -> float:
    for _ in range(260):
        await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": "again"}])
    return 1.0


def test_a_rollout_has_as_many_answers_as_its_deadline_allows() -> None:
    (rollout,) = played(function_play(ask_often), timeout_s=60)
    assert (rollout.status, rollout.reward.value, len(rollout.turns)) == (RolloutStatus.FINISHED, 1.0, 260)


@contextlib.asynccontextmanager
async def asking_elsewhere(*, too_much: bool) -> AsyncIterator[Play]:
    """As a service in a process of its own: one good request, then one that cannot be answered."""
    async with aiohttp.ClientSession() as http:

        async def play(task: Task, seat: Model) -> Outcome:
            model = HttpModel(seat.base_url, seat.anthropic_base_url, seat.api_key, http)
            said = await model.answer(task.messages)
            more = [Message(Role.USER, "go on " * 400)] if too_much else []
            try:
                await model.answer([*task.messages, said, *more] if more else [])
            except PolicyFailed:
                return Outcome(reward=0.0)
            return Outcome(reward=1.0)

        yield play


def test_of_what_the_gateway_refuses_a_service_only_a_full_context_is_the_policy_s() -> None:
    (rollout,) = played(asking_elsewhere(too_much=True), max_model_len=400)
    assert (rollout.status, len(rollout.turns)) == (RolloutStatus.TRUNCATED, 1)
    (rollout,) = played(asking_elsewhere(too_much=False))
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reason.startswith("environment: HTTP 400")


def test_nobody_but_the_run_opens_sessions_at_its_gateway() -> None:
    @contextlib.asynccontextmanager
    async def intruding() -> AsyncIterator[Play]:
        async def play(task: Task, seat: Model) -> Outcome:
            root = seat.base_url.partition("/s/")[0]
            headers = {"authorization": f"Bearer {seat.api_key}"}
            async with aiohttp.ClientSession() as http, http.post(f"{root}/v1/sessions", headers=headers) as answer:
                raise AgentFailed(f"HTTP {answer.status}")

        yield play

    (rollout,) = played(intruding())
    assert rollout.reason == "HTTP 401"


def test_an_engine_that_is_gone_fails_the_rollout_and_an_engine_that_comes_back_does_not() -> None:
    (rollout,) = played(function_play(ask_twice), "it is 5", *[None] * 40, timeout_s=60)
    assert rollout.status is RolloutStatus.FAILED
    assert "the engine is gone" in rollout.reason
    assert len(rollout.turns) == 1
    (rollout,) = played(function_play(ask_twice), "it is 5", None, "it is 5", timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)


def test_a_task_that_nothing_can_score_fails_its_rollouts_and_not_the_run() -> None:
    (rollout,) = played(function_play(ask_twice), task=GAME, real_scorer=True)
    assert rollout.status is RolloutStatus.FAILED
    assert rollout.reason.startswith("scorer: ")


def command(source: str, env: Sequence[str] = ()) -> AbstractAsyncContextManager[Play]:
    return command_play(Named([sys.executable, "-c", source], env=list(env), score="agent"))


ASK = """
import json, os, sys, urllib.request
task = json.loads(sys.stdin.readline())
body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "hello"}]}).encode()
headers = {"authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "content-type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
said = json.load(urllib.request.urlopen(urllib.request.Request(url, body, headers)))
def ends(**outcome): os.write(int(os.environ["SHOAL_OUTCOME_FD"]), json.dumps(outcome).encode())
"""


def test_a_command_finds_the_session_in_its_environment_and_writes_its_outcome_to_a_descriptor() -> None:
    failed, finished = RolloutStatus.FAILED, RolloutStatus.FINISHED
    ends = {
        "ends(answer='it is ' + task['answer'])": (finished, 1.0, ""),
        "ends(reward=0.25)": (finished, 0.25, ""),
        "ends(reward=0.5 * (os.readlink('/proc/self') == str(os.getpid())))": (finished, 0.5, ""),
        "pass": (finished, 0.0, ""),
        "sys.exit('no more')": (failed, 0.0, "agent: its process ended with code 1: no more"),
        "task['no such key']": (
            failed,
            0.0,
            "agent: its process ended with code 1: KeyError: 'no such key' (<string>:9)",
        ),
        "ends(reward=1.0); sys.exit('no more')": (failed, 0.0, "agent: its process ended with code 1: no more"),
        "os.kill(os.getpid(), 9) if os.getpid() > 1 else os.abort()": (failed, 0.0, "agent: its process ended with si"),
        "ends(rewards=1.0)": (failed, 0.0, "agent: expected one outcome as a JSON object in SHOAL_OUTCOME_FD"),
        "ends(reward=1.0); ends(reward=0.0)": (failed, 0.0, "agent: expected one outcome"),
        "import time; time.sleep(60)": (failed, 0.0, "deadline: "),
    }
    for end, (status, value, reason) in ends.items():
        (rollout,) = played(command(ASK + end), timeout_s=10.0 if "sleep" in end else 60.0)
        assert (rollout.status, rollout.reward.value) == (status, value), rollout.reason
        assert rollout.reason.startswith(reason)
        assert len(rollout.turns) == 1


def test_what_a_command_prints_is_never_its_outcome() -> None:
    """An agent that prints what the model said last must not hand it the reward."""
    echo = "said = said['choices'][0]['message']['content']; print(said); print(said, file=sys.stderr)"
    (rollout,) = played(command(ASK + echo), '{"reward": 1000.0}')
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 0.0)


def test_a_command_gets_the_variables_that_are_named_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("SHOAL_RUN_TOKEN", "secret")
    monkeypatch.setenv("GAME", "chess")
    (rollout,) = played(command(f"{ASK}ends(answer=' '.join(sorted(os.environ)) + task['answer'])", ["GAME"]))
    assert rollout.reward.value == 1.0
    (rollout,) = played(command(f"{ASK}sys.exit(' '.join(sorted(os.environ)))", ["GAME"]))
    assert "GAME" in rollout.reason
    assert "TOKEN" not in rollout.reason
    with pytest.raises(TaskError, match="NO_SUCH_VARIABLE"):
        agent_of({"run": ["true"], "env": ["NO_SUCH_VARIABLE"]})


LEAVE_BEHIND = f"""
import subprocess, time
waits = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
for i in range(2):
    subprocess.Popen(
        ["{sys.executable}", "-c", "import os, sys; os.setsid(); os.fork() and sys.exit(); " + waits, f"FOLDER/{{i}}"]
    ).wait()
while not all(os.path.exists(f"FOLDER/{{i}}") for i in range(2)):
    time.sleep(0.01)
"""


def left(marker: str) -> list[str]:
    """Command lines of the processes that have `marker` in theirs."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
            found += [line] if marker in line else []
    return found


@pytest.mark.parametrize("end", ["ends(reward=1.0)", "time.sleep(600)"])
def test_nothing_that_a_command_started_outlives_it_or_is_waited_for(tmp_path: Path, end: str) -> None:
    """Daemons in sessions of their own hold its output open."""
    source = ASK + LEAVE_BEHIND.replace("FOLDER", str(tmp_path)) + end
    (rollout,) = played(command(source), timeout_s=15.0)
    assert rollout.status is (RolloutStatus.FAILED if "sleep" in end else RolloutStatus.FINISHED)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert left(str(tmp_path)) == []


@LOOPS
@pytest.mark.parametrize("cancels", [1, 2])
def test_a_cancelled_rollout_leaves_no_command(loop: Loop, cancels: int) -> None:
    async def life() -> None:
        model = HttpModel("http://unasked", "http://unasked", "key", aiohttp.ClientSession())
        async with model.http, command("import time; time.sleep(600)") as play:
            await play(TASK, model)

    assert left_by(life, loop, cancels) == {}


def test_without_a_namespace_the_supervisor_adopts_and_kills_daemons(tmp_path: Path) -> None:
    unprivileged = ("setpriv", "--bounding-set=-sys_admin") if os.geteuid() == 0 else ()
    supervisor = (*unprivileged, *clients.SUPERVISOR, str(os.getpid()), "")
    waits = "touch FOLDER/$$; while :; do sleep 1; done".replace("FOLDER", str(tmp_path))

    async def main() -> None:
        script = f"(setsid sh -c '{waits}' &); setsid sh -c '{waits}' & {waits}"
        process = await asyncio.create_subprocess_exec(*supervisor, "sh", "-c", script)
        await until(lambda: len(list(tmp_path.iterdir())) == 3)
        process.terminate()
        assert await process.wait() == 143

    asyncio.run(main())
    assert left(str(tmp_path)) == []


@pytest.mark.parametrize(
    ("body", "end", "status"),
    [
        ({"content": "hello", "most": 1}, "sys.exit(1)", RolloutStatus.TRUNCATED),
        ({"content": "hello", "most": 1}, "os.abort()", RolloutStatus.FAILED),
        ({"content": "hello"}, "sys.exit(1)", RolloutStatus.FAILED),
        ({"content": "go on " * 400}, "sys.exit(1)", RolloutStatus.TRUNCATED),
    ],
)
def test_a_command_that_ends_with_a_code_is_truncated_only_after_an_answer_that_had_no_room(
    body: dict[str, Any], end: str, status: RolloutStatus
) -> None:
    messages = [{"role": "user", "content": body["content"]}]
    last = json.dumps({"model": "policy", "max_tokens": body.get("most"), "messages": messages}).encode()
    asks = f"urllib.request.urlopen(urllib.request.Request(url, {last!r}, headers))"
    source = f"{ASK}\ntry:\n    {asks}\nexcept OSError:\n    pass\n{end}"
    (rollout,) = played(command(source), max_model_len=400)
    assert (rollout.status, rollout.reward.value) == (status, 0.0)


def test_a_command_that_cannot_be_started_is_a_reason() -> None:
    (rollout,) = played(command_play(Named(["/no/such/program"])))
    assert "cannot be started" in rollout.reason


GUESSES = ("13", "I say 15")


@pytest.mark.parametrize(
    "named",
    [
        "examples.agents.guess_openai:guess",
        "examples.agents.framework:guess",
        {"run": [sys.executable, str(ROOT / "examples/agents/guess_process.py")], "score": "agent"},
    ],
)
def test_the_three_examples_play_the_same_game(named: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (rollout,) = played(agent_of(named).play(), *GUESSES, task=GAME, timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
    (row,) = rows(rollout, 1.0)
    assert sum(row.mask) == rollout.sampled_tokens


def test_a_framework_s_own_tools_are_called_in_the_format_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2 + 3"}}\n</tool_call>'
    (rollout,) = played(agent_of("examples.agents.framework:calculate").play(), call, "it is 5", timeout_s=60)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0), rollout.reason
    assert [message.content for message in rollout.messages if message.role is Role.TOOL] == ["5"]
    assert len(rows(rollout, 1.0)) == 1


REFUSED: list[dict[str, object]] = [
    {"run": ["true"], "score": "model"},
    {"run": ["no-such-program"], "score": "agent"},
    {"run": [sys.executable, "no_such_script.py"], "score": "agent"},
    {"run": ["true"], "score": "agent", "answer_file": "answer.txt"},
    {"run": ["true"], "score": "agent", "reads": ["/usr"]},
    {"run": ["true"], "reads": ["/no/such/folder"]},
    {"run": ["true"], "answer_file": "../answer.txt"},
    {"run": "json:dumps", "score": "agent"},
]


@pytest.mark.parametrize(
    "named", ["json", "json:nothing", "json:dumps", "no_such:f", {"run": [], "timeout_s": 1}, {"walk": "a:b"}, *REFUSED]
)
def test_an_agent_that_cannot_be_found_is_refused_before_the_run(named: Any) -> None:
    with pytest.raises((ConfigError, TaskError), match="agent: "):
        agent_of(named)


def test_many_conversations_at_once_lose_no_token() -> None:
    rollouts = played(function_play(ask_twice), *["it is 5"] * 200, n=100, delay_s=0.01, timeout_s=100)
    assert {rollout.reward.value for rollout in rollouts} == {1.0}
    assert json.dumps([len(rollout.turns) for rollout in rollouts]) == json.dumps([2] * 100)


class Turns:
    """The turns of a rollout that a killed run left, and those that were kept since."""

    def __init__(self, left: list[Completion]) -> None:
        self.left, self.kept = left, list[Completion]()

    def take(self, prompt_ids: Sequence[int], sampling: Sampling, ends: Sequence[object] = ()) -> Completion | None:
        return self.left.pop(0) if self.left else None

    def keep(
        self, prompt_ids: Sequence[int], sampling: Sampling, completion: Completion, ends: Sequence[object] = ()
    ) -> None:
        self.kept.append(completion)

    def forget(self) -> None:
        self.left.clear()
        self.kept.clear()


@pytest.mark.parametrize("begins_again", [False, True])
def test_an_agent_is_answered_from_the_turns_of_a_killed_run_unless_its_rollout_begins_again(
    begins_again: bool,
) -> None:
    lost = [EnvironmentFailed("the server left", retry=True)] if begins_again else []

    async def asks(task: Task, model: Model) -> Outcome:
        messages = list(task.messages)
        for _ in range(3):
            messages += [await model.answer(messages), Message(Role.USER, "are you sure?")]
        if lost:
            raise lost.pop()
        return Outcome(answer=messages[-2].content)

    async def main() -> Rollout:
        made = renderer("qwen3")
        before = ScriptedEngine(made, ["first", "second"])
        left = [(await before.generate((1,), Sampling(99)))[0] for _ in range(2)]
        turns, engine = Turns(list(left)), ScriptedEngine(made, ["third", "fourth", "fifth", "sixth"])
        async with Host.open(engine, made, max_model_len=CONTEXT) as host:
            runner = AgentRunner(host, asks, Truth(), Sampling(99), timeout_s=60)
            (rollout,) = await runner.rollouts(TASK, 1, turns=lambda i: turns)
        assert [turn.completion for turn in rollout.turns] == [*left[: 0 if begins_again else 2], *turns.kept]
        return rollout

    rollout = asyncio.run(main())
    words = ["fourth", "fifth", "sixth"] if begins_again else ["first", "second", "third"]
    assert [one.content for one in rollout.messages if one.role is Role.ASSISTANT] == words


def test_no_rollout_of_a_group_waits_for_another_attempt_of_its_first() -> None:
    place, other_waits, attempts = asyncio.Lock(), asyncio.Event(), list[str]()

    async def plays(task: Task, model: Model) -> Outcome:
        begun, is_first = BEGINNING.get() or pytest.fail("a group that trains has a beginning")
        if not is_first:
            other_waits.set()
        async with place:  # which the first leaves between its attempts
            attempts.append("first" if is_first else "other")
            if attempts == ["first"]:
                await other_waits.wait()
                raise EnvironmentFailed("the server left", retry=True)
            assert is_first or await begun.state() is None
            return Outcome(answer=(await model.answer(task.messages)).content)

    rollouts = played(contextlib.nullcontext(plays), n=2)
    assert attempts == ["first", "other", "first"]
    assert [one.status for one in rollouts] == [RolloutStatus.FINISHED] * 2
