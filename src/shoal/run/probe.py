"""A probe calls the user's reward functions once before a run, so that a broken one is an error at the start."""

from collections.abc import Sequence

from shoal import checker
from shoal.checker import leaves, task_spec
from shoal.errors import ConfigError, TaskError
from shoal.interfaces import Environment
from shoal.reward.user_functions import FunctionScorer
from shoal.tasks.sdk import Definition
from shoal.types import RewardStatus, Split


async def check_functions(services: Sequence[Environment]) -> None:
    """Has each reward function score one row's truth, in a process of its own. Raises `ConfigError` with the cause."""
    scorer = FunctionScorer()
    try:
        for service in (one for one in services if not (one.converses or one.scores)):
            task = service.draw(Split.TRAIN, 0)
            for spec in leaves(task_spec(task)):
                if isinstance(spec, checker.Function):
                    await scorer.values(spec, task, [task.answer or ""])
    except (TaskError, TimeoutError) as error:
        raise ConfigError(f"tasks.{service.name}.scorer: expected a reward of one row, got {error}") from None
    finally:
        await scorer.aclose()


async def check_scores(services: Sequence[Environment]) -> None:
    """Has each task's own `score` judge one row's truth, in this process. Raises `ConfigError`."""
    for service in services:
        if isinstance(service, Definition) and service.scores:
            task = service.draw(Split.TRAIN, 0)
            (reward,) = await service.score(task, [task.answer or ""])
            if reward.status is not RewardStatus.SCORED:
                raise ConfigError(f"tasks.{service.name}: expected a score of one row, got {reward.evidence}")
