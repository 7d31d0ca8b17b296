"""Command lines: settings among a command's options, as `--section.key=value` or `--section.key value`, and misuse.

What typer's parser refuses is answered in one sentence.
"""

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from shoal.errors import ConfigError, expected_one_of

HELP = "Any setting can be given, as --train.lr=1e-4 or --train.lr 1e-4; docs/reference/configuration.md lists them."
GoalOption = Annotated[
    float | None, typer.Option(min=0, max=1, help="Accuracy: exit code 1 when the run will not get there (98%).")
]


class WithSettings(TyperCommand):
    """Command that takes settings besides its own options; they are its context's `obj`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Parses the arguments without the settings. Raises `ConfigError` for a setting without a value."""
        known = [one for one in self.params if isinstance(one, TyperOption)]
        options = {"--help": False} | {name: not one.is_flag for one in known for name in one.opts}
        own: list[str] = []
        ctx.obj = list(_settings(args, options, own))
        return super().parse_args(ctx, own)


def _settings(args: Sequence[str], options: dict[str, bool], own: list[str]) -> Iterator[str]:
    """Picks the settings among the arguments; `own` gets the others. `options` tells which options take a value."""
    waiting = iter(args)
    for argument in waiting:
        name, equals, _ = argument.partition("=")
        if argument == "--":
            own += [argument, *waiting]
        elif not argument.startswith("--") or name in options:
            own.append(argument)
            if options.get(name) and not equals:
                own += [value for value in [next(waiting, None)] if value is not None]
        elif equals:
            yield argument
        else:
            yield f"{argument}={_value_after(argument, next(waiting, None), options)}"


def _value_after(name: str, value: str | None, options: dict[str, bool]) -> str:
    """Value after a setting. Raises `ConfigError` for a missing value, or for a name that is no setting."""
    from shoal.config import Config  # slow to import, and not needed for --help

    key = name.removeprefix("--")
    if "." not in key and key not in Config.model_fields:
        close = difflib.get_close_matches(name, [*options, *(f"--{field}" for field in Config.model_fields)], n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ConfigError(f"{name}: expected an option of this command or --section.key=value{hint}")
    if value is None or value.startswith("--"):
        raise ConfigError(f"{key}: expected --section.key=value, got no value")
    return value


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
