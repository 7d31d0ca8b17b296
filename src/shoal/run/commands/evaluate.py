"""`shoal eval` measures a model's held-out accuracy, without training."""

from shoal.config import QUESTIONS, Config
from shoal.rollout.evaluation import evaluation, held_out_tasks
from shoal.run.blocking import run_blocking
from shoal.run.parts import answering
from shoal.run.prepare import Prepared, prepare_answering


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
