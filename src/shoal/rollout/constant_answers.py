"""Constant answers that a dataset pays: training on it teaches the model to repeat one of them."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

from shoal.interfaces import Scorer
from shoal.types import RewardStatus, Task

CONSTANTS = ("", "0", "1", "I have no idea", "(P ∨ Q)")
COMMON_TRUTHS = 3
"""Number of the commonest truths that are tried too."""
MOST_QUESTIONS, FEWEST_QUESTIONS = 32, 8
PAID = 0.65
"""Mean reward of a constant answer above which a dataset is named."""


async def paid_constants(tasks: Sequence[Task], scorer: Scorer) -> list[str]:
    """A sentence for each procedural dataset among `tasks` whose questions one answer solves.

    Questions of files and of programs are left out: their scorers may cost money or act.
    """
    drawn: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.receipt is not None and len(drawn[task.service]) < MOST_QUESTIONS:
            drawn[task.service].append(task)
    found = []
    for service, questions in drawn.items():
        if len(questions) < FEWEST_QUESTIONS:
            continue
        truths = Counter(task.answer for task in questions if task.answer is not None)
        answers = [*CONSTANTS, *(truth for truth, _ in truths.most_common(COMMON_TRUTHS))]
        rewards = [await scorer.score(task, answers) for task in questions]
        paid = {
            answer: fmean(one.value if one.status is RewardStatus.SCORED else 0.0 for one in column)
            for answer, column in zip(answers, zip(*rewards, strict=True), strict=True)
        }
        answer = max(paid, key=lambda one: paid[one])
        if paid[answer] > PAID:
            found.append(
                f"{service}: the answer {answer[:60]!r} gets a mean reward of {paid[answer]:.2f} on {len(questions)} "
                "questions; choose other params, or another dataset"
            )
    return found
