"""A process that scores by text and truth: `python -m shoal.reward.worker --fd N`. It may be killed at any moment.

Each judgement is bounded in processor time: a bound on wall time would fail right answers on a busy machine. A
judgement may ignore the signal, for instance in one long multiplication in C. The kernel then kills its process a
second or two later.
"""

import _signal  # type: ignore[import-not-found]  # its `signal` takes a tenth of the time, once for each answer
import math
import resource
import signal
import time
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence

from shoal import checker, wire
from shoal.checker import Spec, compiled
from shoal.errors import TaskError
from shoal.net.process import from_parent, send_frame, serve
from shoal.reward.mathematics import last_number, mathematics
from shoal.reward.messages import Batch, exhausted
from shoal.reward.reasoning import scorer_of
from shoal.reward.schema import complaint_of, json_in
from shoal.sandbox.confinement import confine
from shoal.types import UNREAD, Reward, RewardStatus

AGAIN_S = 0.1
"""Seconds until the next signal: some scorers catch every exception."""

Judging = Callable[[str], tuple[float, str]]
"""An answer's value, and the evidence for it."""


class OutOfTime(BaseException):
    """Raised in the middle of a judgement; no `except Exception` of a library catches it."""


def _limited_clock() -> int:
    """Clock that RLIMIT_CPU and ITIMER_PROF follow.

    Linux counts the ticks of a process, which are seconds off the exact clock after minutes. Source: posix-timers.h,
    where process 0, this one, has the clock (~0 << 3) | CPUCLOCK_PROF. Other kernels count exactly.
    """
    ticks = -8
    try:
        time.clock_gettime(ticks)
    except OSError:
        return time.CLOCK_PROCESS_CPUTIME_ID
    return ticks


LIMITED_CLOCK = _limited_clock()


def within(cpu_s: float, judge: Judging, answer: str) -> tuple[float, str]:
    """Runs a judgement. Raises `OutOfTime` when it takes more processor time, and any error of `judge`."""
    armed = True

    def stop(*_: object) -> None:
        if armed:
            raise OutOfTime

    _, hardest = resource.getrlimit(resource.RLIMIT_CPU)
    _signal.signal(signal.SIGPROF, stop)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.clock_gettime(LIMITED_CLOCK) + cpu_s) + 1, hardest))
    signal.setitimer(signal.ITIMER_PROF, cpu_s, AGAIN_S)
    try:
        return judge(answer)
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (hardest, hardest))


def judge_of(spec: Spec, truth: str | None) -> Judging:
    """The function that judges the answers to a task. Raises `TaskError` for a truth that the checker cannot use."""
    if truth is None and checker.needs_truth(spec):
        raise TaskError(f"expected a task with an answer, which {spec.__struct_config__.tag} compares with")
    try:
        judge = _judging(spec, truth or "")
        if truth is not None and checker.needs_truth(spec):
            judge(truth)
    except ValueError as error:
        raise TaskError(str(error)) from None
    return judge


def _judging(spec: Spec, truth: str) -> Judging:
    """The function of a checker. It and its first call raise `ValueError` for what cannot be used."""
    match spec:
        case checker.Exact():
            fold = str.casefold if spec.ignore_case else str
            return lambda answer: (float(fold(answer).strip() == fold(truth).strip()), "")
        case checker.Contains():
            return lambda answer: (float(truth.strip() in answer), "")
        case checker.Number():
            return lambda answer: number(answer, truth)
        case checker.Math():
            return lambda answer: mathematics(answer, truth, spec.tolerance)
        case checker.Regex():
            pattern = compiled(spec.pattern or truth)
            match = pattern.fullmatch if spec.match == "full" else pattern.search
            return lambda answer: (float(match(answer.strip()) is not None), "")
        case checker.JsonSchema():
            return _json_schema(spec, truth)
        case checker.Format():
            return lambda answer: formatted(answer, spec.tags)
        case checker.Language():
            return lambda answer: (script_share(answer, spec.script), "")
        case checker.Length():
            return lambda answer: length_share(len(answer.split() if spec.unit == "words" else answer), spec)
        case _:
            raise ValueError(f"{spec.__struct_config__.tag} is not checked by a worker process")


def _json_schema(spec: checker.JsonSchema, truth: str) -> Judging:
    complaint = complaint_of(spec.schema)
    differs = complaint_of({"const": json_in(truth)} if truth else True)

    def judge(answer: str) -> tuple[float, str]:
        try:
            value = json_in(answer)
        except ValueError as error:
            return 0.0, f"{UNREAD}no JSON: {error}"
        why = complaint(value) or (differs(value) and "another value than the truth")
        return float(not why), why

    return judge


def number(answer: str, truth: str) -> tuple[float, str]:
    """1.0 if the answer's last number equals the truth's, exactly: 0.1 is one tenth and 1/3 is a third.

    Raises `ValueError` when the truth holds no number.

    >>> number("3 + 4 makes 1,007.50", "2015/2"), number("0.3333", "1/3"), number("seven", "7")
    ((1.0, ''), (0.0, ''), (0.0, 'the scorer could not read it: no number'))
    """
    expected = last_number(truth)
    if expected is None:
        raise ValueError(f"expected a number as the task's answer, got {truth!r}")
    found = last_number(answer)
    return (0.0, f"{UNREAD}no number") if found is None else (float(found == expected), "")


def formatted(answer: str, tags: Sequence[str]) -> tuple[float, str]:
    """1.0 if the answer is these tags in order, each once and not empty, with only space around them.

    >>> formatted("<think>2+2</think>\\n<answer>4</answer>", ["think", "answer"])
    (1.0, '')
    >>> formatted("<answer>4</answer> so there", ["answer"])
    (0.0, 'the scorer could not read it: text outside of the tags')
    """
    rest = answer
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if answer.count(opening) != 1 or answer.count(closing) != 1:
            return 0.0, f"{UNREAD}expected {opening} and {closing} once each"
        before, _, rest = rest.partition(opening)
        inside, closed, rest = rest.partition(closing)
        if before.strip() or not closed:
            return 0.0, f"{UNREAD}text outside of the tags"
        if not inside.strip():
            return 0.0, f"{UNREAD}{opening} is empty"
    return (0.0, f"{UNREAD}text outside of the tags") if rest.strip() else (1.0, "")


def length_share(count: int, spec: checker.Length) -> tuple[float, str]:
    """1 up to `at_most`, falling to 0 over the next `over`; 0 below `at_least`.

    >>> [length_share(count, checker.Length(at_most=10, over=4, at_least=2))[0] for count in (1, 2, 10, 11, 14, 99)]
    [0.0, 1.0, 1.0, 0.75, 0.0, 0.0]
    """
    excess = max(count - spec.at_most, 0)
    share = max(0.0, 1.0 - excess / spec.over) if spec.over else float(not excess)
    return share if count >= spec.at_least else 0.0, f"{count} {spec.unit}"


SCRIPTS: Mapping[str, tuple[str, ...]] = {"han": ("CJK",), "kana": ("HIRAGANA", "KATAKANA")}
"""Prefixes of the Unicode names of a script's letters, where they are not the script's own name."""


def script_share(answer: str, script: str) -> float:
    """The share of the letters that belong to a script; 1 without letters.

    >>> script_share("It is \u6c34.", "latin"), script_share("42", "han")
    (0.8, 1.0)
    """
    letters = [character for character in answer if character.isalpha()]
    prefixes = SCRIPTS.get(script, (script.upper(),))
    own = sum(unicodedata.name(letter, "").startswith(prefixes) for letter in letters)
    return own / len(letters) if letters else 1.0


def prepared(batch: Batch) -> Judging:
    """The function that gives an answer's value and evidence. Raises `TaskError` when the task cannot be scored."""
    if not isinstance(batch.spec, checker.ReasoningGym):
        return judge_of(batch.spec, batch.task.answer)
    if batch.task.receipt is None:
        raise TaskError("expected a task with a receipt: reasoning_gym scores its own questions only")
    return scorer_of(batch.task.receipt, batch.task.answer)


def reward_of(judge: Judging, answer: str, cpu_s: float) -> Reward:
    """One answer's reward. A scorer's error makes the answer wrong, because the task was prepared without error."""
    try:
        value, evidence = within(cpu_s, judge, answer)
    except OutOfTime:
        return exhausted(cpu_s)
    except Exception as error:  # an odd answer may raise anything in a scorer
        return Reward(0.0, evidence=wire.sendable(f"{UNREAD}{type(error).__name__}: {error}"[:500]))
    if not math.isfinite(value):
        return Reward(0.0, RewardStatus.FAILED, evidence=f"the scorer answered {value}")
    return Reward(value, evidence=wire.sendable(evidence))


def replies(frame: bytes) -> Iterator[bytes]:
    """The fault of a batch's task, or "" and the reward of each answer."""
    batch = wire.decode(frame, Batch)
    try:
        judge = prepared(batch)
    except TaskError as error:
        yield wire.encode(str(error))
        return
    yield wire.encode("")
    for answer in batch.answers:
        yield wire.encode(reward_of(judge, answer, batch.cpu_s))


def main() -> None:
    """Entry point of the process."""
    connection, arguments = from_parent()
    confine(boxed="--boxed" in arguments)
    send_frame(connection, b"")
    serve(connection, replies)


if __name__ == "__main__":
    main()
