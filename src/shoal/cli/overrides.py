"""Settings on the command line: `--section.key=value` or `--section.key value`, among a command's options."""

import difflib
from collections.abc import Iterator, Sequence

import typer
from typer.core import TyperCommand, TyperOption

from shoal.errors import ConfigError

HELP = "Any setting can be given, as --train.lr=1e-4 or --train.lr 1e-4; docs/reference/configuration.md lists them."


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
