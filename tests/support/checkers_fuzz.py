"""What reading hostile text costs: `python tests/support/checkers_fuzz.py 20000` [SEED].

Texts are made of the readers' own alphabets. The processor time of a text and of one twice as long are compared, so
that the machine's speed says nothing: a reader that is linear takes twice as long, a quadratic one four times.
"""

import contextlib
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from shoal import checker
from shoal.checker import spec_of
from shoal.errors import EngineError
from shoal.model.answer import boxed, final_line, harmony
from shoal.model.tool_calls import CallFormat, split_calls
from shoal.reward.code import code_of
from shoal.reward.llm_judge import score_in
from shoal.reward.mathematics import final_answer, mathematics, rational, shown
from shoal.reward.reasoning import is_expression
from shoal.reward.service import judged_part
from shoal.reward.worker import OutOfTime, judge_of, within
from shoal.types import Json

SIZES = (30, 90, 4_000)
"""Characters of the shorter text: some readers refuse what is long, and hang on what is short."""
STOPPED_S = 2.0
FLOOR_S = 0.004
"""Of processor time; nothing is said of a text that takes less."""
MOST_GROWTH = 3.0
TRIES = 4
BOUND_S, SLACK_S = 1.0, 2.5
WORDS = ("wonder", "thinking", "because", "cm", "km/h", "degrees", "sin", "a", "x")


@dataclass(frozen=True)
class Reader:
    """Something that reads text of a model or a peer, and what its texts are made of."""

    name: str
    read: Callable[[str], object]
    atoms: Sequence[str]


def _judge(spec: Json, truth: str | None = None) -> Callable[[str], object]:
    return judge_of(spec_of(spec, "fuzz"), truth)


def _score(text: str) -> object:
    with contextlib.suppress(EngineError):
        return score_in(text, "ab", 10)
    return None


def _mathematics(text: str) -> object:
    return shown(final_answer(text)), rational(text), rational(final_answer(text))


def _answers(text: str) -> object:
    specs = (checker.Exact(), checker.Regex("a"), checker.LLMJudge("http://x", "m", "r"))
    return [*(judged_part(spec, "7", text) for spec in specs), harmony(text), final_line(text), boxed(text)]


def _calls(text: str) -> object:
    return [split_calls(text, form) for form in CallFormat]


_SCHEMA: Json = {
    "type": "array",
    "uniqueItems": True,
    "items": {"anyOf": [{"pattern": "^(a|aa|a*)+$"}, {"minimum": 3}]},
}
_LATEX = (
    "\\boxed{",
    "\\fbox {",
    "\\text{",
    "\\mathrm {",
    "{",
    "}",
    "\\frac",
    "\\frac12",
    "^",
    "\\circ",
    "\\left",
    "$",
    "\\,",
)
_NUMBERS = ("1", "12", "1,234", ".5", "1e3", "/", "-", "+", ",", "{,}", "%", "=", "x=")
_SAID = ("answer", "Answer is", "the final answer:", "####", "答案", "答案是", ":", "is", "\n", " ", "\t", ".")
_TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
)
_MARKS = ("<think>", "</think>", "<answer>", "</answer>", "<|channel|>", "final", "<|message|>", "<|end|>")
_JSON = ("[", "]", "{", "}", '"a"', '"aaaaaaa!"', ":", ",", "1", "{}", "```json\n", "```", "\n", " ", '{"a":1},', ";")
READERS = (
    Reader("mathematics", _mathematics, (*_LATEX, *_NUMBERS, *_SAID, *WORDS)),
    Reader("number", _judge("number", "3"), (*_NUMBERS, "e", "E+", "9", "0000", ")", " ")),
    Reader("format", _judge({"name": "format", "tags": ["think", "answer"]}), ("<think>", "</think>", "<answer>", "a")),
    Reader("language", _judge({"name": "language", "script": "han"}), ("水", "a", "\N{COMBINING ACUTE ACCENT}", " ")),
    Reader("words", _judge({"name": "length", "at_most": 9, "unit": "words"}), ("a", " ", "\n", "\u2003")),
    Reader(
        "regex", _judge({"name": "regex", "pattern": "(a+)+$|(?:x|xx)*y|^(.*,){9}z"}), ("a", "x", "y", ",", "!", "\n")
    ),
    Reader("json_schema", _judge({"name": "json_schema", "schema": _SCHEMA}), _JSON),
    Reader("expression", is_expression, ("1", "1.5", ".", "sin", "sinh", "x", "xx", "(", ")", "+", "^", " ", "_")),
    Reader("answers", _answers, (*_MARKS, "\\boxed{", "{", "}", "a", *_SAID)),
    Reader("code", code_of, ("```", "`", "python", "\n", "x = 1", " ")),
    Reader("score", _score, ("SCORE-ab:", "SCORE-", "*", "_", "`", " ", "7", "\n")),
    Reader("calls", _calls, (*_TAGS, "name", *_JSON)),
)


def texts(rng: random.Random, atoms: Sequence[str]) -> tuple[str, str]:
    """One text and one twice as long: something before, something again and again, something behind."""
    before, unit, behind = ("".join(rng.choices(atoms, k=rng.randint(least, 3))) for least in (0, 1, 0))
    count = max(2, rng.choice(SIZES) // len(unit))
    if rng.random() < 0.5:
        unit += rng.choice((" ", "\n", ""))
    return before + unit * count + behind, before + unit * (2 * count) + behind


def cost_s(read: Callable[[str], object], text: str) -> float:
    """Processor time of one reading. Raises `OutOfTime`."""

    def judged(given: str) -> tuple[float, str]:
        with contextlib.suppress(ValueError, RecursionError):  # a text that is refused is one that was read
            read(given)
        return 0.0, ""

    began_s = time.process_time()
    within(STOPPED_S, judged, text)
    return time.process_time() - began_s


def complaint(read: Callable[[str], object], one: str, twice: str) -> str:
    """Why a reader is not linear in a text; empty where it seems to be. Tried again: the clock has accidents."""
    growth = 0.0
    for _ in range(TRIES):
        try:
            short_s, long_s = cost_s(read, one), cost_s(read, twice)
        except OutOfTime:
            return f"more than {STOPPED_S:g} s of processor time"
        if long_s < FLOOR_S or (growth := long_s / max(short_s, 1e-5)) < MOST_GROWTH:
            return ""
    return f"{growth:.1f} times as long for a text of twice the length"


def findings(count: int, seed: int, readers: Sequence[Reader] = READERS) -> Iterator[str]:
    """Each text that a reader is not linear in. `count` texts are shared among the readers."""
    rng = random.Random(seed)
    for reader in itertools.islice(itertools.cycle(readers), count):
        one, twice = texts(rng, reader.atoms)
        if why := complaint(reader.read, one, twice):
            yield f"{reader.name}: {why}: {len(one)} characters, {one[:60]!r} ... {one[-20:]!r}"


def unbounded(count: int, seed: int) -> Iterator[str]:
    """Each text on which the whole `math` checker, math-verify and SymPy included, takes longer than its bound.

    A process each: what is deaf to signals is ended by the kernel, as a worker is.
    """
    rng = random.Random(seed)
    for _ in range(count):
        text = texts(rng, READERS[0].atoms)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
            child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):  # libraries raise what they like; the worker calls that wrong
                within(BOUND_S, lambda answer: mathematics(answer, "\\sqrt{2}"), text)
            os._exit(0)
        _, status, usage = os.wait4(child, 0)
        took_s = usage.ru_utime + usage.ru_stime
        if took_s > BOUND_S + SLACK_S or os.waitstatus_to_exitcode(status) not in (0, -signal.SIGXCPU):
            yield f"math took {took_s:.1f} s where {BOUND_S:g} are allowed: {text[:80]!r}"


def main(count: int, seed: int) -> int:
    """Says what was found, as one line of JSON at last."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own alarms are off
    began_s = time.process_time()
    found = 0
    for one in itertools.chain(findings(count, seed), unbounded(count // 50, seed)):
        found += 1
        print(one, flush=True)
    print(json.dumps({"texts": count, "seed": seed, "found": found, "cpu_s": round(time.process_time() - began_s, 1)}))
    return int(found > 0)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
