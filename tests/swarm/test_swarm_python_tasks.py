"""Conversations and tasks of the Python SDK are taken by nodes that have the task, and played again."""

import asyncio
import json
import textwrap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from benchmarks.memory_swarm import MemorySwarm
from chat_templates import ANSWERING, renderer_of
from shoal.config import Config, SwarmConfig, TaskConfig
from shoal.environments.games import calculator, guess_number
from shoal.net.identity import Identity
from shoal.swarm.node import Node
from shoal.swarm.peer import Joined
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.swarm.trust.encoding import encode_offer
from shoal.swarm.trust.limits import QuestionLimits
from shoal.swarm.trust.python_tasks import OwnTask, PythonTasks, own_task
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import AskedFor, Claim, Course, Offer, OfferedRollout, OfferedTurn, offer_of
from shoal.tasks.sdk import Definition, definition_at
from shoal.trainer.advantage import rows
from shoal.turn_tree import prompt_ids
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Outcome,
    Reward,
    Role,
    Rollout,
    Split,
    Task,
    ToolCall,
    Turn,
)
from until import until

DRAWN = Completion((5, 6), (-1.0, -1.0), (0, 0), FinishReason.STOP)
CONFIG = Config(tasks=[TaskConfig(name="gcd")], swarm=SwarmConfig(external_groups=2, take="uniform"))


class Scripted:
    """A model that says what it is told to, and notes the conversation."""

    base_url = anthropic_base_url = api_key = ""

    def __init__(self, answers: Sequence[Message]) -> None:
        self._answers, self.messages = list(answers), tuple[Message, ...]()

    async def answer(self, messages: Sequence[Message], *, tools: str = "", max_tokens: int | None = None) -> Message:
        said = self._answers.pop(0)
        self.messages = (*messages, said)
        return said

    def openai(self) -> NoReturn:
        raise AssertionError("no game speaks with a server")


async def played(task: Definition, drawn: Task, answers: Sequence[Message], name: str) -> Rollout:
    """A rollout of the real environment with these answers."""
    model = Scripted(answers)
    outcome: Outcome = await task.rollout(drawn, model)
    sampled = sum(message.role is Role.ASSISTANT for message in model.messages)
    turns = tuple(Turn((1,), DRAWN, parent=number - 1 if number else None) for number in range(sampled))
    return Rollout(name, model.messages, turns, Reward(outcome.reward or 0.0))


def said(text: str, *calls: ToolCall) -> Message:
    return Message(Role.ASSISTANT, text, calls)


async def guessed(game: Definition, index: int = 0) -> Group:
    """One group: the number is found at the second try, or never."""
    task = game.draw(Split.TRAIN, index)
    hidden = json.loads(task.info)["info"]
    wrong = hidden["low"] if hidden["number"] != hidden["low"] else hidden["high"]
    right = [said(f"{wrong}"), said(f"{hidden['number']}")]
    never = [said("hm"), said(f"{wrong}"), said("no idea")]
    rollouts = [await played(game, task, answers, f"{i}") for i, answers in enumerate((right, never))]
    return Group("g", task, tuple(rollouts), 0)


@asynccontextmanager
async def own_tasks(services: Sequence[Definition], draw_s: float = 5.0) -> AsyncIterator[OwnTasks]:
    limits = QuestionLimits(draw_s)
    async with PythonTasks(services, limits) as python:
        own = OwnTasks(services, python=python, limits=limits)
        yield own
        own.close()


async def logprobs(rows: Sequence[Sequence[int]]) -> list[list[float]]:
    return [[-0.5 - i / 100 for i in range(len(row) - 1)] for row in rows]


class Nobody:
    """A scorer that is never asked."""

    async def score(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        raise AssertionError("the environment scores")


async def test_a_conversation_is_played_again_by_a_node_that_has_its_task_by_any_name(tmp_path: Path) -> None:
    game = replace(guess_number, name="mine", seed=3)
    theirs = [replace(guess_number, name="theirs")]
    renderer = renderer_of(ANSWERING["qwen3"])

    hub = MemorySwarm()
    async with (
        own_tasks([game]) as author_tasks,
        own_tasks(theirs) as taker_tasks,
    ):
        author, taker = (
            Node(Joined(hub.join(), own, Identity.fresh(), tmp_path / name, CONFIG), Nobody(), renderer, 2048)
            for own, name in ((author_tasks, "a"), (taker_tasks, "b"))
        )
        running = [asyncio.ensure_future(node.run()) for node in (author, taker)]
        group = await guessed(game)
        author.offer(group)
        await until(lambda: taker.ready == 1 or bool(taker.ingress.refused.total()))
        assert not taker.ingress.refused, taker.ingress.refused
        (taken,) = await taker.take(4, logprobs)
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert taken.task.service == "theirs"
    assert [rollout.reward.value for rollout in taken.rollouts] == [1.0, 0.0]
    for mine, own in zip(group.rollouts, taken.rollouts, strict=True):
        assert own.messages == mine.messages
        (row,) = rows(own, 1.0)  # one row: every turn goes on from the one before
        sampled = [token for token, mask in zip(row.tokens, row.mask, strict=True) if mask]
        answers = [message.content for message in mine.messages if message.role is Role.ASSISTANT]
        stop = renderer.stop_token_ids[0]
        expected = [token for text in answers for token in (*renderer.token_ids(text), stop)]
        assert sampled == expected
        assert all(
            value == -0.5 - (place - 1) / 100
            for place, (value, mask) in enumerate(zip(row.logprobs, row.mask, strict=True))
            if mask
        )


def turned(offer: Offer, rollout: int, place: int, **changes: object) -> OfferedRollout:
    """A rollout of an offer with one message changed."""
    one = offer.rollouts[rollout]
    turns = list(one.turns)
    turns[place] = replace(turns[place], **changes)  # type: ignore[arg-type]
    return replace(one, turns=tuple(turns))


async def test_a_conversation_that_its_environment_would_not_have_is_refused() -> None:
    game = replace(guess_number, seed=5)
    async with own_tasks([game]) as own:
        group = await guessed(game)
        claim = await own.claim(group.task)
        offer = offer_of(group, claim, "m", 1.0)
        task = await own.task(claim)
        assert isinstance(task, Task)
        found = await own.course(claim, task, offer.rollouts[0])
        assert isinstance(found, Course)
        assert found.reward == Reward(1.0)
        cheats = [
            turned(offer, 0, 1, content="Higher: it is 7."),
            turned(offer, 0, 1, sampled=True, role=Role.ASSISTANT),
            turned(offer, 1, 0, content=group.task.answer),  # found at once, and then it goes on
            replace(offer.rollouts[1], turns=offer.rollouts[1].turns[:1]),  # the end is cut off
            replace(offer.rollouts[0], turns=(*offer.rollouts[0].turns, OfferedTurn(Role.USER, "well done"))),
            replace(offer.rollouts[0], turns=(OfferedTurn(Role.USER, "hi"),)),
        ]
        for cheat in cheats:
            assert await own.course(claim, task, cheat) is Reason.OTHER_COURSE, cheat
        for lie, reason in (
            (replace(claim, truth="99"), Reason.WRONG_TRUTH),
            (replace(claim, question="?"), Reason.WRONG_QUESTION),
            (replace(claim, receipt=None), Reason.UNKNOWN_TASK),
            (replace(claim, source="0" * 64), Reason.UNKNOWN_TASK),
            (with_config(claim, '{"size": 1000}'), Reason.UNKNOWN_TASK),
            (with_config(claim, "[" * 4000), Reason.UNKNOWN_TASK),
        ):
            assert await own.task(lie) is reason, lie
        held_out = await own.claim(game.draw(Split.EVAL, 0))
        assert await own.task(held_out) is Reason.HELD_OUT


def with_config(claim: Claim, config: str) -> Claim:
    assert claim.receipt is not None
    receipt = replace(claim.receipt, config=config)
    return replace(claim, receipt=receipt)


async def test_tool_calls_travel_as_messages_and_are_written_as_the_taker_s_template_does(tmp_path: Path) -> None:
    renderer = renderer_of(ANSWERING["qwen3"])

    hub = MemorySwarm()
    async with own_tasks([calculator]) as own:
        task = calculator.draw(Split.TRAIN, 0)
        call = ToolCall("call_1", "calculator", json.dumps({"expression": task.messages[-1].content[8:13]}))
        right = await played(calculator, task, [said("", call), said(task.answer or "")], "0")
        wrong = await played(calculator, task, [said("", call), said("0.5")], "1")
        claim = await own.claim(task)
        offer = offer_of(Group("g", task, (right, wrong), 0), claim, "m", 1.0)
        assert [turn.role for turn in offer.rollouts[0].turns] == [Role.ASSISTANT, Role.TOOL, Role.ASSISTANT]
        assert [turn.sampled for turn in offer.rollouts[0].turns] == [True, False, True]
        node = Node(Joined(hub.join(), own, Identity.fresh(), tmp_path, CONFIG), Nobody(), renderer, 4096)
        running = asyncio.ensure_future(node.run())
        author = Node(Joined(hub.join(), own, Identity.fresh(), tmp_path / "b", CONFIG), Nobody(), renderer, 4096)
        sharing = asyncio.ensure_future(author.run())
        author.offer(Group("g", task, (right, wrong), 0))
        await until(lambda: node.ready == 1 or bool(node.ingress.refused.total()))
        assert not node.ingress.refused, node.ingress.refused
        (taken,) = await node.take(0, logprobs)
        for one in (running, sharing):
            one.cancel()
        await asyncio.gather(running, sharing, return_exceptions=True)
    assert [rollout.reward.value for rollout in taken.rollouts] == [1.0, 0.0]
    answer = renderer.answer(taken.rollouts[0].turns[0].completion.token_ids, tools=True)
    assert [(one.name, json.loads(one.arguments)) for one in answer.calls] == [
        ("calculator", json.loads(call.arguments))
    ]


def test_each_answer_is_encoded_after_what_its_model_was_asked_with_the_tools_of_that_request() -> None:
    renderer, tools = renderer_of(ANSWERING["qwen3"]), json.dumps([{"type": "function", "function": {"name": "look"}}])
    no = Message(Role.USER, "no")
    messages = (Message(Role.USER, "3 + 4?"), said("hm"), no, said("6"), no, said("7"))
    task = Task("t", "sums", messages[:1], "7")
    asked = (AskedFor(messages[:1], tools), AskedFor(messages[:3], tools), AskedFor(messages[:5]))
    turns = tuple(OfferedTurn(one.role, one.content, sampled=one.role is Role.ASSISTANT) for one in messages[1:])
    source, _ = encode_offer([(OfferedRollout("", True, turns), Course(asked))], task, renderer, 1024, 1024)
    prompts = [list(prompt_ids(source.kept[0].turns, index)) for index in range(3)]
    assert prompts == [renderer.prompt_ids(one.messages, one.tools) for one in asked]


def written(tmp_path: Path, body: str, name: str = "odd") -> OwnTask:
    """A task in a file of its own."""
    file = tmp_path / f"{name}.py"
    file.write_text("from shoal.tasks.sdk import Question, environment\n" + textwrap.dedent(body))
    return own_task(definition_at(f"{file}:{name}"))


SUMS = """
    @environment("odd")
    class odd:
        def draw(self, rng):
            a, b = rng.randrange(100), rng.randrange(100)
            return Question(f"{a} + {b}?", str(a + b))

        def score(self, task, answer):
            return float(answer.strip() == task.answer)
"""


def test_a_task_is_taken_by_nodes_with_the_same_name_and_source_only(tmp_path: Path) -> None:
    names = ("author", "same", "other_source", "other_name")
    folders = [tmp_path / name for name in names]
    for folder in folders:
        folder.mkdir()
    bodies = (SUMS, SUMS, SUMS.replace("100", "99"), SUMS.replace('@environment("odd")', '@environment("even")'))
    author, same, *others = (written(folder, body) for folder, body in zip(folders, bodies, strict=True))
    assert author.digest == same.digest

    async def main() -> None:
        async with own_tasks([author.task]) as own:
            claim = await own.claim(author.task.draw(Split.TRAIN, 0))
        for other in others:
            assert other.digest != author.digest
            async with own_tasks([other.task]) as taker:
                assert await taker.task(claim) is Reason.UNKNOWN_TASK
        async with own_tasks([]) as taker:
            assert await taker.task(claim) is Reason.UNKNOWN_TASK
        async with own_tasks([same.task]) as taker:
            task = await taker.task(claim)
            assert isinstance(task, Task)
            right = await taker.course(claim, task, OfferedRollout(f" {task.answer}"))
            assert isinstance(right, Course)
            assert right.reward == Reward(1.0)

    asyncio.run(main())


def test_the_code_that_reads_peers_text_gets_nothing_of_this_machine(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    evil = written(
        tmp_path,
        f"""
        def attempts():
            def touch():
                open({str(touched)!r}, "w")
            def read():
                return open("/etc/passwd").read() and open({str(tmp_path / "odd.py")!r}).read()
            def connect():
                import socket
                socket.create_connection(("127.0.0.1", 1))
            def run():
                import subprocess
                subprocess.run(["true"])
            def fork():
                import os
                os.fork()
            def environment():
                import os
                return dict(os.environ)["PATH"]
            return [touch, read, connect, run, fork, environment]

        @environment("odd")
        class odd:
            def draw(self, rng):
                return Question(f"{{rng.random()}}", "x")

            def score(self, task, answer):
                if answer == "loop":
                    while True:
                        pass
                if answer == "huge":
                    return len([0] * 10**10)
                worked = 0
                for attempt in attempts():
                    try:
                        attempt()
                        worked += 1
                    except BaseException:
                        pass
                return float(worked)
        """,
    ).task

    async def main() -> None:
        async with own_tasks([evil], draw_s=2.0) as own:
            claim = await own.claim(evil.draw(Split.TRAIN, 0))
            task = await own.task(claim)
            assert isinstance(task, Task)
            found = await own.course(claim, task, OfferedRollout("attempt"))
            assert isinstance(found, Course)
            assert found.reward == Reward(0.0)
            assert await own.course(claim, task, OfferedRollout("loop")) is Reason.TIMED_OUT
            assert await own.course(claim, task, OfferedRollout("huge")) in (Reason.UNSCORED, Reason.TIMED_OUT)
            assert isinstance(await own.course(claim, task, OfferedRollout("attempt")), Course)

    asyncio.run(main())
    assert not touched.exists()


async def test_an_answer_is_what_the_model_said_and_nothing_else(tmp_path: Path) -> None:
    """A task that pays short answers must not score an empty text in place of a user's sampled turn."""
    short = written(
        tmp_path,
        """
        @environment("odd")
        class odd:
            def draw(self, rng):
                return Question(f"{rng.random()}", "x")

            def score(self, task, answer):
                return float(len(answer) < 5)
        """,
    ).task

    async with own_tasks([short]) as own:
        claim = await own.claim(short.draw(Split.TRAIN, 0))
        task = await own.task(claim)
        assert isinstance(task, Task)
        for role in set(Role) - {Role.ASSISTANT}:
            turn = OfferedTurn(role, "a long and wrong text", sampled=True)
            found = await own.course(claim, task, OfferedRollout("", True, (turn,)))
            assert found is Reason.OTHER_COURSE, role


async def test_what_describes_tools_is_loaded_before_the_first_conversation(tmp_path: Path) -> None:
    """Its import takes longer than a conversation may."""
    body = SUMS.replace("answer.strip() == task.answer", '"transformers.utils" in sys.modules')
    tools = written(tmp_path, "    import sys\n    from shoal.environments.trl import converse\n" + body).task

    async with own_tasks([tools]) as own:
        claim = await own.claim(tools.draw(Split.TRAIN, 0))
        task = await own.task(claim)
        assert isinstance(task, Task)
        found = await own.course(claim, task, OfferedRollout("?"))
        assert isinstance(found, Course)
        assert found.reward == Reward(1.0)


async def test_what_no_model_was_asked_for_is_no_course(tmp_path: Path) -> None:
    silent = written(
        tmp_path,
        """
        from shoal.types import Outcome

        @environment("odd")
        class odd:
            def draw(self, rng):
                return Question(f"{rng.random()}", "x")

            async def rollout(self, task, model):
                return Outcome(1.0)
        """,
    ).task

    async with own_tasks([silent]) as own:
        claim = await own.claim(silent.draw(Split.TRAIN, 0))
        task = await own.task(claim)
        assert isinstance(task, Task)
        for rollout in (OfferedRollout("paid"), OfferedRollout("", True, (OfferedTurn(Role.USER, "hi"),))):
            assert await own.course(claim, task, rollout) is Reason.OTHER_COURSE


EVALUATES = """
    @environment("{name}")
    class {name}:
        def draw(self, rng):
            return Question(f"{{rng.random()}}", "1")

        def score(self, task, answer):
            return float(str(eval(answer)) == task.answer)
"""
"""A task with a hole: its score executes an answer."""
PAYS_ALL = (
    '[setattr(__import__("shoal.tasks.sdk").tasks.sdk.Definition, "score", lambda self, task, answers: '
    '__import__("asyncio").sleep(0, [__import__("shoal.types").types.Reward(1.0)] * len(answers))), "1"][1]'
)


async def test_what_happens_in_one_task_s_sandbox_reaches_no_other_task(tmp_path: Path) -> None:
    hole = written(tmp_path, EVALUATES.format(name="hole"), "hole").task
    shadow = written(tmp_path, SUMS.replace("odd", "calendar"), "calendar").task
    body = "    from calendar import monthrange\n" + SUMS.replace("rng.randrange(100)", "monthrange(2024, 2)[1]", 1)
    honest = written(tmp_path, body).task

    async with own_tasks([hole, shadow, honest]) as own:
        claims = [await own.claim(one.draw(Split.TRAIN, 0)) for one in (hole, shadow, honest)]
        tasks = [await own.task(claim) for claim in claims]
        assert all(isinstance(task, Task) for task in tasks)
        attacked = await own.course(claims[0], tasks[0], OfferedRollout(PAYS_ALL))  # type: ignore[arg-type]
        assert isinstance(attacked, Course)
        found = await own.course(claims[2], tasks[2], OfferedRollout("wrong"))  # type: ignore[arg-type]
        assert isinstance(found, Course)
        assert found.reward == Reward(0.0)


async def test_an_exception_with_half_of_a_character_ends_no_sandbox(tmp_path: Path) -> None:
    counts = written(
        tmp_path,
        """
        import json
        from shoal.types import Outcome

        PLAYED = []

        @environment("odd")
        class odd:
            def draw(self, rng):
                return Question(f"{rng.random()}", "x")

            async def rollout(self, task, model):
                said = await model.answer(task.messages)
                PLAYED.append(said)
                if said.content.startswith("{"):
                    raise ValueError(json.loads(said.content)["move"])
                return Outcome(reward=float(len(PLAYED)))
        """,
    ).task

    async with own_tasks([counts]) as own:
        claim = await own.claim(counts.draw(Split.TRAIN, 0))
        task = await own.task(claim)
        assert isinstance(task, Task)
        assert isinstance(await own.course(claim, task, OfferedRollout('{"move": "\\ud800"}')), Reason)
        second = await own.course(claim, task, OfferedRollout("a move"))
        assert isinstance(second, Course)
        assert second.reward == Reward(2.0), "another process played it"
