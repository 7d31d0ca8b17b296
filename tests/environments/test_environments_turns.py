"""Tasks of many turns: what they ask, what they answer to the model, and when they are won."""

import asyncio
import json
import random
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.work import CoinScorer
from chat_templates import renderer
from gateway_engine import CONTEXT, ScriptedEngine
from shoal.config import TaskConfig
from shoal.environments.games import REWRITE, CarelessTeacher, best_move, moved_disk, played_turns, value_of
from shoal.errors import TaskError
from shoal.gateway.host import Host
from shoal.rollout.agents.runner import AgentRunner
from shoal.tasks.library import GAMES, written
from shoal.tasks.sdk import Definition, Question
from shoal.trainer.advantage import rows
from shoal.types import Role, Rollout, RolloutStatus, Sampling, Split, Task


def service(name: str, **params: Any) -> Any:
    return written(TaskConfig(name=name, service="turns", params=params, eval_share=0.3), 0)


def played(game: Any, task: Task, *script: str, style: str = "qwen3") -> Rollout:
    """One rollout at a scripted engine, without HTTP."""

    async def main() -> Rollout:
        made = renderer(style)
        engine = ScriptedEngine(made, list(script))
        async with Host.open(engine, made, max_model_len=CONTEXT) as host:
            runner = AgentRunner(host, game.rollout, CoinScorer(), Sampling(400, seed=0), timeout_s=60)
            (rollout,) = await runner.rollouts(task, 1)
        return rollout

    rollout = asyncio.run(main())
    assert len(rows(rollout, 1.0)) == 1, "turns go on from one another, token by token"
    return rollout


@pytest.mark.parametrize("name", GAMES)
def test_draws_can_be_repeated_and_the_splits_share_no_question(name: str) -> None:
    tasks = {split: [service(name).draw(split, index) for index in range(60)] for split in Split}
    assert tasks == {split: [service(name).draw(split, index) for index in range(60)] for split in Split}
    asked = {split: {(task.messages, task.info) for task in drawn} for split, drawn in tasks.items()}
    assert not asked[Split.TRAIN] & asked[Split.EVAL]


def test_a_number_is_found_by_halving_and_every_hint_is_true() -> None:
    game = service("guess_number", smallest=1, largest=60, size=31, tries=5)
    for index in range(5):
        task = game.draw(Split.TRAIN, index)
        hidden = json.loads(task.info)["info"]
        low, high, script = hidden["low"], hidden["high"], []
        while not script or script[-1] != str(hidden["number"]):
            script.append(str((low + high) // 2))
            low, high = (
                (int(script[-1]) + 1, high) if int(script[-1]) < hidden["number"] else (low, int(script[-1]) - 1)
            )
        rollout = played(game, task, *script)
        assert (rollout.reward.value, len(rollout.turns)) == (1.0, len(script))
    lost = played(game, task, "no idea", "-", "1000", "x", "y")
    assert (lost.status, lost.reward.value, len(lost.turns)) == (RolloutStatus.FINISHED, 0.0, 5)


def test_the_towers_are_moved_by_the_best_moves_and_a_wrong_one_only_costs_a_turn() -> None:
    game = service("hanoi", disks=3, spare=1)
    for index in range(5):
        task = game.draw(Split.TRAIN, index)
        pegs, script = json.loads(task.info)["info"]["pegs"], ["C -> C"]
        while pegs != "CCC":
            source, target = best_move(pegs)
            script.append(f"I move {source} -> {target}")
            pegs = moved_disk(pegs, source, target) or ""
        assert len(script) <= 8
        rollout = played(game, task, *script)
        assert (rollout.reward.value, len(rollout.turns)) == (1.0, len(script))
        assert "against the rules" in rollout.messages[2].content


def test_a_careless_teacher_loses_games_that_a_careful_one_wins() -> None:
    towers = replace(service("hanoi", disks=3, spare=1), rewrite=REWRITE)

    def rewards(careless: float) -> set[float]:
        teacher = CarelessTeacher(random.Random(0), careless)
        return {asyncio.run(towers.rollout(towers.draw(Split.TRAIN, index), teacher)).reward for index in range(8)}

    assert rewards(0.0) == {1.0}
    assert rewards(1.0) == {0.0}


def test_calls_of_the_calculator_are_answered_and_bad_ones_say_why() -> None:
    game = service("calculator")
    task = game.draw(Split.TRAIN, 0)
    expression = task.messages[0].content.removeprefix("What is ").partition("?")[0]

    def call(name: str, arguments: object) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    script = [
        call("calculator", {"expression": expression}) + "\n" + call("abacus", {"beads": 3}),
        call("calculator", {"expression": "1 / 0"}),
        f"It is {task.answer}",
    ]
    rollout = played(game, task, *script)
    assert (rollout.status, rollout.reward.value) == (RolloutStatus.FINISHED, 1.0)
    told = [message.content for message in rollout.messages if message.role is Role.TOOL]
    assert told[0] == task.answer
    assert told[1:] == ['{"error": "tool \'abacus\' not found"}', '{"error": "division by zero"}']
    assert played(game, task, "It is 1").reward.value == 0
    asked = call("calculator", {"expression": expression})
    assert played(service("calculator", turns=1), task, asked).reward.value == 0, "a tool's result is no answer"


@pytest.mark.parametrize("text", ["__import__('os')", "2 ** 9", "9" * 300, "a + 1", "(", "True + 1"])
def test_the_calculator_computes_nothing_but_arithmetic(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        value_of(text)


def test_the_calculator_s_questions_have_as_many_numbers_above_0_as_asked() -> None:
    game = service("calculator", terms=5, digits=2)
    for index in range(20):
        numbers = [int(one) for one in re.findall(r"\d+", game.draw(Split.TRAIN, index).messages[0].content)]
        assert len(numbers) == 5
        assert all(1 <= number <= 99 for number in numbers)


def test_the_calculator_gives_values_of_200_digits_and_no_longer_ones() -> None:
    assert value_of("9e199") == str(9 * 10**199)
    assert value_of("1 / 9e199") == f"1/{9 * 10**199}"
    for longer in ("1e200", "-1e200", "1 / 1e200"):
        with pytest.raises(ValueError, match="digits"):
            value_of(longer)


@pytest.mark.parametrize(("outcome", "reward"), [("5", 1.0), ("6", 0.0), (0.25, 0.25), (None, None)])
def test_an_answer_of_a_rollout_is_scored_by_the_task_and_a_reward_stays_as_it_is(outcome: Any, reward: Any) -> None:
    class Sums:
        def draw(self, rng):
            return Question("2 + 3 = ?", answer="5")

        async def rollout(self, task, model):
            return outcome

        def score(self, task, answer):
            return float(answer == task.answer)

    game = Definition("sums", Sums(), eval_share=0.0)
    unasked: Any = None
    assert asyncio.run(game.rollout(game.draw(Split.TRAIN, 0), unasked)).reward == reward


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("chess", {}, "guess_number, hanoi"),
        ("hanoi", {"disk": 3}, "disk"),
        ("hanoi", {"disks": 0}, "params: disks: expected int >= 1"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(name: str, params: dict[str, int], message: str) -> None:
    with pytest.raises(TaskError, match=message):
        service(name, **params)


def test_a_template_without_tools_is_a_reason_and_no_reward() -> None:
    game = service("calculator")
    rollout = played_with_gemma(game, game.draw(Split.TRAIN, 0))
    assert rollout.status is RolloutStatus.FAILED
    assert "tools" in rollout.reason


def played_with_gemma(game: Any, task: Task) -> Rollout:
    async def main() -> Rollout:
        made = renderer("gemma")
        async with Host.open(ScriptedEngine(made), made, max_model_len=CONTEXT) as host:
            runner = AgentRunner(host, game.rollout, CoinScorer(), Sampling(40), timeout_s=60)
            (rollout,) = await runner.rollouts(task, 1)
        return rollout

    return asyncio.run(main())


def test_the_embedded_model_s_lessons_are_of_training_games_in_the_example_s_words() -> None:
    turns = played_turns(0, 0.75)
    starts = {next(turns)[0][0].content for _ in range(400)}
    assert all(len(start) <= 7 for start in starts)
    held_out = written(TaskConfig(name="hanoi", service="turns", rewrite=REWRITE, eval_share=0.5), 0)
    assert not starts & {held_out.draw(Split.EVAL, index).messages[0].content for index in range(100)}
    assert len({next(played_turns(seed, 0.75))[0] for seed in range(8)}) > 2, "another seed's games are others"
