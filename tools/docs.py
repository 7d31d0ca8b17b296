"""Writes the generated parts of docs/: settings (from config/), commands (from cli/), names in metrics.jsonl (from
names.toml), layers (from the layer test) and flows (from flow.py). Also the stub of keywords (from keywords.py).

`python tools/docs.py` writes them, `python tools/docs.py --check` exits with 1 when a file would change.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from shoal.observe.charts import ANSWER_NAMES, EVAL_NAMES, STEP_NAMES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
HEAD = """# Configuration

<!-- Written by `make docs` from src/shoal/config/; change the field there. -->

One TOML file describes a run. The command line wins over the file:
`shoal train run.toml --train.lr=1e-4 --tasks.0.weight=2`. Values are TOML; a bare word is a string. Paths in a file are
relative to its folder, on the command line to the current one. `resolved.toml` of a run directory has every setting.

Each setting stands with its default, then with other choices or bounds. An "unset" setting is derived, or off.
Numbers are 0 to 10⁹ (`seed` may be any).
`preset` sets a [paper's settings](#presets), except lengths, where file and command line have none.
"""
PRESETS_HEAD = """## Presets

Each value stands with its place in the paper. A value of no place turns off a default that the paper does not name.
"""
PAPERS = {
    "areal": "AReaL (arXiv 2505.24298) for mathematics; for code `max_staleness` is 4.",
    "glm5": "GLM-5 (arXiv 2602.15763) prints neither K (`train.push_every`) nor its band: this is its follow-up's for "
    "reasoning.",
    "sapo": "SAPO (arXiv 2509.08721), in its controlled experiment: seven peers share four groups each. The released "
    "code had rates of 1e-6 to 1e-5.",
    "dapo": "DAPO (arXiv 2503.14476).",
}
COMMANDS = """# Commands

<!-- Written by `make docs` from src/shoal/cli/; change the help there. -->

`shoal COMMAND --help` explains each option. A run's name under `runs/` stands for its path. Commands with a
configuration accept any [setting](configuration.md), as `--train.lr=1e-4` or `--train.lr 1e-4`. Commands that join a
run find its token in `SHOAL_RUN_TOKEN`.

With `--json` the last line of standard output is one JSON object. Exit codes: 1 is a finding of `audit`, `doctor` or
`replay`, 2 a user error, explained on standard error.
"""
NO_EFFECT, REFUSED = "no effect", "refused"
BOUNDS = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def configuration() -> str:
    """The whole of docs/reference/configuration.md."""
    parts = [HEAD, _table(Config, "At the top")]
    for name, field in Config.model_fields.items():
        for section in _sections(field):
            title = f"[[{name}]]" if get_origin(field.annotation) is list else f"[{name}]"
            parts.append(_table(section, f"`{title}`"))
            for inner, inner_field in section.model_fields.items():
                if inner == "loss":
                    parts.append(_losses(list(_sections(inner_field))))
                    continue
                parts += [_table(part, f"`[{name}.{inner}]`") for part in _sections(inner_field)]
    return re.sub(r"see docs/(guides/(\w+)\.md)", r"see [\2](../\1)", "\n".join([*parts, _presets()]))


def _losses(kinds: Sequence[type[BaseModel]]) -> str:
    """The losses by name, and their parameters: those with one meaning share a row."""
    lines = ["## `[train.loss]`", "", "`name` chooses a loss:", ""]
    rows: dict[tuple[str, str], dict[str, list[str]]] = {}
    for kind in kinds:
        name = kind.model_fields["name"].default
        lines.append(f"- `{name}`: {kind.__doc__}")
        for setting, field in kind.model_fields.items():
            if field.description:
                rows.setdefault((setting, field.description), {}).setdefault(_value(setting, field), []).append(name)
    lines += ["", "Its parameters:", ""]
    order = list(dict.fromkeys(setting for setting, _ in rows))
    for (_, meaning), values in sorted(rows.items(), key=lambda row: order.index(row[0][0])):
        by_loss = "; ".join(f"{value} ({', '.join(names)})" for value, names in values.items())
        lines.append(f"- {by_loss}: {meaning}")
    return "\n".join([*lines, ""])


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
        parts.append("\n".join([f"## {panel}", "", *rows, ""]))
    return "\n".join(parts)


def _command_rows(path: str, command: object) -> Iterator[str]:
    """A line for a command, or one for each command of a group: arguments and the first paragraph of the help."""
    if isinstance(command, typer.core.TyperGroup):
        for name, inner in command.commands.items():
            yield from _command_rows(f"{path} {name}", inner)
        return
    assert isinstance(command, typer.core.TyperCommand)
    wanted = [one for one in command.params if one.param_type_name == "argument"]
    words = [(one.metavar or str(one.name).upper(), one.required) for one in wanted]
    arguments = [word if required or word.startswith("[") else f"[{word}]" for word, required in words]
    help_ = " ".join((command.help or "").split("\n\n")[0].split())
    usage = " ".join(["shoal", path, *arguments])
    yield f"- `{usage}`: {help_}"


def _presets() -> str:
    """The presets as lists: the values of each place in its paper."""
    lines = [PRESETS_HEAD]
    for name, preset in PRESETS.items():
        places: dict[str, list[str]] = {}
        for key, setting in preset.items():
            found = re.search(r"(table|section|figure|equation|algorithm) [\d.]*\d|experiment", setting.source)
            places.setdefault(found[0].capitalize() if found else "No place", []).append(_published(key, setting))
        rows = [f"- {place}: {', '.join(places[place])}" for place in sorted(places, key="No place".__eq__)]
        lines += [f"### `{name}`", "", PAPERS[name], "", *rows, ""]
    return "\n".join(lines)


def _published(key: str, setting: Setting) -> str:
    """A value of a preset in TOML."""
    if isinstance(setting.value, dict):
        return f"`{key} = {{{', '.join(f'{name} = {json.dumps(one)}' for name, one in setting.value.items())}}}`"
    return f"`{key} = {json.dumps(setting.value)}`" + (" of `max_tokens`" if setting.share_of_max_tokens else "")


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
    """A list of names; one that exists for each task too shares its line."""
    rows = []
    for name, meaning in names.items():
        if meaning in (f"`{name.partition('/')[0]}` of one task.", f"`{name.partition('/')[0]}` for one task."):
            continue
        both = f"`{name}`, `{name}/<task>`" if f"{name}/<task>" in names else f"`{name}`"
        rows.append(f"- {both}: {meaning}")
    return [title, "", *rows, ""]


def _table(section: type[BaseModel], title: str) -> str:
    """One section as a heading, its sentence and a list of its settings."""
    rows = [
        f"- {_value(name, field)}: {field.description}"
        for name, field in section.model_fields.items()
        if field.description
    ]
    return "\n".join([f"## {title}", "", section.__doc__ or "", "", *rows, ""])


def _sections(field: FieldInfo) -> Iterator[type[BaseModel]]:
    """The sections that a field's value may be."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield kind


def _value(name: str, field: FieldInfo) -> str:
    """A setting with its default, then its other choices or bounds, and its type where the default does not tell it."""
    default, kind, bounds = _default(field), _kind(field.annotation), _bounds(field).strip()
    choices = kind.replace(" or ", ", ").split(", ")
    if not default.startswith("`"):
        return f"`{name}` ({default}; {' '.join(filter(None, (kind, bounds)))})"
    shown = f"`{name} = {default[1:-1]}`"
    if default in choices:
        return ", ".join([shown, *(choice for choice in choices if choice != default)])
    if kind in ("string", "integer", "number"):
        return f"{shown} ({bounds})" if bounds else shown
    return f"{shown} ({' '.join(filter(None, (kind, bounds)))})"


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
        return _plural(_kind(arguments[0]))
    if origin is tuple:
        return f"pair of {_plural(_kind(arguments[0]))}"
    if origin is dict or (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
        return "table"
    words = {str: "string", int: "integer", float: "number", bool: "`false`, `true`"}
    return words[annotation] if isinstance(annotation, type) and annotation in words else str(annotation)


def _plural(kind: str) -> str:
    word, space, rest = kind.partition(" ")
    return f"list of {kind}" if word.startswith("`") else f"{word}s{space}{rest}"


def _bounds(field: FieldInfo) -> str:
    """The bounds of a number, as ` 1..4` or ` >0, <2`."""
    found = {key: getattr(rule, key) for rule in field.metadata for key, _ in BOUNDS if hasattr(rule, key)}
    if found.keys() == {"ge", "le"}:
        return f" {found['ge']:g}..{found['le']:g}"
    if found.get("ge") == 0:
        del found["ge"]  # the page says it of all numbers
    return " " + ", ".join(f"{sign}{found[key]:g}" for key, sign in BOUNDS if key in found) if found else ""


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
    """The table of agent frameworks, from their last results: turns with equal tokens, and what fell short."""
    tried: dict[str, list[dict[str, Any]]] = {}
    for line in (ROOT / "benchmarks" / "results" / "frameworks.jsonl").read_text().splitlines():
        one = json.loads(line)
        tried.setdefault(one["framework"], []).append(one)
    rows = ["| framework | modes | tokens |", "|---|---|---|"]
    for name, modes in tried.items():
        tokens = " of ".join(str(sum(one["turns"][place] for one in modes)) for place in (0, 1))
        short = {key for key in ("groups", "truncated") for one in modes if one[key][0] < one[key][1]}
        wrong = dict.fromkeys([*sorted(short), *(complaint for one in modes for complaint in one["audit"])])
        cells = (
            f"[{name} {modes[0]['version']}](../../examples/agents/{name.replace('-', '_')}_agent.py)",
            ", ".join(one["mode"] or "default" for one in modes),
            ", ".join([tokens, *wrong]),
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
    usual = {name: max(found, key=found.count) for name, found in rules.items()}
    common = {name: rule for name, rule in usual.items() if rules[name].count(rule) > 1}
    tables = {"Each route that has the field, unless its list below differs": common}
    for path, own in routes.items():
        tables[f"`POST {path}`"] = {name: rule for name, rule in own.items() if rule != common.get(name)}
    return "\n\n".join(_field_table(head, own) for head, own in tables.items())


def _of_both(dialect: Dialect[Any], name: str) -> str:
    """A field's rule in words, with that of trained sessions where it differs."""
    rule = dialect.fields[name]
    trained = dialect.untrained.get(name, rule)
    if trained == rule or isinstance(rule, Unserved):
        return _rule(rule)
    only = ", ".join(f"`{json.dumps(value)}`" for value in getattr(trained, "values", ()))
    return f"{_rule(rule)}; in a trained session only {only}"


def _field_table(head: str, rules: Mapping[str, str]) -> str:
    """A list of fields; those with the same rule share a line, and refused ones come last."""
    names: dict[str, list[str]] = {}
    for name, rule in sorted(rules.items(), key=lambda item: (item[1] == REFUSED, item[1] == NO_EFFECT)):
        names.setdefault(rule, []).append(f"`{name}`")
    return "\n".join((f"### {head}\n", *(f"- {', '.join(own)}: {rule}" for rule, own in names.items())))


def _rule(rule: Rule) -> str:
    """A rule in words; errors name the workaround of a refused value."""
    match rule:
        case Served(how, values, _):
            return ": ".join(filter(None, (how, ", ".join(f"`{value}`" for value in values))))
        case Ignored(reason):
            return f"{NO_EFFECT}: {reason}" if ";" in reason else NO_EFFECT
    return REFUSED


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
