"""Whatever is wrong with what the user gives: exit code 2, one sentence that names it, and no traceback."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from shoal.cli import main
from shoal.config import Config
from shoal.config.training import LossConfig

LOSSES = get_args(get_args(LossConfig)[0])
URLS = (
    "",
    "nonsense",
    "ftp://here:1",
    "http://",
    "http://:80",
    "http://here:0",
    "http://here:99999",
    "http://a b",
    "h:\n",
)
NATS_URLS = ("", "nats://", "nonsense", "http://here:1", "nats://:4222", "tls://here:70000", "nats://here:x")


class Case:
    """What is given to the command line, and what the sentence must name."""

    def __init__(self, name: str, arguments: Sequence[str], names: str) -> None:
        self.name, self.arguments, self.names = name, tuple(arguments), names


def settings_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every setting that is no section, by its dotted key."""
    for name, field in section.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if not inner:
            yield f"{prefix}{name}", field
        elif len(inner) == 1:
            yield from settings_of(inner[0], f"{prefix}{name}.{'0.' if get_origin(field.annotation) is list else ''}")


HOSTILE = (*("0x1" + "0" * 20, "9" * 5000, "1e400", "[" * 3000, "{x = " * 40 + "1" + "}" * 40), "\udcff")
"""What is refused before it is any setting's value; tried on one setting in ten."""


def wrong_values(field: FieldInfo) -> Iterator[str]:
    """TOML of values that a setting cannot have."""
    annotation = field.annotation
    yield '[["x"]]'
    if annotation in (int, float):
        yield from ("inf", "nan", '"many"', "99999999999999999999", "true", "[1]", "1979-05-27")
    elif annotation is str:
        yield from ('"a\\u0000b"', "1", "1979-05-27")
    elif annotation is bool:
        yield from ("2", '"perhaps"', "{}")
    elif get_origin(annotation) is Literal:
        yield from ('"nonsense"', "1", "{}")


def setting_cases() -> Iterator[Case]:
    for number, (key, field) in enumerate(settings_of(Config)):
        for value in (*wrong_values(field), *(HOSTILE if number % 10 == 0 else ())):
            yield Case(f"{key}={value[:30]}", ["train", "CONFIG", "--dry-run", f"--{key}={value}"], key.split(".")[0])
    for kind in LOSSES:
        loss = kind.model_fields["name"].default
        for key in kind.model_fields:
            arguments = [f"--train.loss.name={loss}", f"--train.loss.{key}=[inf]"]
            yield Case(f"{loss}.{key}", ["train", "CONFIG", "--dry-run", *arguments], "train.loss")
    for url in URLS:
        arguments = ["train", "CONFIG", "--dry-run", f"--engine.urls=[{json.dumps(url)}]"]
        yield Case(f"engine.urls={url}", arguments, "engine.urls")
    for url in NATS_URLS:
        arguments = ["train", "CONFIG", "--dry-run", f"--swarm.servers=[{json.dumps(url)}]"]
        yield Case(f"swarm.servers={url}", arguments, "swarm.servers")


CASES = list(setting_cases())


def sentence(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What the command says on standard error as it refuses."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    said = capsys.readouterr()
    assert ended.value.code == 2, said.err
    assert said.out == "" or "Usage" in said.out
    assert "Traceback" not in said.err
    return said.err


@pytest.fixture(scope="session")
def good(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a configuration that a dry run accepts."""
    folder = tmp_path_factory.mktemp("good")
    rows = [{"prompt": f"What is {i} + 1?", "answer": str(i + 1)} for i in range(40)]
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.toml").write_text(
        f"""
run_dir = {json.dumps(str(folder / "run"))}
[model]
path = {json.dumps(str(tiny_model_dir))}
[[tasks]]
name = "sums"
service = "jsonl"
path = "rows.jsonl"
"""
    )
    return folder


def test_there_are_three_hundred_of_them() -> None:
    assert len(CASES) >= 300


def test_what_is_right_passes_a_dry_run(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_ends_well(["train", str(good / "config.toml"), "--dry-run", "--json"])
    assert json.loads(capsys.readouterr().out)["devices"]


def test_a_dry_run_shows_what_a_preset_came_to(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main_ends_well(
        ["train", str(good / "config.toml"), "--dry-run", "--json", "--preset", "glm5", "--train.short_groups", "keep"]
    )
    shown = json.loads(capsys.readouterr().out)
    assert (shown["glm5: train.advantage"], shown["glm5: train.short_groups"]) == ("grpo_no_std", "keep")
    assert shown["glm5: train.loss"]["name"] == "double_sided"


@pytest.mark.parametrize(
    "arguments",
    [["train", "CONFIG", "--dry-run", "--train.lr", "2e-3"], ["train", "--train.lr", "2e-3", "CONFIG", "--dry-run"]],
)
def test_a_setting_s_value_may_follow_after_a_space_and_settings_stand_anywhere(
    arguments: Sequence[str], good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main_ends_well([str(good / "config.toml") if one == "CONFIG" else one for one in arguments])
    capsys.readouterr()
    said = sentence(["train", str(good / "config.toml"), "--dry-run", "--train.lr", "two"], capsys)
    assert "train.lr: expected a number, got 'two'" in said


def test_the_version_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    main_ends_well(["--version"])
    assert re.fullmatch(r"shoal \d+\.\d+\S*\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments", [["train", "none.toml"], ["trian"], ["train", "x", "--tasks.0.weight=inf"], ["audit", "none"]]
)
def test_a_process_of_its_own_refuses_as_well(arguments: Sequence[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "shoal.cli", *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Traceback" not in done.stderr


def main_ends_well(arguments: Sequence[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_setting_that_cannot_be_is_refused_by_name(
    case: Case, good: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(good / "config.toml") if one == "CONFIG" else one for one in case.arguments]
    said = sentence(arguments, capsys)
    assert case.names in said
    assert said.startswith("shoal: ")
    assert len(said.splitlines()) == 1
