"""A task's fixed set of questions: how hard each is now, and who is asked next. Pure, and a function of the log.

Each question has a Beta posterior of its chance of a right answer: Jeffreys' prior and its own answers. An answer
weighs half as much after as many groups of the task as there are questions, because the model changes. Groups are
counted in the order of their commits, so that a resumed run computes the same bits from its log.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from shoal.tasks.holdout import order_of
from shoal.types import Group, Task, seed_for

PRIOR = 0.5
"""Right and wrong answers that each question begins with."""
MEMORY = 4
"""Groups per question of the task, after which an answer counts nothing; it weighs a sixteenth by then."""
CANDIDATES = 8
"""Number of questions that are compared for each group."""
IN_TURN = 8
"""One of so many groups asks the question whose turn it is, so that none starves."""
EASY, HARD = 0.9, 0.1
"""Chances of a right answer from which on a question counts as easy, and as hard."""


@dataclass(frozen=True, slots=True)
class _Answers:
    """The answers of one group, the `at`-th of its task."""

    at: int
    right: float
    wrong: float


def differing(right: float, wrong: float, n: int) -> float:
    """Expected chance that `n` answers are not all right or all wrong, if the chance of one is Beta(right, wrong).

    It is the chance that the group has a gradient: with baselines within groups equal rewards have none.

    >>> differing(1.0, 1.0, 2)  # the mean of 2p(1 - p) over p in 0..1
    0.3333333333333334
    """
    all_right = all_wrong = 1.0
    for i in range(n):
        all_right *= (right + i) / (right + wrong + i)
        all_wrong *= (wrong + i) / (right + wrong + i)
    return 1 - all_right - all_wrong


class QuestionPool:
    """Chooses the question of each group of a task by what its answers are expected to tell.

    `CANDIDATES` questions are compared, in a random order that changes each epoch, and the one is asked whose rewards
    will most likely differ; so no few questions are asked over and over. Invariants: a question is asked twice at once
    only when all are running; each is asked once in `IN_TURN * len(tasks)` groups at least.
    """

    def __init__(self, tasks: Sequence[Task], group_size: int, seed: int) -> None:
        """`tasks` are all training questions of one task service."""
        self._tasks, self._size, self._seed = tasks, group_size, seed
        self._numbers = {task.id: number for number, task in enumerate(tasks)}
        self._answers: list[deque[_Answers]] = [deque() for _ in tasks]
        self._running = Counter[int]()
        self._groups = 0

    @property
    def memory(self) -> int:
        """Number of the task's newest groups that the posteriors depend on."""
        return MEMORY * len(self._tasks)

    def answered(self, group: Group) -> None:
        """Notes a usable group of the task, in the order of the log."""
        self._groups += 1
        number = self._number(group.task)
        if number is None or not group.finished:
            return  # another file's question
        right = sum(min(max(one.reward.value, 0.0), 1.0) for one in group.finished)
        answers = self._answers[number]
        answers.append(_Answers(self._groups, right, len(group.finished) - right))
        while answers[0].at <= self._groups - self.memory:
            answers.popleft()

    def posterior(self, number: int) -> tuple[float, float]:
        """Parameters of a question's Beta posterior: right and wrong answers, weighed by age, with the prior."""
        right = wrong = PRIOR
        for one in self._answers[number]:
            age = self._groups - one.at
            if age < self.memory:
                weight = 0.5 ** (age / len(self._tasks))
                right += weight * one.right
                wrong += weight * one.wrong
        return right, wrong

    def draw(self, index: int) -> Task:
        """The task of the group at `index`, whose id no other group has; `ended` must follow."""
        number = self._chosen(index)
        task = replace(self._tasks[number], id=f"{self._tasks[number].id}/{index}")
        self.began(task)
        return task

    def began(self, task: Task) -> None:
        """Notes that a group of a question runs; `ended` must follow."""
        if (number := self._number(task)) is not None:
            self._running[number] += 1

    def ended(self, task: Task) -> None:
        """Notes that the group of a task is over, usable or not."""
        if (number := self._number(task)) is not None:
            self._running[number] -= 1

    def counts(self) -> dict[str, int]:
        """Number of questions that are easy, hard, in between, and unknown: not answered in the pool's memory."""
        found = Counter({"open": 0, "easy": 0, "hard": 0, "unknown": 0})
        for number in range(len(self._tasks)):
            right, wrong = self.posterior(number)
            chance = right / (right + wrong)
            known = "easy" if chance >= EASY else "hard" if chance <= HARD else "open"
            found[known if right + wrong > 2 * PRIOR else "unknown"] += 1
        return dict(found)

    def _number(self, task: Task) -> int | None:
        """Place of a task's question; None for that of another file, which may have the same number there."""
        number = self._numbers.get(task.id.rpartition("/")[0])
        own = None if number is None else self._tasks[number]
        return number if own and (own.messages, own.answer) == (task.messages, task.answer) else None

    def _chosen(self, index: int) -> int:
        """The question whose turn it is, or the most promising of the next candidates."""
        count = len(self._tasks)
        turn = order_of(self._seed, count)[index // IN_TURN % count]
        if index % IN_TURN == 0 and not self._running[turn]:
            return turn
        free = (number for number in self._from(index) if not self._running[number])
        compared = list(islice(free, CANDIDATES)) or [turn]
        return max(compared, key=lambda number: differing(*self.posterior(number), self._size))

    def _from(self, index: int) -> Iterator[int]:
        """All questions, some twice, beginning with those whose turn it is to be compared at `index`."""
        count = len(self._tasks)
        for place in range(index * CANDIDATES, index * CANDIDATES + 2 * count):  # has a whole epoch, wherever it begins
            epoch, position = divmod(place, count)
            yield order_of(seed_for("candidates", self._seed, epoch), count)[position]
