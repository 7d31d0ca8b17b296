"""Converts rows of GSM8K, MATH, MBPP and APPS to rows with `prompt`, `answer` and `info`. Pure.

The columns of a row tell its format, so files written for other tools work as they are. All other columns stay.
"""

import ast
import contextlib
import json
from collections.abc import Mapping, Sequence

from shoal.types import Json

Row = dict[str, Json]
STOP_GSM8K = "####"


class NothingToScore(ValueError):
    """A row without an answer or tests to score by; a gap in the data, not an error of its writer."""


def canonical(row: Row) -> tuple[Row, str]:
    """The row with `prompt`, `answer` and `info`, and the checker that scores it by default.

    Raises `ValueError` that begins with the name of the wrong column.
    """
    if "input_output" in row and "question" in row:
        return _apps(row), "code"
    if "test_list" in row:
        return _mbpp(row), "code"
    if "problem" in row and ("solution" in row or "answer" in row):
        return _math(row), "math"
    if "question" in row and "answer" in row:
        return _gsm8k(row), "math"
    info = row.get("info")
    return row, "code" if isinstance(info, dict) and "tests" in info else "exact"


def _gsm8k(row: Row) -> Row:
    """Converts `question`, and an `answer` that is a number, or ends with it after ####."""
    answer = _number_or_text(row, "answer").rpartition(STOP_GSM8K)[2].strip()
    return {**_rest(row, "question", "answer"), "prompt": _text(row, "question"), "answer": answer}


def _math(row: Row) -> Row:
    """Converts `problem`, and an `answer` or the last \\\\boxed{} of a `solution`."""
    name = "solution" if row.get("answer") is None else "answer"
    return {**_rest(row, "problem", name), "prompt": _text(row, "problem"), "answer": _number_or_text(row, name)}


def _mbpp(row: Row) -> Row:
    """Converts `text` or `prompt`, a `test_list` of assertions, and the imports of the assertions."""
    asked = "text" if "text" in row else "prompt"
    question = _text(row, asked)
    assertions = [str(line) for line in _list(row, "test_list")]
    if not assertions:
        raise NothingToScore("test_list: expected at least one assertion, got []")
    imports = row.get("test_imports") or [row.get("test_setup_code") or ""]
    before = "\n".join(str(line) for line in imports if line) if isinstance(imports, list) else str(imports)
    shown = "\n".join(assertions)
    return {
        **_rest(row, asked, "prompt", "code", "test_list", "test_imports", "test_setup_code"),
        "prompt": f"{question}\nYour code should pass these tests:\n{shown}",
        "answer": row.get("code"),
        "info": {**_info(row), "tests": [assertion_test(line, before) for line in assertions]},
    }


def assertion_test(assertion: str, before: str = "") -> Json:
    """The test of an assertion: a call with its value where JSON carries both unchanged, else the statement.

    A truth in the value, or 0 or 1 as the value, stays a statement: Python takes 1 for True, and a `call` does not.

    >>> assertion_test("assert add(1, [2]) == [3, 4]")
    {'call': 'add', 'args': [1, [2]], 'returns': [3, 4]}
    >>> assertion_test("assert add(1) > 0")
    {'code': 'assert add(1) > 0'}
    """
    try:
        (statement,) = ast.parse(assertion.strip()).body
    except (SyntaxError, ValueError):
        raise ValueError(f"test_list: expected assertions, got {assertion[:60]!r}") from None
    match statement:
        case ast.Assert(
            test=ast.Compare(
                left=ast.Call(func=ast.Name(id=name), args=args, keywords=[]), ops=[ast.Eq()], comparators=[right]
            )
        ):
            with contextlib.suppress(ValueError, TypeError):
                values, expected = [ast.literal_eval(arg) for arg in args], ast.literal_eval(right)
                if json.loads(json.dumps([values, expected])) == [values, expected] and not _is_truth(expected):
                    return {"call": name, "args": values, "returns": expected}
    return {"code": f"{before}\n{assertion}".strip()}


def _is_truth(value: object, *, within: bool = False) -> bool:
    """True if a value is 0 or 1, or is or contains True or False, which Python takes for one another."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return any(_is_truth(one, within=True) for one in value)
    return isinstance(value, bool) if within else value in (0, 1)


def _apps(row: Row) -> Row:
    """Converts `question`, and `input_output`: JSON with `inputs`, `outputs` and, for a function, `fn_name`.

    Raises `NothingToScore` for a question without tests, of which APPS has many.
    """
    cases = _parsed(row, "input_output") if row["input_output"] not in (None, "") else None
    if not cases or (isinstance(cases, Mapping) and not (cases.get("inputs") or cases.get("outputs"))):
        raise NothingToScore("input_output: expected inputs and outputs, got none")
    if not isinstance(cases, Mapping):
        raise ValueError("input_output: expected an object with inputs and outputs")
    inputs, outputs = _list(cases, "inputs"), _list(cases, "outputs")
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"input_output: expected as many outputs as inputs, got {len(outputs)} for {len(inputs)}")
    starter = str(row.get("starter_code") or "")
    name = cases.get("fn_name")
    tests: list[Json]
    if isinstance(name, str):
        call = f"Solution.{name}" if "class Solution" in starter else name
        tests = [
            {"call": call, "args": given, "returns": value}
            for given, value in zip(inputs, _unwrapped(outputs), strict=True)
        ]
    else:
        tests = [{"stdin": _lines(given), "stdout": _lines(out)} for given, out in zip(inputs, outputs, strict=True)]
    solutions = _parsed(row, "solutions") if row.get("solutions") else []
    return {
        **_rest(row, "question", "input_output", "solutions", "starter_code"),
        "prompt": _text(row, "question") + (f"\n{starter}" if starter else ""),
        "answer": solutions[0] if isinstance(solutions, list) and solutions else None,
        "info": {**_info(row), "tests": tests},
    }


def _unwrapped(outputs: Sequence[Json]) -> list[Json]:
    """The outputs without the list of one in which APPS wraps the value of a function."""
    if all(isinstance(out, list) and len(out) == 1 for out in outputs):
        return [out[0] for out in outputs if isinstance(out, list)]
    return list(outputs)


def _lines(value: Json) -> str:
    return "\n".join(map(str, value)) if isinstance(value, list) else str(value)


def _parsed(row: Row, column: str) -> Json:
    """The value of a column that holds JSON, as text or already read."""
    value = row[column]
    if not isinstance(value, str):
        return value
    try:
        parsed: Json = json.loads(value)
    except ValueError as error:
        raise ValueError(f"{column}: expected JSON: {error}") from None
    return parsed


def _rest(row: Row, *converted: str) -> Row:
    """All columns of a row but the converted ones and those without a value."""
    return {column: value for column, value in row.items() if column not in converted and value is not None}


def _info(row: Row) -> Row:
    info = row.get("info")
    return info if isinstance(info, dict) else {}


def _number_or_text(row: Row, column: str) -> str:
    """The text of a column, in which a number may stand as such."""
    value = row.get(column)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return json.dumps(value)
    return _text(row, column)


def _text(row: Row, column: str) -> str:
    value = row.get(column)
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{column}: expected text, got {json.dumps(value)[:60]}")
    return value


def _list(row: Mapping[str, Json], column: str) -> list[Json]:
    value = row.get(column)
    if not isinstance(value, list):
        raise ValueError(f"{column}: expected a list, got {json.dumps(value)[:60]}")
    return value
