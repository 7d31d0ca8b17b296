"""One-sentence messages for command lines that typer's parser refuses."""

import re
from typing import Any

import typer

from shoal.errors import expected_one_of

Misuse: type[Exception] = typer.BadParameter.__mro__[2]
"""Base class of the parser's errors; typer does not export it."""


def misuse(error: Any) -> str:
    """One sentence about a misused command: what was expected, what came, and the nearest name."""
    context, message = error.ctx, error.format_message()
    command = context.command_path if context else "shoal"
    help_ = f"; see {command} --help"
    parameter = getattr(error, "param", None)
    match type(error).__name__:
        case "NoSuchOption":
            options = [name for one in context.command.params for name in one.opts if name.startswith("-")]
            return f"{command}: {expected_one_of(options, error.option_name)}"
        case "MissingParameter" if parameter is not None:
            return f"{command}: expected {_name_of(parameter)}, got none{help_}"
        case "BadOptionUsage":
            return f"{error.option_name}: expected a value, got none{help_}"
        case "BadParameter" if parameter is not None:
            return f"{_name_of(parameter)}: {_refused(error)}"
    commands, named = getattr(context and context.command, "commands", None), re.search("'(.+?)'", message)
    if commands and named:
        return f"{command}: {expected_one_of(commands, named[1])}"
    if extra := re.fullmatch(r"Got unexpected extra arguments?(?:\(s\))? \((.*)\)", message):
        return f"{command}: expected no more arguments, got {extra[1]}{help_}"
    return f"{command}: {message}{help_}"


def _name_of(parameter: Any) -> str:
    """Name of a parameter as its command's help shows it."""
    options = [name for name in parameter.opts if name.startswith("--")]
    return str(options[0] if options else (parameter.metavar or parameter.name).strip("[]"))


def _refused(error: Any) -> str:
    """Says what was expected of a refused value. Newer releases of typer check values with pydantic."""
    if choices := re.search(r"'(.*)' is not one of (.*)", error.message):
        return expected_one_of(re.findall("'(.*?)'", choices[2]), choices[1])
    if callable(errors := getattr(error.__cause__, "errors", None)):
        from shoal.config.complaints import expectation

        return expectation(errors()[:1])
    return str(error.message)
