"""Converts rows of GSM8K, MATH, MBPP and APPS to rows with `prompt`, `answer` and `info`. Pure.

The columns of a row tell its format, so files written for other tools work as they are.
"""

import ast
import contextlib
import json
from collections.abc import Mapping, Sequence

from shoal.types import Json

Row = dict[str, Json]
STOP_GSM8K = "####"


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
    """Converts `question`, and an `answer` that ends with #### and the number."""
    answer = _text(row, "answer")
    return {"prompt": _text(row, "question"), "answer": answer.rpartition(STOP_GSM8K)[2].strip(), "info": _rest(row)}


def _math(row: Row) -> Row:
    """Converts `problem`, and an `answer` or the last \\\\boxed{} of a `solution`; keeps `level` and `type`."""
    answer = row.get("answer") if isinstance(row.get("answer"), str) else _text(row, "solution")
    return {"prompt": _text(row, "problem"), "answer": answer, "info": _rest(row, "level", "type", "subject")}


def _mbpp(row: Row) -> Row:
    """Converts `text` or `prompt`, a `test_list` of assertions, and the imports of the assertions."""
    question = _text(row, "text" if "text" in row else "prompt")
    assertions = [str(line) for line in _list(row, "test_list")]
    imports = row.get("test_imports") or [row.get("test_setup_code") or ""]
    before = "\n".join(str(line) for line in imports if line) if isinstance(imports, list) else str(imports)
    shown = "\n".join(assertions)
    return {
        "prompt": f"{question}\nYour code should pass these tests:\n{shown}",
        "answer": row.get("code"),
        "info": {**_rest(row, "task_id"), "tests": [assertion_test(line, before) for line in assertions]},
    }


def assertion_test(assertion: str, before: str = "") -> Json:
    """The test of an assertion: a call with its value where JSON carries both unchanged, else the statement.

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
                if json.loads(json.dumps([values, expected])) == [values, expected]:
                    return {"call": name, "args": values, "returns": expected}
    return {"code": f"{before}\n{assertion}".strip()}


def _apps(row: Row) -> Row:
    """Converts `question`, and `input_output`: JSON with `inputs`, `outputs` and, for a function, `fn_name`."""
    cases = _parsed(row, "input_output")
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
        "prompt": _text(row, "question") + (f"\n{starter}" if starter else ""),
        "answer": solutions[0] if isinstance(solutions, list) and solutions else None,
        "info": {**_rest(row, "difficulty"), "tests": tests},
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


def _rest(row: Row, *columns: str) -> dict[str, Json]:
    """The row's `info`, and the present ones of these columns."""
    info = row.get("info")
    kept = {column: row[column] for column in columns if row.get(column) is not None}
    return {**kept, **(info if isinstance(info, dict) else {})}


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
