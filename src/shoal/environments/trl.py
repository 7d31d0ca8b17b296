"""Tasks written for TRL's GRPOTrainer: reward functions, tools and environments, without TRL.

    from shoal.environments.trl import trl_environment
    game = trl_environment("game", rows, environment_factory=Game)      # service = "python", path = "my_tasks:game"
    sums = trl_environment("sums", rows, reward_funcs=[correct, short], reward_weights=[1.0, 0.1])

Reward functions are called as in TRL, `f(prompts=..., completions=..., **columns)`, with a whole group at a time. With
tools or environments each call has one rollout, as it ends, so a function cannot compare completions. A reward of None
leaves the rollout out. Environments have `reset(**row)`, public methods that are tools, and perhaps `get_reward()` (TRL
1.x).
"""

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from shoal.errors import SandboxUnavailable, TaskError
from shoal.interfaces import Model
from shoal.model.chat_template import template_entry
from shoal.tasks.holdout import EVAL_SHARE, Epochs, question_of
from shoal.tasks.sdk import Definition, EnvironmentFailed, called
from shoal.types import Json, Message, Outcome, Reward, RewardStatus, Role, Split, Task

Row = Mapping[str, Json]


def trl_environment(
    name: str,
    rows: Sequence[Row],
    *,
    reward_funcs: Sequence[Callable[..., Any]] = (),
    reward_weights: Sequence[float] | None = None,
    environment_factory: Callable[[], Any] | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    max_running: int | None = None,
    eval_share: float = EVAL_SHARE,
) -> Definition:
    """A task of rows with `prompt` (a text or messages) and columns for the reward functions. Raises `TaskError`."""
    weights = list(reward_weights or [1.0] * len(reward_funcs))
    if len(weights) != len(reward_funcs):
        raise TaskError(f"{name}: expected {len(reward_funcs)} reward weights, got {len(weights)}")
    parts = list(zip(reward_funcs, weights, strict=True))
    tasks = [_task(f"{name}: row {number}", number, row) for number, row in enumerate(rows)]
    given = (
        [dict(row) for row in rows],
        Epochs(name, tasks, [question_of(task.messages) for task in tasks], eval_share),
        parts,
    )
    if environment_factory is not None or tools:
        author: _Rows = _ToolUse(*given, environment_factory, tools)
    elif reward_funcs:
        author = _SingleTurn(*given)
    else:
        raise TaskError(f"{name}: expected reward functions or an environment, got neither")
    return Definition(name, author, max_running=max_running)


def _task(where: str, number: int, row: Row) -> Task:
    """The task of a row, which is found again by its number. Raises `TaskError`."""
    prompt, answer = row.get("prompt"), row.get("answer")
    try:
        asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = msgspec.convert(asked, tuple[Message, ...])
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: expected a prompt, a text or messages: {error}") from None
    return Task(str(number), "", messages, answer if isinstance(answer, str) else None, json.dumps({"row": number}))


@dataclass(frozen=True, slots=True)
class _Rows:
    """An author's rows, and TRL's weighted sum of reward functions."""

    rows: Sequence[dict[str, Json]]
    epochs: Epochs
    parts: Sequence[tuple[Callable[..., Any], float]]

    def draw(self, split: Split, index: int) -> Task:
        return self.epochs.draw(split, index)

    def row_of(self, task: Task) -> Row:
        number: int = json.loads(task.info)["row"]
        return self.rows[number]

    async def rewards(
        self, row: Row, messages: Sequence[Message], said: Sequence[Sequence[Message]], **more: Any
    ) -> list[Reward]:
        """One reward for each completion of a prompt; a completion for which every function gives None fails."""
        n = len(said)
        columns = {name: [value] * n for name, value in row.items() if name not in ("prompt", "completion")}
        # As TRL has it: a text for a prompt that is a text, messages for one that is messages.
        if isinstance(prompt := row["prompt"], str):
            asked: Any = prompt
            # Of a conversation that was cut after a tool's result, the last words of the model.
            words = ([one.content for one in all_ if one.role is Role.ASSISTANT] for all_ in said)
            completions: list[Any] = [(own or [""])[-1] for own in words]
        else:
            asked, completions = list(map(template_entry, messages)), [list(map(template_entry, one)) for one in said]
        totals: list[float | None] = [None] * n
        for function, weight in self.parts:
            given = await called(function, prompts=[asked] * n, completions=completions, **columns, **more)
            values = cast(Sequence[float | None], given)
            if len(values) != n:
                raise ValueError(f"{getattr(function, '__name__', function)}: expected {n} rewards, got {len(values)}")
            for i, value in enumerate(values):
                if value is not None:
                    totals[i] = (totals[i] or 0.0) + weight * float(value)
        nothing = Reward(0.0, RewardStatus.FAILED, evidence="every reward function gave None")
        return [nothing if total is None else Reward(total) for total in totals]


class _SingleTurn(_Rows):
    """Answers take one turn."""

    async def scores(self, task: Task, answers: Sequence[str]) -> list[Reward]:
        said = [[Message(Role.ASSISTANT, answer)] for answer in answers]
        return await self.rewards(self.row_of(task), task.messages, said)


@dataclass(frozen=True, slots=True)
class _ToolUse(_Rows):
    """A conversation in which the model calls tools until it calls none."""

    factory: Callable[[], Any] | None
    tools: Sequence[Callable[..., Any]]

    async def rollout(self, task: Task, model: Model) -> Outcome:
        row, environment = self.row_of(task), self.factory() if self.factory else None
        messages, tools = list(task.messages), {tool.__name__: tool for tool in self.tools}
        if environment is not None:
            seen = await called(environment.reset, **row)
            if seen is not None:
                messages[-1] = Message(messages[-1].role, messages[-1].content + str(seen))
            tools |= tools_of(environment)
        begun = len(messages)
        await converse(model, messages, tools)
        more = {"environments": [environment]} if environment is not None else {}
        (reward,) = await self.rewards(row, messages[:begun], [messages[begun:]], **more)
        if hasattr(environment, "get_reward"):
            own = float(cast(float, await called(cast(Any, environment).get_reward)))
            return Outcome(reward=reward.value + own)
        if reward.status is not RewardStatus.SCORED:
            raise EnvironmentFailed(reward.evidence)
        return Outcome(reward=reward.value)


def tools_of(environment: object) -> dict[str, Callable[..., Any]]:
    """The public methods that the model may call, selected as in TRL."""
    methods = (name for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction))
    return {name: getattr(environment, name) for name in methods if name[0] != "_" and name not in NOT_TOOLS}


NOT_TOOLS = frozenset({"reset", "get_reward"})


async def converse(
    model: Model, messages: list[Message], tools: Mapping[str, Callable[..., Any]], most_turns: int = 16
) -> None:
    """Continues until the model calls no tool, at most `most_turns` times; appends every message to `messages`."""
    described = tools_json(tools.values())
    for _ in range(most_turns):
        said = await model.answer(messages, tools=described)
        messages.append(said)
        if not said.tool_calls:
            return
        for call in said.tool_calls:
            messages.append(Message(Role.TOOL, await _result(tools, call.name, call.arguments), tool_call_id=call.id))


async def _result(tools: Mapping[str, Callable[..., Any]], name: str, arguments: str) -> str:
    """A tool's result. A wrong call gets its error as the result, as in TRL, so that the model can mend it."""
    if name not in tools:
        return json.dumps({"error": f"tool {name!r} not found"})
    try:
        return str(await called(tools[name], **json.loads(arguments)))
    except (EnvironmentFailed, SandboxUnavailable):
        raise
    except Exception as error:  # a tool may raise anything
        return json.dumps({"error": str(error)})


def tools_json(tools: "Sequence[Callable[..., Any]] | Any") -> str:
    """JSON array of transformers' schemas of annotated functions with docstrings, as in TRL."""
    from transformers.utils import get_json_schema

    described = [get_json_schema(tool) for tool in tools]
    return json.dumps(described) if described else ""
