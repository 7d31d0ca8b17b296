"""The checker of a task, by name and with its own parameters.

In a configuration (`tasks.scorer`) or a row's `info.scorer` it is a name, `"math"`, or a table with the name and the
parameters, `{ name = "code", timeout_s = 2 }`. Pure; `shoal.reward` implements the checks.

RE2 matches the patterns of users and schemas, in time linear in the text. It has no lookaround and no
backreferences; its `\\d`, `\\w`, `\\s` and `\\b` match ASCII only.
"""

import json
import re
from collections.abc import Iterator
from typing import Annotated, Literal, Protocol, TypeAlias, get_args, get_type_hints

import msgspec
import re2
from msgspec import Meta

from shoal.errors import TaskError, did_you_mean, expected_one_of
from shoal.types import Json, Task


class Pattern(Protocol):
    """The methods used of a compiled pattern; None means no match."""

    def search(self, text: str) -> object: ...
    def fullmatch(self, text: str) -> object: ...


def compiled(pattern: str) -> Pattern:
    """Compiles a pattern whose dot also matches newlines. Raises `ValueError` for a pattern that RE2 refuses.

    >>> compiled("(a+)+$").search("a" * 40 + "!") is None
    True
    """
    options = re2.Options()
    options.dot_nl = True
    options.log_errors = False
    try:
        made: Pattern = re2.compile(pattern, options)
    except re2.error as error:
        text = error.args[0]
        why = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
        raise ValueError(f"expected a regular expression as RE2 knows them: {why}") from None
    return made


class _Checker(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="name", omit_defaults=True):
    """Base class of checkers: refuses unknown parameters; its tag is its name."""


class Exact(_Checker, frozen=True, tag="exact"):
    """The answer equals the truth, ignoring surrounding space."""

    ignore_case: bool = False


class Contains(_Checker, frozen=True, tag="contains"):
    """The truth occurs in the answer."""


class Number(_Checker, frozen=True, tag="number"):
    """The answer's last number equals the truth's, exactly."""


class Math(_Checker, frozen=True, tag="math"):
    """The answer's final expression equals the truth's, as mathematics."""

    tolerance: float = 0.0
    """Relative tolerance, for numbers only."""


class Regex(_Checker, frozen=True, tag="regex"):
    """A regular expression (RE2) occurs in the answer, or matches all of it. Without a pattern the truth is used."""

    pattern: str = ""
    match: Literal["search", "full"] = "search"

    def __post_init__(self) -> None:
        compiled(self.pattern)


class JsonSchema(_Checker, frozen=True, tag="json_schema"):
    """The answer is JSON that a schema accepts; it must also equal the truth, if there is one."""

    schema: dict[str, object]


class Format(_Checker, frozen=True, tag="format"):
    """The answer consists of exactly these XML-like tags, each once, in this order and not empty."""

    tags: tuple[str, ...] = ("think", "answer")


class Length(_Checker, frozen=True, tag="length"):
    """1 from `at_least` to `at_most`, then falling linearly to 0 over the next `over`; 0 below `at_least`."""

    at_most: int
    over: int = 0
    at_least: int = 0
    unit: Literal["characters", "words"] = "characters"


class Language(_Checker, frozen=True, tag="language"):
    """The share of the answer's letters that belong to a script."""

    script: Literal["latin", "cyrillic", "greek", "han", "kana", "hangul", "arabic", "hebrew", "devanagari", "thai"]


class ReasoningGym(_Checker, frozen=True, tag="reasoning_gym"):
    """The dataset's own scorer, for tasks with a receipt."""


class Code(_Checker, frozen=True, tag="code"):
    """The program in the answer passes the task's `info.tests`, in the sandbox."""

    timeout_s: Annotated[float, Meta(gt=0)] = 4.0
    """Seconds of one test."""
    memory_mb: Annotated[int, Meta(gt=0)] = 256
    partial: bool = False
    """True: the value is the share of passed tests. False: 1 for all tests, 0 for fewer."""
    template: Annotated[str, Meta(pattern=r"\{answer\}")] = "{answer}"
    """The program; `{answer}` is where the answer's code goes."""
    tolerance: float = 1e-9
    """Relative tolerance for floating-point numbers that a function returns."""


class LLMJudge(_Checker, frozen=True, tag="judge"):
    """A language model behind an OpenAI-compatible URL gives the answer a score by a rubric."""

    url: Annotated[str, Meta(pattern="^https?://")]
    """URL up to and including `/v1`."""
    model: str
    rubric: str
    best: Annotated[int, Meta(ge=1)] = 10
    """The rubric's highest score; the lowest is 0. The value is the score's share of it."""
    key_env: str = ""
    """Environment variable with the API key."""
    timeout_s: float = 60.0
    """Seconds for an answer, with its retries."""
    max_tokens: int = 512


class Function(_Checker, frozen=True, tag="function"):
    """A user's function with TRL's signature: `reward(prompts, completions, **columns) -> list[float | None]`."""

    path: Annotated[str, Meta(pattern=r"^[^:]+:\w+$")]
    """Name as `module:function`; imported from the current folder too."""
    timeout_s: float = 30.0
    """Seconds for the answers of one group together."""


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One checker of a weighted sum."""

    scorer: "Spec"
    weight: float = 1.0
    label: str = ""
    """Name in `Reward.parts`; the checker's name when empty."""


class Weighted(_Checker, frozen=True, tag="weighted"):
    """The weighted sum of several checkers' values."""

    parts: Annotated[tuple[Part, ...], Meta(min_length=1)]


Spec: TypeAlias = (
    Exact
    | Contains
    | Number
    | Math
    | Regex
    | JsonSchema
    | Format
    | Length
    | Language
    | ReasoningGym
    | Code
    | LLMJudge
    | Function
    | Weighted
)
KINDS: dict[str, type[msgspec.Struct]] = {str(kind.__struct_config__.tag): kind for kind in get_args(Spec)}
NAMES: tuple[str, ...] = tuple(KINDS)
TRUTH_NEEDED = (Exact, Contains, Number, Math)
PROMPT = (Exact, Contains, Length)


class UnitTest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One unit test of a program. Exactly one of four kinds:

    - `stdin` and `stdout`: input and expected output of the program;
    - `call` with `args`, `kwargs`, `returns`: a function (or `Class.method`) of the program, and its expected result;
    - `code`: Python statements whose assertions must hold, with the program's names in scope;
    - `pytest`: a pytest file that imports the program as `solution`.
    """

    stdin: str | None = None
    stdout: str | None = None
    call: str | None = None
    args: list[object] = []
    kwargs: dict[str, object] = {}
    returns: object = None
    code: str | None = None
    pytest: str | None = None

    def __post_init__(self) -> None:
        kinds = [name for name in ("stdout", "call", "code", "pytest") if getattr(self, name) is not None]
        if len(kinds) != 1:
            raise ValueError(f"expected one of stdout, call, code and pytest, got {' and '.join(kinds) or 'none'}")


def spec_of(value: Json, where: str) -> Spec:
    """The checker that a name or a table means. Raises `TaskError` that begins with `where`.

    >>> spec_of("math", "here"), spec_of({"name": "length", "at_most": 80}, "here")
    (Math(tolerance=0.0), Length(at_most=80, over=0, at_least=0, unit='characters'))
    """
    tree = _spelled_out(value)
    name = tree.get("name") if isinstance(tree, dict) else None
    if not isinstance(name, str) or name not in NAMES:
        raise TaskError(f"{where}: {expected_one_of(NAMES, value if name is None else name)}")
    try:
        return msgspec.convert(tree, Spec)  # type: ignore[no-any-return]
    except (msgspec.ValidationError, ValueError) as error:
        raise TaskError(f"{where}: {table_complaint(error, KINDS[name])}") from None


def task_spec(task: Task) -> Spec:
    """The checker of a task: `info.scorer`, else its dataset's own. Raises `TaskError`."""
    try:
        value = json.loads(task.info).get("scorer")
    except (ValueError, AttributeError, RecursionError):
        raise TaskError(f"info: expected a JSON object, got {task.info[:60]!r}") from None
    return ReasoningGym() if value is None and task.receipt is not None else spec_of(value, "info.scorer")


def unit_tests(value: Json, where: str) -> list[UnitTest]:
    """The unit tests of a row. Raises `TaskError` that begins with `where`."""
    try:
        tests = msgspec.convert(value, list[UnitTest])
    except (msgspec.ValidationError, ValueError) as error:
        raise TaskError(f"{where}: {table_complaint(error, UnitTest)}") from None
    if not tests:
        raise TaskError(f"{where}: expected at least one test")
    return tests


def leaves(spec: Spec) -> Iterator[Spec]:
    """The checkers that judge by themselves: the parts of a weighted sum, or the one checker.

    >>> [leaf.__struct_config__.tag for leaf in leaves(Weighted((Part(Code()), Part(Format()))))]
    ['code', 'format']
    """
    if isinstance(spec, Weighted):
        for part in spec.parts:
            yield from leaves(part.scorer)
    else:
        yield spec


def is_confined(spec: Spec) -> bool:
    """True if untrusted text may reach this checker: it uses no user function, and no model that costs money."""
    return not any(isinstance(leaf, Function | LLMJudge) for leaf in leaves(spec))


def is_prompt(spec: Spec) -> bool:
    """True if no answer can keep this checker busy: it only compares texts and counts."""
    return all(isinstance(leaf, PROMPT) for leaf in leaves(spec))


def needs_truth(spec: Spec) -> bool:
    """True if a task must have an answer for this checker."""
    return any(not leaf.pattern if isinstance(leaf, Regex) else isinstance(leaf, TRUTH_NEEDED) for leaf in leaves(spec))


def needs_tests(spec: Spec) -> bool:
    """True if a task must have unit tests for this checker."""
    return any(isinstance(leaf, Code) for leaf in leaves(spec))


def to_json(spec: Spec) -> Json:
    """The inverse of `spec_of`: the name alone if no parameter is set.

    >>> to_json(Number()), to_json(Regex("a+"))
    ('number', {'name': 'regex', 'pattern': 'a+'})
    """
    tree: dict[str, Json] = msgspec.to_builtins(spec)
    return tree["name"] if len(tree) == 1 else tree


def _spelled_out(value: Json) -> Json:
    """Replaces each name of a checker by its table."""
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and isinstance(value.get("parts"), list):
        parts = value["parts"]
        assert isinstance(parts, list)
        inner: list[Json] = [
            {**part, "scorer": _spelled_out(part["scorer"])} if isinstance(part, dict) and "scorer" in part else part
            for part in parts
        ]
        return {**value, "parts": inner}
    return value


def table_complaint(error: Exception, kind: type[msgspec.Struct]) -> str:
    """The error about a table, in the words of TOML: the parameter, what was expected, what came.

    >>> table_complaint(msgspec.ValidationError("Expected `int`, got `str` - at `$.best`"), LLMJudge)
    'best: expected int, got str'
    """
    text, _, path = str(error).partition(" - at `$")
    place = path.strip(".`")
    if field := re.fullmatch(r"Object (contains unknown|missing required) field `(.*)`", text):
        name = ".".join(filter(None, (place, field[2])))
        if field[1] == "missing required":
            return f"{name}: expected a value, got none"
        return f"{name}: unknown parameter{did_you_mean(field[2], kind.__struct_fields__)}"
    choices = get_args(get_type_hints(kind).get(place)) or NAMES  # parts of a weighted sum name checkers
    if given := re.fullmatch(r"Invalid (?:enum )?value '(.*)'", text):
        return f"{place}: {expected_one_of(choices, given[1])}"
    words = text.replace("`", "")
    return f"{place}: {words[0].lower()}{words[1:]}" if place else words
