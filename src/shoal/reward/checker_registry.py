"""The checkers that a worker process runs, prepared for one task. Pure, but some texts make them run for ever."""

from collections.abc import Callable

from shoal import checker
from shoal.checker import Spec
from shoal.errors import TaskError
from shoal.patterns import compiled
from shoal.reward import checkers
from shoal.reward.mathematics import mathematics
from shoal.reward.schema import complaint_of, json_in

Judging = Callable[[str], tuple[float, str]]
"""An answer's value, and the evidence for it."""


def judge_of(spec: Spec, truth: str | None) -> Judging:
    """The function that judges the answers to a task. Raises `TaskError` for a truth that the checker cannot use."""
    if truth is None and checker.needs_truth(spec):
        raise TaskError(f"expected a task with an answer, which {spec.__struct_config__.tag} compares with")
    judge = _judging(spec, truth or "")
    if truth is not None and checker.needs_truth(spec):
        try:
            judge(truth)
        except ValueError as error:
            raise TaskError(str(error)) from None
    return judge


def _judging(spec: Spec, truth: str) -> Judging:
    match spec:
        case checker.Exact():
            fold = str.casefold if spec.ignore_case else str
            return lambda answer: (checkers.exact(fold(answer), fold(truth)), "")
        case checker.Contains():
            return lambda answer: (checkers.contains(answer, truth), "")
        case checker.Number():
            return lambda answer: (checkers.number(answer, truth), "")
        case checker.Math():
            return lambda answer: mathematics(answer, truth, spec.tolerance)
        case checker.Regex():
            return _regex(spec, truth)
        case checker.JsonSchema():
            return _json_schema(spec, truth)
        case checker.Format():
            return lambda answer: checkers.formatted(answer, spec.tags)
        case checker.Language():
            return lambda answer: (checkers.script_share(answer, spec.script), "")
        case checker.Length():
            return lambda answer: _length(spec, answer)
        case _:
            raise TaskError(f"{spec.__struct_config__.tag} is not checked by a worker process")


def _length(spec: checker.Length, answer: str) -> tuple[float, str]:
    count = len(answer.split()) if spec.unit == "words" else len(answer)
    return checkers.length_share(count, spec.at_most, spec.over, spec.at_least), f"{count} {spec.unit}"


def _regex(spec: checker.Regex, truth: str) -> Judging:
    try:
        pattern = compiled(spec.pattern or truth)
    except ValueError as error:
        raise TaskError(str(error)) from None
    match = pattern.fullmatch if spec.match == "full" else pattern.search
    return lambda answer: (float(match(answer.strip()) is not None), "")


def _json_schema(spec: checker.JsonSchema, truth: str) -> Judging:
    try:
        complaint = complaint_of(spec.schema)
        differs = complaint_of({"const": json_in(truth)} if truth else True)
    except ValueError as error:
        raise TaskError(str(error)) from None

    def judge(answer: str) -> tuple[float, str]:
        try:
            value = json_in(answer)
        except ValueError as error:
            return 0.0, f"no JSON: {error}"
        why = complaint(value) or (differs(value) and "another value than the truth")
        return float(not why), why

    return judge
