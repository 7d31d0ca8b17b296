"""`shoal compare` asks two models the same held-out questions until one is surely better, or the questions end."""

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

from shoal.config import QUESTIONS, Config, load
from shoal.errors import ConfigError
from shoal.experience.held_out import HeldOutAnswer
from shoal.interfaces import Runner
from shoal.rollout.comparison import Comparison
from shoal.rollout.evaluation import evaluation, held_out_tasks
from shoal.run.blocking import run_blocking
from shoal.run.commands.serve import chat_directory
from shoal.run.parts import answering
from shoal.run.prepare import Prepared, prepare_answering
from shoal.types import Task

ROUND = 16
"""Questions after which the bounds are looked at."""
START = "@start"

Show = Callable[[str], None]


def compare(
    models: tuple[str, str], config: Path | None, overrides: Sequence[str], questions: int, show: Show
) -> dict[str, object]:
    """Compares two models; a model is a run, `RUN@start`, a directory or name of a model, or an engine's URL.

    Without a `config` the questions are those of the run among the models. Raises a `ShoalError`.
    """
    file = config or _settings_of(models)
    sides = [load(file, [*overrides, *_overrides(model)]) for model in models]
    show("checking models, tasks and rewards")
    with ExitStack() as stack:
        prepared = [stack.enter_context(prepare_answering(side)) for side in sides]
        tasks, few = held_out_tasks(prepared[0].service, questions)
        if few:
            show(f"the tasks have {len(tasks)} distinct held-out questions, not {questions}")
        comparison = run_blocking(_compared(prepared, tasks, show))
    return {**comparison.values, "verdict": f"{models[1]}: {comparison.sentence(models[0])}"}


def _settings_of(models: Sequence[str]) -> Path:
    """Settings of the first run among the models."""
    for model in models:
        file = Path(model.removesuffix(START)) / "resolved.toml"
        if file.is_file():
            return file
    raise ConfigError(f"{' and '.join(models)}: expected a run among them, or --config with the tasks to ask; got none")


def _overrides(model: str) -> list[str]:
    """Settings that put a model in place of a configuration's own."""
    if model.startswith(("http://", "https://")):
        return [f"engine.urls={json.dumps([model])}"]
    if model.endswith(START):
        path = load(Path(model.removesuffix(START)) / "resolved.toml").model.path
    else:
        path = str(chat_directory(model))
    return [f"model.path={json.dumps(path)}", "engine.urls=[]"]


async def _compared(prepared: Sequence[Prepared], tasks: Sequence[Task], show: Show) -> Comparison:
    """Asks both models round by round, until the comparison is decided."""
    samples = prepared[0].config.eval.samples
    comparison = Comparison(sorted(prepared[0].environments), samples)
    async with AsyncExitStack() as stack:
        show("starting both engines")
        runners = [(await stack.enter_async_context(answering(one))).runner for one in prepared]
        for begin in range(0, len(tasks), ROUND):
            asked = tasks[begin : begin + ROUND]
            async with asyncio.TaskGroup() as both:
                asking = [both.create_task(_answers(one, asked, samples)) for one in runners]
            for task in asked:
                comparison.add(*(one.result()[task.id] for one in asking))
            bounds = comparison.overall.bounds
            show(
                f"{begin + len(asked)} of {len(tasks)} questions: {comparison.overall.first:.1%} and "
                f"{comparison.overall.second:.1%}, difference in [{bounds.low:+.1%}, {bounds.high:+.1%}]"
            )
            if comparison.decided:
                break
    return comparison


async def _answers(runner: Runner, tasks: Sequence[Task], samples: int) -> dict[str, list[HeldOutAnswer]]:
    """Answers to each question, sampled and greedy, by its id."""
    found: dict[str, list[HeldOutAnswer]] = {task.id: [] for task in tasks}
    for task, purpose, rollouts in (await evaluation(tasks, runner, samples)).rollouts:
        found[task.id] += [HeldOutAnswer.of(0, task, purpose, at, one) for at, one in enumerate(rollouts)]
    return found


def run_evaluation(config: Config) -> dict[str, object]:
    """Figures of the configured model on held-out questions. Raises a `ShoalError`."""
    with prepare_answering(config) as prepared:
        return run_blocking(_evaluate(prepared))


async def _evaluate(prepared: Prepared) -> dict[str, object]:
    tasks, few = held_out_tasks(prepared.service, prepared.config.eval.questions or QUESTIONS)
    async with answering(prepared) as parts:
        evaluated = await evaluation(tasks, parts.runner, first=True)
    why = {"unscored_reason": evaluated.failure} if evaluated.failure else {}
    shortage = {"few_questions": few} if few else {}
    return {**evaluated.values, **why, **shortage, "model": str(prepared.model_dir)}
