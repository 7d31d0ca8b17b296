"""Held-out questions: mean reward and share of full marks, sampled as in training and greedy."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from statistics import fmean

from shoal.interfaces import Environment, Purpose, Runner
from shoal.rollout.first_failures import FirstFailures
from shoal.types import RewardStatus, Role, Rollout, Split, Task

CORRECT = 1.0 - 1e-9
"""Smallest full reward; reasoning-gym gives partial credit for near misses."""
_SCORED = RewardStatus.SCORED


SHOWN = 3
"""Questions whose sampled answers are shown, the same at each evaluation."""
MOST_CHARACTERS = 2000
"""Characters of a question, a truth or an answer that are shown."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Scores of equal questions, answered twice, without the answers that no scorer judged."""

    values: Mapping[str, float]
    """Values by the names of `observe.names.EVAL_NAMES`; nan where no answer was scored."""
    failure: str
    """The most common reason of unscored answers; empty when all were scored."""
    rollouts: Sequence[tuple[Task, Purpose, tuple[Rollout, ...]]] = ()
    """All rollouts by question, first those sampled as in training, then the greedy ones."""

    @property
    def versions(self) -> Mapping[str, int]:
        """The Versions of the oldest and the newest sampled token; none without tokens."""
        rollouts = [rollout for *_, of_task in self.rollouts for rollout in of_task]
        drawn = [turn.completion.versions for rollout in rollouts for turn in rollout.turns if turn.completion.versions]
        if not drawn:
            return {}
        return {"version_oldest": min(one[0] for one in drawn), "version_newest": max(one[-1] for one in drawn)}

    @property
    def answers(self) -> Sequence[Mapping[str, float | str | None]]:
        """Sampled answers to a few questions, the first to each, by the names of `observe.names.ANSWER_NAMES`."""
        sampled = [(task, rollouts[0]) for task, purpose, rollouts in self.rollouts if purpose is Purpose.SAMPLED]
        chosen = shown_questions([task for task, _ in sampled])
        return [_shown(number, *sampled[index]) for number, index in enumerate(chosen)]


def held_out_tasks(service: Environment, questions: int) -> tuple[list[Task], str]:
    """The first distinct held-out tasks, and a sentence where twice as many draws give fewer than asked."""
    distinct: dict[tuple[object, ...], Task] = {}
    for index in range(2 * questions):
        task = service.draw(Split.EVAL, index)
        distinct.setdefault(_asked(task), task)
        if len(distinct) == questions:
            return list(distinct.values()), ""
    found = list(distinct.values())
    return found, (
        f"eval.questions asks for {questions} held-out questions, of which {len(found)} are distinct; each is answered "
        "once. For more, raise tasks.eval_share of files or give more rows; for generators widen tasks.params"
    )


def _asked(task: Task) -> tuple[object, ...]:
    """All that makes a task another one. Only without a truth do its info and its seed, which may hold a game's state.

    Rows that repeat a question have other numbers and names in their info.
    """
    return task.service, task.messages, task.answer, *((task.info, task.receipt) if task.answer is None else ())


async def evaluation(tasks: Sequence[Task], runner: Runner, samples: int = 1, *, first: bool = False) -> Evaluation:
    """Runs `samples` rollouts of each task sampled as in training, then one greedy.

    The `first` evaluation of a run raises `TaskError` when its first questions all fail for one reason.
    """
    failures = FirstFailures("held-out questions") if first else None

    async def rollouts_of(task: Task, n: int, purpose: Purpose) -> tuple[Rollout, ...]:
        place = failures.started() if failures is not None else 0
        rollouts = await runner.rollouts(task, n, purpose)
        if failures is not None:
            failures.ended(place, rollouts)
        return rollouts

    values: dict[str, float] = {}
    unscored: Counter[str] = Counter()
    every_rollout: list[tuple[Task, Purpose, tuple[Rollout, ...]]] = []
    for name, purpose, n in (("sampled", Purpose.SAMPLED, samples), ("greedy", Purpose.GREEDY, 1)):
        marks: dict[str, list[float]] = defaultdict(list)
        best: list[float] = []
        try:
            async with asyncio.TaskGroup() as group:
                answering = [group.create_task(rollouts_of(task, n, purpose)) for task in tasks]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        for task, rollouts in zip(tasks, (one.result() for one in answering), strict=True):
            own = [rollout.reward.value for rollout in rollouts if rollout.reward.status is _SCORED]
            marks[task.service] += own
            best += [max(own)] if own else []
            unscored.update(one.reason or one.reward.evidence for one in rollouts if one.reward.status is not _SCORED)
            every_rollout.append((task, purpose, rollouts))
        every = [mark for own in marks.values() for mark in own]
        values |= {name: _full_marks(every), f"{name}_reward": fmean(every) if every else nan}
        values |= {f"{name}/{task}": _full_marks(own) for task, own in marks.items()}
        if n > 1:
            values["pass_at_k"] = _full_marks(best)
    values |= {"questions": len(tasks), "unscored": unscored.total()}
    return Evaluation(values, next((reason for reason, _ in unscored.most_common(1)), ""), every_rollout)


def shown_questions(tasks: Sequence[Task]) -> list[int]:
    """Indices of the questions whose answers are shown: the first question of each service, then the second of each."""
    drawn: Counter[str] = Counter()
    ranks = []
    for index, task in enumerate(tasks):
        ranks.append((drawn[task.service], index))
        drawn[task.service] += 1
    return [index for _, index in sorted(ranks)[:SHOWN]]


def _shown(number: int, task: Task, rollout: Rollout) -> Mapping[str, float | str | None]:
    question = next((one.content for one in reversed(task.messages) if one.role is Role.USER), "")
    answer = next((one.content for one in reversed(rollout.messages) if one.role is Role.ASSISTANT), "")
    scored = rollout.reward.status is RewardStatus.SCORED
    return {
        "number": number,
        "task": task.service,
        "question": question[:MOST_CHARACTERS],
        "truth": None if task.answer is None else task.answer[:MOST_CHARACTERS],
        "answer": answer[:MOST_CHARACTERS],
        "reward": rollout.reward.value if scored else None,
        "reason": "" if scored else rollout.reason or rollout.reward.evidence,
    }


def _full_marks(marks: Sequence[float]) -> float:
    """Share of the full marks; nan without marks."""
    return fmean(mark >= CORRECT for mark in marks) if marks else nan
