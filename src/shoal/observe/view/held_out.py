"""Held-out questions across time: their rewards at each evaluation, and their answers then.

At most `MOST_EVALUATIONS` evaluations of a run are read, including the first and the newest.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from shoal.experience.held_out import HeldOutAnswer, answer_files, read_answers
from shoal.observe.view.reading import glance
from shoal.types import RewardStatus, Role

MOST_EVALUATIONS = 24
PER_PAGE = 50


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Query: which questions, in which order."""

    run: str = ""
    text: str = ""
    sort: Literal["worse", "better", "lowest", "asked", "behind"] = "worse"
    other: str = ""
    """Another run whose last rewards are shown, too."""
    page: int = 1


@dataclass(frozen=True, slots=True)
class HeldOutQuestion:
    """One question with its mean sampled reward at each evaluation; None where no answer was scored."""

    id: str
    task: str
    text: str
    rewards: Sequence[float | None]
    other: float | None = None
    """The last reward of another run."""

    @property
    def lead(self) -> float:
        """The last reward less that of the other run; 0 where one is missing."""
        return 0.0 if self.other is None or self.rewards[-1] is None else self.rewards[-1] - self.other

    @property
    def change(self) -> float:
        """The last known reward less the first; 0 without two."""
        known = [reward for reward in self.rewards if reward is not None]
        return known[-1] - known[0] if known else 0.0

    @property
    def last(self) -> float:
        """The last known reward; 0 without any."""
        return next((reward for reward in reversed(self.rewards) if reward is not None), 0.0)


def spaced(files: Sequence[Path]) -> list[Path]:
    """At most `MOST_EVALUATIONS` of the files, evenly, with the first and the last.

    >>> [int(path.name) for path in spaced([Path(str(i)) for i in range(47)])][:3]
    [0, 2, 4]
    """
    last, parts = len(files) - 1, MOST_EVALUATIONS - 1
    return list(files) if last < parts else [files[round(i * last / parts)] for i in range(parts + 1)]


def questions(
    run_dir: Path, wanted: Questions, other: Path | None = None
) -> tuple[list[int], list[HeldOutQuestion], int]:
    """Steps of the evaluations, one page of questions, and the number of pages. Raises `RunDirError`."""
    files = spaced(answer_files(run_dir))
    scores = [_scores(file, file.stat().st_mtime_ns) for file in files]
    others = {} if other is None else _last_rewards(other)
    texts = {name: known for one in scores for name, known in one.texts.items()}
    found = [
        HeldOutQuestion(name, task, text, [one.rewards.get(name) for one in scores], others.get(name))
        for name, (task, text) in texts.items()
        if wanted.text.lower() in text.lower()
    ]
    orders = {
        "worse": lambda one: one.change,
        "better": lambda one: -one.change,
        "lowest": lambda one: one.last,
        "behind": lambda one: one.lead,
    }
    if wanted.sort in orders:
        found.sort(key=orders[wanted.sort])
    first = (max(1, wanted.page) - 1) * PER_PAGE
    return [one.step for one in scores], found[first : first + PER_PAGE], -(-len(found) // PER_PAGE)


def _last_rewards(run_dir: Path) -> dict[str, float | None]:
    newest = answer_files(run_dir)[-1:]
    return _scores(newest[0], newest[0].stat().st_mtime_ns).rewards if newest else {}


def answers(run_dir: Path, question_id: str) -> list[HeldOutAnswer]:
    """All answers to a question, newest first. Raises `RunDirError`."""
    files = reversed(spaced(answer_files(run_dir)))
    return [answer for file in files for answer in read_answers(file) if answer.question_id == question_id]


@dataclass(frozen=True, slots=True)
class _Scores:
    step: int
    rewards: dict[str, float | None]
    texts: dict[str, tuple[str, str]]
    """Task and beginning of each question."""


@lru_cache(maxsize=8 * MOST_EVALUATIONS)
def _scores(file: Path, _modified_ns: int) -> _Scores:
    rewards: dict[str, list[float]] = defaultdict(list)
    texts: dict[str, tuple[str, str]] = {}
    for answer in read_answers(file):
        asked = reversed(answer.messages[: answer.asked])
        question = next((one.content for one in asked if one.role is Role.USER), "")
        texts[answer.question_id] = (answer.task, glance(question))
        if answer.purpose == "sampled" and answer.reward.status is RewardStatus.SCORED:
            rewards[answer.question_id].append(answer.reward.value)
    means = {name: fmean(rewards[name]) if name in rewards else None for name in texts}
    return _Scores(int(file.name.partition(".")[0]), means, texts)
