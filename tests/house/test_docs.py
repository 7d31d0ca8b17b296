"""The documents are true of the code: links, examples, commands, generated tables."""

import ast
import doctest
import importlib
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer
from test_layers import SOURCE, modules

from shoal.config import Config, parse
from shoal.net.joining import Admitted, NotJoined
from shoal.tasks.remote_protocol import DrawJob, JobDone, JobFailed, RolloutJob, ScoreJob, TaskRole

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
DOCTESTED = [name for name, source in modules() if ">>> " in source]
SETTING = re.compile(rf"--(?:\w+\.|(?:{'|'.join(Config.model_fields)})=)")
MODULES = {path.relative_to(SOURCE).as_posix() for path in SOURCE.rglob("*.py")}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page that are marked with a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_between_documents_leads_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    for target in targets:
        if target.startswith(("https://", "http://")):
            continue
        name, _, anchor = target.partition("#")
        linked = (page.parent / name) if name else page
        assert linked.exists(), f"{page.name} links to {target}, which does not exist"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}, which has no such heading"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_example_of_a_document_is_valid(page: Path) -> None:
    for text in blocks(page, "toml"):
        parse(tomllib.loads(text))
    for text in blocks(page, "json"):
        json.loads(text)
    for text in blocks(page, "python"):
        exec(compile(text, str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_headings_begin_lines_behind_an_empty_one(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"^.*\S +#{2,} .*$|^[^\n#].*\n#{2,} .*$", prose, re.MULTILINE)


def test_the_pure_cores_whose_coverage_is_measured_exist() -> None:
    """Coverage says nothing about a file that is not there."""
    named = re.search(r"^PURE := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert named is not None
    names = named[1].replace("\\", " ").split()
    assert len(names) > 10
    assert [name for name in names if f"{name}.py" not in MODULES] == []


def test_the_readme_has_a_configuration_to_begin_with() -> None:
    assert len(blocks(ROOT / "README.md", "toml")) == 1


def test_the_generated_tables_are_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "docs.py", "--check"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_the_page_of_commands_has_every_command_of_the_command_line() -> None:
    from shoal.cli import app

    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    listed = re.findall(r"^- `shoal (\w+)", page, re.MULTILINE)
    named = [command.name or command.callback.__name__ for command in app.registered_commands if not command.hidden]
    named += [group.name or group.typer_instance.info.name for group in app.registered_groups]
    assert sorted(set(listed)) == sorted(named)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_shoal_command_of_a_document_is_one_that_the_command_line_takes(page: Path) -> None:
    text = page.read_text() if page.name != "CHANGELOG.md" else ""  # which also names what is no more
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines() if text else []
    for line in [*lines, *re.findall(r"`([^`\n]*)`", text)]:
        if found := re.search(r"(?:^|[\s/])shoal (?=-|[a-z]+\b)(.*)", line):
            words = shlex.split(re.split(r"\s#|\s\||&&|;|\s>|\s&$", found[1])[0])
            settings = [word for word in words if SETTING.match(word)]
            parse({"tasks": [{"name": "chain_sum"}]}, [word.removeprefix("--") for word in settings])
            taken([word for word in words if word not in settings])


def taken(words: list[str]) -> None:
    """Has the command line parse words without running their command. Raises `UsageError`."""
    from shoal.cli import app

    command = typer.main.get_command(app)
    context = typer.Context(command)
    while words and (inner := getattr(command, "commands", {})) and not words[0].startswith("-"):
        assert words[0] in inner, f"shoal has no command {words[0]}"
        command, context, words = inner[words[0]], typer.Context(inner[words[0]], parent=context), words[1:]
    command.make_parser(context).parse_args(list(words))


def made(makefile: str) -> set[str]:
    """The targets of a Makefile that have a rule; those of a variable by name."""
    lists = dict(re.findall(r"^(\w+) := (.*)$", makefile.replace("\\\n", " "), re.MULTILINE))
    rules = re.findall(r"^([\w $()-]+):(?!=)", makefile, re.MULTILINE)
    return {name for rule in rules for name in re.sub(r"\$\((\w+)\)", lambda one: lists[one[1]], rule).split()}


def test_every_target_that_a_page_names_has_a_rule_in_the_makefile() -> None:
    targets = made((ROOT / "Makefile").read_text())
    pages = {page.name: page.read_text() for page in PAGES}
    named = {
        (page, name)
        for page, text in pages.items()
        for name in re.findall(r"(?:`|^)make ([a-z][\w-]*)", text, re.MULTILINE)
    }
    assert {("README.md", "demo"), ("CONTRIBUTING.md", "test")} <= named
    assert {(page, name) for page, name in named if name not in targets} == set()


def test_the_figures_of_automatic_ratios_are_those_of_their_data() -> None:
    text = " ".join((ROOT / "docs" / "guides" / "tasks.md").read_text().partition("## Automatic ratios")[2].split())
    data = json.loads((ROOT / "experiments" / "balance" / "results" / "automatic.json").read_text())
    before, after = data["evaluations"]
    said = re.search(
        r"for (\d+) steps .* Over the last (\d+) steps their shares were ([\d.]+), ([\d.]+) and (0\.\d+)", text
    )
    went = re.search(r"accuracy of `spell_backward` went from ([\d.]+) to ([\d.]+) \((\d+) questions\)", text)
    assert said
    assert went
    assert [int(said[1]), int(said[2])] == [after["step"], data["window"]]
    assert int(went[3]) == after["questions"] / len(data["shares"])
    wanted = [data["shares"][task][-1] for task in ("mastered", "impossible", "spell_backward")]
    wanted += [one["sampled/spell_backward"] for one in (before, after)]
    found = [*said.groups()[2:], *went.groups()[:2]]
    assert [float(one) for one in found] == pytest.approx(wanted, abs=0.0051)


def test_sentences_and_tables_say_what_their_raw_files_have() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools" / "measured.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_page_of_tasks_has_every_message_of_a_worker_with_its_fields() -> None:
    table = (
        (ROOT / "docs" / "guides" / "tasks.md")
        .read_text()
        .partition("| message | from | has |")[2]
        .partition("\n\n")[0]
    )
    named = set(re.findall(r"`(\w+)`", table))
    messages = (TaskRole, Admitted, NotJoined, DrawJob, RolloutJob, ScoreJob, JobDone, JobFailed)
    wanted = {str(kind.__struct_config__.tag) for kind in messages}
    assert named == wanted.union(*(kind.__struct_fields__ for kind in messages))


def test_the_page_of_a_run_has_every_event() -> None:
    listed = set(
        re.findall(r"`(\w+)`", (ROOT / "docs" / "reference" / "run.md").read_text().partition("of kind `event`")[2])
    )
    logged = re.compile(r"(?:log_event|on_event)\(\s*\"([a-z_]+)\"")
    found = {name for path in SOURCE.rglob("*.py") for name in logged.findall(path.read_text())}
    assert len(found) >= 10
    assert found <= listed


def test_functions_that_the_algorithms_name_exist() -> None:
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text)
    assert len(named) >= 8
    for module, name in named:
        assert module in MODULES, module
        assert name.partition(".")[0] in defined((SOURCE / module).read_text()), f"{module} has no {name}"
    for name in re.findall(r"`loss\.(\w+)`", text):
        assert name in defined((SOURCE / "trainer" / "loss.py").read_text())


def test_the_papers_in_the_algorithms_are_settings_that_exist() -> None:
    text = (ROOT / "docs" / "reference" / "algorithms.md").read_text()
    table = text.partition("### Papers as settings")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (?!paper|---)(.*)$", table, re.MULTILINE)
    assert len(rows) >= 10
    for row in rows:
        settings = re.findall(r"`([\w.]+ = [^`]+)`", row)
        config = parse(
            {"tasks": [{"name": "chain_sum"}]}, [f"train.{setting.replace(' = ', '=')}" for setting in settings]
        )
        assert settings[0] == f'loss.name = "{config.train.loss.name}"', row


def test_every_room_is_in_the_architecture() -> None:
    text = (ROOT / "docs" / "developers" / "architecture.md").read_text()
    rows = " ".join(re.findall(r"^- (`[^:]*):", text, re.MULTILINE))
    named = {name.rstrip("/") for name in re.findall(r"`([\w/]+)`", rows)}
    assert {name.partition(".")[0] for name, _ in modules()} <= named


@pytest.mark.parametrize("name", DOCTESTED)
def test_examples_in_docstrings_give_what_they_say(name: str) -> None:
    outcome = doctest.testmod(importlib.import_module(f"shoal.{name}"))
    assert outcome.attempted > 0
    assert outcome.failed == 0


def test_every_constraint_is_one_pinned_version_with_torch_first_and_every_dependency_has_one() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert lines[0].startswith("torch==")
    for line in lines:
        assert re.fullmatch(r"[a-z0-9-]+==[\w.]+", line), line
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[^\w-]", text)[0] for text in needed}
    assert names <= {line.partition("==")[0] for line in lines}


def defined(source: str) -> set[str]:
    """Names of the functions and classes of a module."""
    return {
        node.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
