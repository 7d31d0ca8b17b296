"""Every name that a user chooses, misspelled: a sentence with the place, the name and the nearest right one."""

import inspect
from collections.abc import Iterator, Sequence
from enum import EnumType
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from typer.core import TyperGroup
from typer.main import get_command

from command import shoal
from shoal import checker, procedural
from shoal.cli import BENCHES, app
from shoal.cli.services import TEMPLATES
from shoal.config import Config, TaskConfig
from shoal.config.section import Section
from shoal.config.settings import EMBEDDED
from shoal.config.training import LOSSES
from shoal.observe.trackers import KINDS
from shoal.rollout.reward_hooks import HOOKS
from shoal.swarm.strategy.choice import SHARERS, TAKERS
from shoal.tasks.library import GAMES

FOREIGN = ("Traceback", "pydantic", "nput should be", "alid value", "Value error", "╭", "Usage:", "validation")


class Case(NamedTuple):
    """Arguments with one misspelled name, the place that the sentence names, and the names that are right there."""

    place: str
    right: str
    wrong: str
    arguments: tuple[str, ...]


def distance(one: str, other: str) -> int:
    """Number of letters to insert, drop or replace (Levenshtein)."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(other, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def misspelled(name: str, known: Sequence[str]) -> str | None:
    """The name with a letter doubled, dropped, or swapped, to which no other known name is as near; None for too
    short ones."""
    middle = len(name) // 2
    swapped = name[: middle - 1] + name[middle] + name[middle - 1] + name[middle + 1 :]
    for wrong in (name[:middle] + name[middle:][:1] + name[middle:], swapped, name[:middle] + name[middle + 1 :]):
        away = [distance(wrong, one) for one in known if one != name]
        if wrong not in known and distance(wrong, name) < min(away, default=len(wrong)):
            return wrong
    return None


def settings(section: type[Section], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Settings below a section with the names that each may have."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)]
        index = "0." if get_origin(field.annotation) is list else ""
        if len(inner) == 1:
            yield from settings(inner[0], f"{prefix}{name}.{index}")
        names = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
        if texts := [value for value in names if isinstance(value, str)]:
            yield f"{prefix}{name}", texts


def enumerated() -> Iterator[tuple[str, Sequence[str], tuple[str, ...]]]:
    """Places with the names that are right there, and arguments in which WRONG stands for one of them."""
    train = ("train", "CONFIG", "--dry-run")
    for key, names in settings(Config):
        listed = {"stages.0.kind": '--stages=[{kind = "WRONG"}]'}
        yield key, names, (*train, listed.get(key, f"--{key}=WRONG"))
    for loss, loss_kind in LOSSES.items():
        for key, names in settings(loss_kind):
            if key != "name":
                yield f"train.loss.{key}", names, (*train, f"--train.loss.name={loss}", f"--train.loss.{key}=WRONG")
        fields = list(loss_kind.model_fields)
        yield "train.loss.WRONG", fields, (*train, f"--train.loss.name={loss}", "--train.loss.WRONG=1")
    sections: dict[str, type[Section]] = {**Config.sections(), "tasks.0": TaskConfig}
    for name, section in sections.items():
        yield f"{name}.WRONG", list(section.model_fields), (*train, f"--{name}.WRONG=1")
    yield "train.loss", list(LOSSES), (*train, "--train.loss=WRONG")
    yield "scorer", checker.NAMES, (*train, "--tasks.0.scorer=WRONG")
    for name, checker_kind in checker.KINDS.items():
        table = f'--tasks.0.scorer={{name = "{name}", WRONG = 1}}'
        yield "scorer: WRONG", checker_kind.__struct_fields__, (*train, table)
        for field, kind in get_type_hints(checker_kind).items():
            if get_origin(kind) is Literal:
                yield (
                    f"scorer: {field}",
                    get_args(kind),
                    (*train, f'--tasks.0.scorer={{name = "{name}", {field} = "WRONG"}}'),
                )
    parts = '--tasks.0.scorer={name = "weighted", parts = [{scorer = "WRONG"}]}'
    yield "scorer: parts", checker.NAMES, (*train, parts)
    yield "reward", [name for name in HOOKS if ":" not in name], (*train, "--tasks.0.reward=WRONG")
    yield "swarm.take", list(TAKERS), (*train, "--swarm.take=WRONG")
    yield "swarm.share", list(SHARERS), (*train, "--swarm.share=WRONG")
    yield "metrics.trackers", list(KINDS), (*train, '--metrics.trackers=["WRONG:x"]')
    yield "model", [*EMBEDDED, "smollm2"], (*train, "--model.path=WRONG")
    yield "tasks.sums", GAMES, (*train, "--tasks.0.service=turns", "--tasks.0.path=WRONG")
    gym = ("--tasks.0.service=reasoning_gym", "--tasks.0.params={}", "--tasks.0.path=")
    yield "dataset", procedural.names()[::10], (*train, *gym, "--tasks.0.name=WRONG")
    yield "config file", ["config.toml"], ("train", "FOLDER/WRONG", "--dry-run")
    yield "rows", ["rows.jsonl"], (*train, "--tasks.0.path=FOLDER/WRONG")
    yield "own.py", ["right_reward"], (*train, "--tasks.0.reward=FOLDER/own.py:WRONG")
    yield "tasks.sums.reward", ["own.py"], (*train, "--tasks.0.reward=FOLDER/WRONG:right_reward")
    for command in ("status", "report", "audit", "chat", "view --no-open", "export --jsonl=x"):
        yield "run", ["my-first-run"], (*command.split(), "WRONG")
    yield "run", ["my-first-run"], ("train", "--resume", "WRONG")
    yield "bench", BENCHES, ("bench", "WRONG")
    yield "template", sorted(path.stem for path in TEMPLATES.iterdir()), ("cluster", "template", "WRONG")
    yield from commands(get_command(app), ())


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[str, Sequence[str], tuple[str, ...]]]:
    """Commands, their options and the arguments that have choices, below one command."""
    if isinstance(command, TyperGroup):
        yield " ".join(("shoal", *path)), sorted(command.commands), (*path, "WRONG")
        for name, inner in command.commands.items():
            yield from commands(inner, (*path, name))
        return
    options = [name for one in command.params for name in one.opts if name.startswith("--") and name != "--help"]
    yield "WRONG", [name for name in options if name != "--attached"], (*path, "WRONG")
    kinds = inspect.signature(inspect.unwrap(command.callback)).parameters
    for one in command.params:
        found = get_args(kinds[one.name].annotation) if one.name in kinds else ()
        if found and isinstance(found[0], EnumType):
            others = [text for other in command.params if other.required and other is not one for text in given(other)]
            yield one.name, [str(value.value) for value in found[0]], (*path, *given(one, "WRONG"), *others)


def given(parameter: Any, value: str = "demo") -> tuple[str, ...]:
    """A parameter's value as arguments."""
    options = [name for name in parameter.opts if name.startswith("--")]
    return (*options[:1], value)


def cases() -> Iterator[Case]:
    for place, names, arguments in enumerated():
        for right in names:
            if wrong := misspelled(right, names):
                given = tuple(one.replace("WRONG", wrong) for one in arguments)
                yield Case(place.replace("WRONG", wrong), right, wrong, given)


CASES = list(cases())


@pytest.fixture(scope="module")
def folder(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration that is right, a run and a file of code."""
    folder = tmp_path_factory.mktemp("right")
    (folder / "rows.jsonl").write_text("".join(f'{{"prompt": "{i}", "answer": "{i}"}}\n' for i in range(40)))
    (folder / "own.py").write_text("def right_reward(group):\n    return group\n")
    (folder / "runs" / "my-first-run").mkdir(parents=True)
    (folder / "config.toml").write_text(
        f'[model]\npath = "{tiny_model_dir}"\n[[tasks]]\nname = "sums"\nservice = "jsonl"\npath = "rows.jsonl"\n'
    )
    return folder


def test_there_are_hundreds_of_names_that_can_be_misspelled() -> None:
    assert len(CASES) > 300


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.place}: {case.wrong} for {case.right}")
def test_a_misspelled_name_is_answered_with_its_place_and_the_nearest_right_one(case: Case, folder: Path) -> None:
    given = [one.replace("CONFIG", "config.toml").replace("FOLDER", str(folder)) for one in case.arguments]
    said = shoal(*given, cwd=folder)
    assert said.returncode == 2, said
    assert said.stderr.startswith("shoal: ")
    for told in (case.place, case.wrong, case.right):
        assert told in said.stderr
    assert len(said.stderr.splitlines()) <= 2
    assert not [word for word in FOREIGN if word in said.stderr]
