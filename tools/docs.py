"""Writes the generated parts of docs/: settings (from config/), commands (from cli/), names in metrics.jsonl (from
names.toml), layers (from the layer test) and flows (from flow.py). Also the stub of keywords (from keywords.py).

`python tools/docs.py` writes them, `python tools/docs.py --check` exits with 1 when a file would change.
"""

import ast
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import flow
import keywords
import measured
import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal.cli import app
from shoal.config import Config
from shoal.config.presets import PRESETS, Setting
from shoal.gateway.dialects import Dialect
from shoal.gateway.fields import Ignored, Rule, Served, Unserved
from shoal.gateway.server import DIALECTS
from shoal.observe.names import ANSWER_NAMES, EVAL_NAMES, STEP_NAMES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HEAD = """# Configuration

<!-- Written by `make docs` from src/shoal/config/; change the field there. -->

One TOML file describes a run. The command line wins over the file:
`shoal train run.toml --train.lr=1e-4 --tasks.0.weight=2`. Values are TOML; a bare word is a string. Paths of questions
and models in a file are relative to its folder, on the command line to the current one.
Unknown keys are refused, with the nearest known one. `resolved.toml` of a run directory has every setting of that run.

An "unset" setting is derived, or off, as its sentence says. No number may be above 10⁹.
`preset` sets a paper's published settings where file and command line have none; `--dry-run` shows the result.
"""
COMMANDS = """# Commands

<!-- Written by `make docs` from src/shoal/cli/; change the help there. -->

`shoal COMMAND --help` explains each option. A run's name under `runs/` stands for its path. Commands with a
configuration accept any [setting](configuration.md), as `--train.lr=1e-4` or `--train.lr 1e-4`. Commands that join a
run find its token in `SHOAL_RUN_TOKEN`.

With `--json` the last line of standard output is one JSON object. Exit codes: 1 is a finding of `audit` or `doctor`,
2 a user error, explained on standard error.
"""
BOUNDS = (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="))


def configuration() -> str:
    """The whole of docs/reference/configuration.md."""
    parts = [HEAD, _table(Config, "At the top")]
    for name, field in Config.model_fields.items():
        for section in _sections(field):
            title = f"[[{name}]]" if get_origin(field.annotation) is list else f"[{name}]"
            parts.append(_table(section, f"`{title}`"))
            for inner, inner_field in section.model_fields.items():
                parts += [_table(part, _inner_title(f"{name}.{inner}", part)) for part in _sections(inner_field)]
    parts += [_preset(name, settings) for name, settings in PRESETS.items()]
    return "\n".join(parts)


def commands() -> str:
    """The whole of docs/reference/commands.md."""
    group = typer.main.get_group(app)
    context = typer.Context(group)
    panels: dict[str, list[str]] = {}
    for name in group.list_commands(context):
        command = group.commands[name]
        if not command.hidden:
            panels.setdefault(str(getattr(command, "rich_help_panel", "")), []).extend(_command_rows(name, command))
    parts = [COMMANDS]
    for panel, rows in panels.items():
        parts.append("\n".join([f"## {panel}", "", "| command | does |", "|---|---|", *rows, ""]))
    return "\n".join(parts)


def _command_rows(path: str, command: object) -> Iterator[str]:
    """A row for a command, or one for each command of a group: arguments and the first paragraph of the help."""
    if isinstance(command, typer.core.TyperGroup):
        for name, inner in command.commands.items():
            yield from _command_rows(f"{path} {name}", inner)
        return
    assert isinstance(command, typer.core.TyperCommand)
    wanted = [one for one in command.params if one.param_type_name == "argument"]
    words = [(one.metavar or str(one.name).upper(), one.required) for one in wanted]
    arguments = [word if required or word.startswith("[") else f"[{word}]" for word, required in words]
    help_ = " ".join((command.help or "").split("\n\n")[0].split())
    usage = " ".join(["shoal", path, *arguments]).replace("|", "\\|")
    yield f"| `{usage}` | {help_} |"


def _preset(name: str, settings: Mapping[str, Setting]) -> str:
    """What one preset sets, with its sources."""
    lines = [f"## `preset = {json.dumps(name)}`", "", "| setting | value | source |", "|---|---|---|"]
    for key, setting in settings.items():
        share = " of `rollout.max_tokens`" if setting.share_of_max_tokens else ""
        lines.append(f"| `{key}` | `{json.dumps(setting.value)}`{share} | {setting.source} |")
    return "\n".join([*lines, ""])


def _inner_title(path: str, section: type[BaseModel]) -> str:
    """The heading of a section within a section, which may be one of several by name."""
    name = section.model_fields.get("name")
    return f"`[{path}]`" + (f" with `name = {json.dumps(name.default)}`" if name else "")


def metrics() -> str:
    """The tables of names that docs/reference/run.md shows."""
    return "\n".join(
        [
            *_rows("In a record of kind `step`:", STEP_NAMES),
            *_rows("In a record of kind `eval`, `step` being the steps done before it:", EVAL_NAMES),
            *_rows("In a record of kind `answer`, a few for each evaluation:", ANSWER_NAMES),
        ]
    )


def _rows(title: str, names: Mapping[str, str]) -> list[str]:
    """A table of names; one that exists for each task too shares its row."""
    rows = []
    for name, meaning in names.items():
        if meaning in (f"`{name.partition('/')[0]}` of one task.", f"`{name.partition('/')[0]}` for one task."):
            continue
        both = f"`{name}`, `{name}/<task>`" if f"{name}/<task>" in names else f"`{name}`"
        rows.append(f"| {both} | {meaning} |")
    return [title, "", "| name | meaning |", "|---|---|", *rows, ""]


def _table(section: type[BaseModel], title: str) -> str:
    """One section as a heading, its sentence and a table of its settings."""
    rows = [
        f"| `{name}` | {_kind(field.annotation)}{_bounds(field)} | {_default(field)} | {field.description or ''} |"
        for name, field in section.model_fields.items()
        if field.description
    ]
    head = ["", "| setting | value | default | meaning |", "|---|---|---|---|"] if rows else []
    return "\n".join([f"## {title}", "", section.__doc__ or "", *head, *rows, ""])


def _sections(field: FieldInfo) -> Iterator[type[BaseModel]]:
    """The sections that a field's value may be."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _kind(annotation: object) -> str:
    """A type in the words of TOML."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{json.dumps(choice)}`" for choice in arguments)
    if origin is Annotated:
        return _kind(arguments[0]) + "".join(_bounds(rule) for rule in arguments[1:] if isinstance(rule, FieldInfo))
    if origin in (Union, UnionType):
        if all(isinstance(kind, type) and issubclass(kind, BaseModel) for kind in arguments):
            return "table"
        return " or ".join(_kind(kind) for kind in arguments if kind is not NoneType)
    if origin is list:
        return f"list of {_plural(_kind(arguments[0]))}"
    if origin is tuple:
        return f"pair of {_plural(_kind(arguments[0]))}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    words = {str: "string", int: "integer", float: "number", bool: "`true` or `false`"}
    return words[annotation] if isinstance(annotation, type) and annotation in words else str(annotation)


def _plural(kind: str) -> str:
    word, space, rest = kind.partition(" ")
    return f"{word}s{space}{rest}"


def _bounds(field: FieldInfo) -> str:
    """The bounds of a number, as ` 1..4` or ` > 0, < 2`."""
    found = {key: getattr(rule, key) for rule in field.metadata for key, _ in BOUNDS if hasattr(rule, key)}
    if found.keys() == {"ge", "le"}:
        return f" {found['ge']:g}..{found['le']:g}"
    return " " + ", ".join(f"{sign} {found[key]}" for key, sign in BOUNDS if key in found) if found else ""


def _default(field: FieldInfo) -> str:
    """The default as TOML; of a section, which one it is."""
    if field.is_required():
        return "required"
    default: object = field.get_default(call_default_factory=True)
    if default is None or default is PydanticUndefined:
        return "unset"
    if isinstance(default, BaseModel):
        return f"`name = {json.dumps(default.model_dump()['name'])}`"
    if default == {} or default == []:
        return "empty"
    return f"`{json.dumps(default)}`"


def layers() -> str:
    """The layers of the layer test, highest first, with the rooms that exist."""
    tree = ast.parse((ROOT / "tests" / "house" / "test_layers.py").read_text())
    (table,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS"
    )
    there = {path.stem for path in (ROOT / "src" / "shoal").iterdir()}
    lines = [f"{number}  {'  '.join(sorted(rooms & there))}" for number, rooms in enumerate(table) if rooms & there]
    return "\n".join(["```", *reversed(lines), "```"])


def frameworks() -> str:
    """The table of agent frameworks, from their last results."""
    names = ("framework", "version", "mode", "groups", "truncated", "audit", "tokens")
    rows = [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    for line in (ROOT / "benchmarks" / "results" / "frameworks.jsonl").read_text().splitlines():
        one = json.loads(line)
        script = f"{one['framework'].replace('-', '_')}_agent.py"
        counts = {name: f"{one[name][0]} of {one[name][1]}" for name in ("groups", "truncated", "turns")}
        cells = (
            *(f"[{one['framework']}](../../examples/agents/{script})", one["version"], one["mode"] or "default"),
            *(counts["groups"], counts["truncated"], ", ".join(one["audit"]) or "clean", counts["turns"]),
        )
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def fields() -> str:
    """The tables of the gateway's fields: those with one rule on several routes first, then each route's others."""
    routes = {path: {name: _of_both(dialect, name) for name in dialect.fields} for path, dialect in DIALECTS.items()}
    rules: dict[str, list[str]] = {}
    for own in routes.values():
        for name, rule in own.items():
            rules.setdefault(name, []).append(rule)
    common = {name: found[0] for name, found in rules.items() if len(found) > 1 and len(set(found)) == 1}
    tables = {"each route that has the field": common}
    for path, own in routes.items():
        tables[f"`POST {path}`"] = {name: rule for name, rule in own.items() if name not in common}
    return "\n\n".join(_field_table(head, own) for head, own in tables.items())


def _of_both(dialect: Dialect[Any], name: str) -> str:
    """A field's rule in words, with that of trained sessions where it differs."""
    rule = dialect.fields[name]
    trained = dialect.untrained.get(name, rule)
    if trained == rule or isinstance(rule, Unserved):
        return _rule(rule)
    return f"{_rule(rule)}; in a trained session {_rule(trained)}"


def _field_table(head: str, rules: Mapping[str, str]) -> str:
    """A table of fields; those with the same rule share a row."""
    names: dict[str, list[str]] = {}
    for name, rule in rules.items():
        names.setdefault(rule, []).append(f"`{name}`")
    rows = (f"| {', '.join(own)} | {rule} |" for rule, own in names.items())
    return "\n".join((f"| {head} | |", "|---|---|", *rows))


def _rule(rule: Rule) -> str:
    """A rule in words."""
    match rule:
        case Served(how, values, remedy):
            only = f"{', '.join(f'`{value}`' for value in values)}; others are refused: {remedy}" if values else ""
            return "; ".join(filter(None, (how, only)))
        case Ignored(reason):
            return f"no effect: {reason}"
    values = ", ".join(f"`{json.dumps(value)}`" for value in rule.values)
    return f"refused{f', other than {values}' if values else ''}: {rule.remedy}"


def with_part(path: Path, name: str, part: str) -> str:
    """The text of a document with `part` between its `name:begin` and `name:end` marks."""
    before, begin, rest = path.read_text().partition(f"<!-- {name}:begin -->\n")
    _, end, after = rest.partition(f"<!-- {name}:end -->")
    if not end:
        raise ValueError(f"{path}: expected <!-- {name}:begin --> and <!-- {name}:end --> on lines of their own")
    return f"{before}{begin}\n{part.strip()}\n\n{end}{after}"


def documents(*, ages: bool = False) -> dict[Path, str]:
    """Every document with a generated part, as it should be; `ages` writes those of figures anew."""
    agents, gateway = DOCS / "guides" / "agents.md", DOCS / "reference" / "gateway.md"
    run, architecture = DOCS / "reference" / "run.md", DOCS / "developers" / "architecture.md"
    return {
        DOCS / "reference" / "configuration.md": configuration(),
        DOCS / "reference" / "commands.md": commands(),
        DOCS / "developers" / "flows.md": flow.page(),
        measured.PAGE: measured.page(measured.PAGE.read_text(), with_ages=ages),
        agents: with_part(agents, "frameworks", frameworks()),
        gateway: with_part(gateway, "fields", fields()),
        run: with_part(run, "metrics", metrics()),
        architecture: with_part(architecture, "layers", layers()),
        ROOT / "src" / "shoal" / "library" / "keywords.pyi": keywords.stub(),
    }


def main(check: bool) -> int:
    """Writes what differs, or only says so."""
    stale = {
        path: text for path, text in documents(ages=not check).items() if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        if check:
            print(f"{path.relative_to(ROOT)} is out of date; run `make docs`", file=sys.stderr)
        else:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    raise SystemExit(main(check="--check" in sys.argv[1:]))
