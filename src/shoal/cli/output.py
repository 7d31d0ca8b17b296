"""How every command answers: lines for a person, one JSON object for a program, a sentence for a mistake."""

import json
import sys
from math import isfinite
from typing import Annotated, NoReturn

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line of standard output.")]


def show(values: dict[str, object], as_json: bool) -> None:
    """One JSON line, or a line per value."""
    if as_json:
        finite = {k: None if isinstance(v, float) and not isfinite(v) else v for k, v in values.items()}
        print(json.dumps(finite))
        return
    width = max(len(name) for name in values)
    for name, value in values.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")


def fail(sentence: str, code: int) -> NoReturn:
    """Ends the process with a sentence on standard error."""
    print(f"shoal: {sentence}", file=sys.stderr)
    raise SystemExit(code)
