"""Comparison of two models on the same questions, with bounds that hold whenever one looks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from shoal.confidence import MeanBounds
from shoal.experience.held_out import HeldOutAnswer, answer_files, answers_file, read_answers
from shoal.rollout.evaluation import CORRECT
from shoal.types import RewardStatus

ERROR = 0.05
"""Probability that the overall bounds are ever wrong, and that any of the other rows ever is."""
SAMPLED, GREEDY, PASS = "sampled", "greedy", "pass_at_k"


@dataclass(slots=True)
class Measure:
    """Accuracy of two models by one measure: share of questions with full marks."""

    bounds: MeanBounds
    """Bounds of the difference, second less first."""
    first: float = 0.0
    second: float = 0.0

    def add(self, first: float, second: float) -> None:
        """Takes one question's accuracies, 0..1."""
        self.bounds.add(second - first)
        self.first += (first - self.first) / self.bounds.count
        self.second += (second - self.second) / self.bounds.count

    @property
    def values(self) -> dict[str, object]:
        """JSON values by name; the bounds are those of the difference."""
        low, high = self.bounds.low, self.bounds.high
        return {"questions": self.bounds.count, "first": self.first, "second": self.second, "low": low, "high": high}


class Comparison:
    """Accuracies of a first and a second model by question, sampled overall, and in parts.

    The parts are greedy answers, pass@k, and each task; their bounds hold together. Questions must come in an order
    that does not depend on the answers.
    """

    def __init__(self, tasks: Sequence[str], samples: int) -> None:
        """`samples` is the number of sampled answers to a question."""
        parts = [GREEDY, *([PASS] if samples > 1 else []), *(tasks if len(tasks) > 1 else [])]
        self.samples = samples
        self.overall = Measure(MeanBounds(ERROR))
        self.parts = {name: Measure(MeanBounds(ERROR / len(parts))) for name in parts}
        self.unjudged = 0
        """Questions left out because a scorer judged no answer of one model."""

    def add(self, first: Sequence[HeldOutAnswer], second: Sequence[HeldOutAnswer]) -> None:
        """Takes both models' answers to one question."""
        marks = [{purpose: _marks(answers, purpose) for purpose in (SAMPLED, GREEDY)} for answers in (first, second)]
        if not all(all(own.values()) for own in marks):
            self.unjudged += 1
            return
        sampled, k = [fmean(own[SAMPLED]) for own in marks], min(self.samples, *(len(own[SAMPLED]) for own in marks))
        self.overall.add(*sampled)
        pairs = {
            GREEDY: [fmean(own[GREEDY]) for own in marks],
            PASS: [max(own[SAMPLED][:k]) for own in marks],
            first[0].task: sampled,
        }
        for name in pairs.keys() & self.parts.keys():
            self.parts[name].add(*pairs[name])

    @property
    def decided(self) -> bool:
        """Whether one model is surely better, by at least half of what was seen."""
        bounds = self.overall.bounds
        return bounds.low > max(0.0, bounds.mean / 2) or bounds.high < min(0.0, bounds.mean / 2)

    @property
    def values(self) -> dict[str, object]:
        """JSON values by name."""
        parts = {name: row.values for name, row in self.parts.items()}
        return {"sampled": self.overall.values, **parts, "unjudged": self.unjudged}

    def sentence(self, first: str = "the start") -> str:
        """Says what is certain about the second model, and whether it has a new skill or only samples better."""
        bounds = self.overall.bounds
        sure = f"(anytime-valid, {1 - ERROR:.0%}; {bounds.count} questions)"
        if bounds.low > 0:
            skill = [name for name, row in self.parts.items() if name in (GREEDY, PASS) and row.bounds.low > 0]
            low = min(self.parts[name].bounds.low for name in skill) if skill else 0.0
            kind = (
                f"a new skill: {' and '.join(map(_spoken, skill))} better, too, by at least {_points(low)}"
                if skill
                else "greedy answers are not surely better, so it may only sample more of what it could do"
            )
            return f"better than {first} by at least {_points(bounds.low)} on fresh questions {sure}; {kind}"
        if bounds.high < 0:
            return f"worse than {first} by at least {_points(-bounds.high)} on fresh questions {sure}"
        between = f"between {100 * bounds.low:+.1f} and {100 * bounds.high:+.1f} points"
        return f"not surely better or worse than {first}: {between} on fresh questions {sure}"


def compared(first: Iterable[HeldOutAnswer], second: Iterable[HeldOutAnswer]) -> Comparison | None:
    """Compares two evaluations on the questions that both have; None when they share none."""
    before, after = _by_question(first), _by_question(second)
    shared = [question for question in before if question in after]
    if not shared:
        return None
    tasks = sorted({before[question][0].task for question in shared})
    samples = min(sum(one.purpose == SAMPLED for one in after[question]) for question in shared)
    comparison = Comparison(tasks, samples)
    for question in shared:
        comparison.add(before[question], after[question])
    return comparison


def certified(run_dir: Path) -> Comparison | None:
    """Compares a run's last evaluation with the one before its first step; None without both. Raises `RunDirError`."""
    files = answer_files(run_dir)
    if len(files) < 2 or files[0].name != answers_file(run_dir, 0).name:
        return None
    return compared(read_answers(files[0]), read_answers(files[-1]))


def _by_question(answers: Iterable[HeldOutAnswer]) -> Mapping[tuple[str, str], list[HeldOutAnswer]]:
    found: dict[tuple[str, str], list[HeldOutAnswer]] = {}
    for answer in answers:
        found.setdefault((answer.question_id, answer.question), []).append(answer)
    return found


def _marks(answers: Sequence[HeldOutAnswer], purpose: str) -> list[float]:
    """1 for full marks and 0 otherwise, of each judged answer."""
    own = (one for one in answers if one.purpose == purpose and one.reward.status is RewardStatus.SCORED)
    return [float(one.reward.value >= CORRECT) for one in own]


def _points(share: float) -> str:
    return f"{100 * share:.1f} points"


def _spoken(name: str) -> str:
    return "greedy answers are" if name == GREEDY else "pass@k is"
