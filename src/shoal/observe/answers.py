"""Held-out questions with their sampled answers before and after training, for terminals and pages."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal.observe.metrics import Record, number
from shoal.observe.runs import RunRecords

LABEL_COLUMNS = 32
"""Columns of a line that its label and its reward take."""


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """One question, and its answers at the first and at the last evaluation."""

    question: str
    truth: str
    before: Record
    after: Record


def changes(run: RunRecords) -> list[AnswerChange]:
    """Questions answered at both the first and the last evaluation; empty before the second evaluation."""
    steps = [number(one, "step") for one in run.answers]
    if not steps or steps[0] == steps[-1]:
        return []
    first, last = (
        {number(one, "number"): one for one, step in zip(run.answers, steps, strict=True) if step == end}
        for end in (steps[0], steps[-1])
    )
    both = [n for n in first if n in last]
    return [AnswerChange(str(first[n]["question"]), str(first[n]["truth"] or ""), first[n], last[n]) for n in both]


def change_lines(run: RunRecords, width: int) -> Iterator[str]:
    """Lines of at most `width` columns that show each question with its two answers; none before training."""
    for one in changes(run):
        right = f"  right: {quoted(one.truth, width // 2 - 8)}" if one.truth else ""
        yield quoted(one.question, width - len(right)) + right
        for label, record in (("before", one.before), ("after", one.after)):
            yield f"  {label:<6}  {quoted(str(record['answer']), max(8, width - LABEL_COLUMNS))}  {reward_text(record)}"


def quoted(text: str, most: int) -> str:
    """Quotes text on one line of at most `most` characters, without control characters.

    >>> quoted("a\\nlong text", 10)
    "'a\\\\nlo...'"
    """
    shown = repr(text)
    return shown if len(shown) <= most else f"{shown[: max(1, most - 4)]}...{shown[0]}"


def reward_text(record: Record) -> str:
    """Formats the reward of an answer, or the reason why it was not scored."""
    value = record.get("reward")
    return (
        f"reward {value:.3g}" if isinstance(value, int | float) else f"not scored: {repr(record.get('reason'))[1:-1]}"
    )
