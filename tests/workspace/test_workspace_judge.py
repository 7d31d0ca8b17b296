"""A verdict comes from hidden tests alone: what an agent left where tests are counts for nothing."""

import asyncio
import dataclasses
import os
import subprocess
import sys
import threading
from pathlib import Path

import msgspec
import pytest

from shoal.errors import SandboxUnavailable, TaskError
from shoal.workspace.fork import ForkKind, fork, fork_kind
from shoal.workspace.judge import HiddenTests, Verdict, judge
from shoal.workspace.reports import MOST_TAGS, ReportKind, TestStatus, results
from shoal.workspace.task import patched
from shoal.workspace.tree import Tree, tree_of

pytest_plugins = ("small_workspaces",)
RED, GREEN = "tests/test_sums.py::test_it_adds", "tests/test_sums.py::test_it_is_callable"
MENDED = "sed -i s/a\\ -\\ b/a+b/ sums.py"
FORGING = (
    "import _pytest.reports\n"
    "made = _pytest.reports.TestReport.from_item_and_call\n"
    "def forged(item, call):\n"
    "    report = made(item, call)\n"
    "    report.outcome, report.longrepr = 'passed', None\n"
    "    return report\n"
    "_pytest.reports.TestReport.from_item_and_call = forged\n"
    "add = print\n"
)


@pytest.fixture(params=[ForkKind.OVERLAY, ForkKind.COPY])
def kind(request: pytest.FixtureRequest) -> ForkKind:
    if request.param is ForkKind.OVERLAY and fork_kind() is not ForkKind.OVERLAY:
        pytest.skip(f"this machine forks by {fork_kind()}")
    return ForkKind(request.param)


def verdict(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...], *commands: str, kind: ForkKind | None = None
) -> Verdict:
    async def played() -> Verdict:
        with fork(tree, kind, packages=packages) as workspace:
            for command in commands:
                await workspace.run(command)
            return await judge(workspace, hidden)

    return asyncio.run(played())


def test_a_mended_tree_gets_the_reward_and_an_untouched_one_none(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...], kind: ForkKind
) -> None:
    untouched = verdict(tree, hidden, packages, kind=kind)
    assert (untouched.reward, untouched.still_red, untouched.turned_red) == (0.0, (RED,), ())
    mended = verdict(tree, hidden, packages, MENDED, kind=kind)
    assert (mended.reward, mended.turned_green, mended.is_forged) == (1.0, (RED,), False)
    assert mended.tests == {RED: TestStatus.PASSED, GREEN: TestStatus.PASSED}


def test_a_green_test_that_turned_red_takes_the_reward(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]
) -> None:
    broken = verdict(tree, hidden, packages, "echo 'raise SystemExit(0)' > sums.py")
    assert (broken.reward, broken.turned_red) == (0.0, (GREEN,))


@pytest.fixture
def marked(hidden: HiddenTests) -> HiddenTests:
    content = (
        "import pytest\nfrom sums import add\ndef test_a():\n    assert add(1, 2) == 3\n"
        "def test_b():\n    assert add(0, 0) == 0\n@pytest.mark.xfail\ndef test_c():\n    assert add(1, 2) == 4\n"
        "@pytest.mark.skip\ndef test_d():\n    pass\n"
    )
    red, *green = (f"hidden/test_more.py::test_{letter}" for letter in "abcd")
    return msgspec.structs.replace(
        hidden,
        command=("python", "-m", "pytest", "hidden/test_more.py"),
        files={"hidden/test_more.py": content},
        red=(red,),
        green=tuple(green),
    )


def test_a_green_test_may_be_skipped_or_fail_as_expected_where_it_is_so_without_the_agent(
    tree: Tree, marked: HiddenTests, packages: tuple[Path, ...], kind: ForkKind
) -> None:
    mended = verdict(tree, marked, packages, MENDED, kind=kind)
    assert (mended.reward, mended.turned_red) == (1.0, ())
    assert [*mended.tests.values()] == ["passed", "passed", "xfailed", "skipped"]


@pytest.mark.parametrize(
    "outcome",
    [
        "import unittest; raise unittest.SkipTest('')",
        "import pytest; pytest.skip('')",
        "import pytest; pytest.xfail('')",
        "import pytest; pytest.importorskip('nowhere')",
        "import pytest; pytest.exit('', 0)",
        "import gc, pytest; [i.add_marker('xfail') for i in gc.get_objects() if type(i) is pytest.Function]; 1 / 0",
    ],
)
def test_a_green_test_that_the_agent_s_code_skips_or_expects_to_fail_takes_the_reward(
    outcome: str, tree: Tree, marked: HiddenTests, packages: tuple[Path, ...]
) -> None:
    code = f"def add(a, b):\n    if a == 0:\n        {outcome}\n    return a + b\n"
    seen = verdict(tree, marked, packages, f"cat > sums.py <<'EOF'\n{code}EOF")
    assert (seen.reward, seen.turned_green) == (0.0, (marked.red[0],))
    assert marked.green[0] in seen.turned_red


def test_a_skip_that_cannot_be_compared_with_the_untouched_tree_is_no_verdict(
    source: Path, marked: HiddenTests, packages: tuple[Path, ...]
) -> None:
    (source / "sums.py").write_text("import os\ndef add(a, b):\n    os._exit(0)\n    return a - b\n")
    assert verdict(tree_of(source), marked, packages).reward == 0.0
    with pytest.raises(SandboxUnavailable, match=r"untouched tree left no result of hidden/test_more.py::test_c$"):
        verdict(tree_of(source), marked, packages, "sed -i /_exit/d sums.py", MENDED)


def test_an_expected_failure_is_no_success_of_unittest() -> None:
    output = "test_a (sums.Sums.test_a) ... expected failure\ntest_b (sums.Sums.test_b) ... ok\n"
    found = results(ReportKind.UNITTEST, b"", output, 0)
    assert found == {"sums.Sums.test_a": TestStatus.XFAILED, "sums.Sums.test_b": TestStatus.PASSED}


def test_each_red_test_counts_for_its_share(tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]) -> None:
    content = (
        "from sums import add\ndef test_a():\n    assert add(1, 2) == 3\ndef test_b():\n    assert add(1, 2) == 4\n"
    )
    more = msgspec.structs.replace(
        hidden,
        command=("python", "-m", "pytest", "hidden/test_more.py"),
        files={"hidden/test_more.py": content},
        red=("hidden/test_more.py::test_a", "hidden/test_more.py::test_b"),
        green=(),
    )
    assert verdict(tree, more, packages, MENDED).reward == 0.5


TRICKS = [
    "printf 'def test_it_adds(): pass\\ndef test_it_is_callable(): pass\\n' > tests/test_sums.py",
    "rm -r tests; ln -s /workspace/mine tests; mkdir mine; echo 'def test_it_adds(): pass' > mine/test_sums.py",
    "printf 'def pytest_runtest_call(item): item.obj = lambda: 0\\n' > conftest.py; cp conftest.py tests/",
    "printf '[pytest]\\naddopts = --co\\n' > pytest.ini",
    "mkdir pytest; touch pytest/__init__.py; echo 'print(1)' > pytest/__main__.py",
    "echo 'import os; os._exit(0)' > sitecustomize.py; cp sitecustomize.py usercustomize.py",
    "for name in unittest pluggy _pytest; do mkdir $name; touch $name/__init__.py; done",
    "echo 'import sys; sys.exit(0)' > sums.py",
    "echo 'import os; os._exit(0)' > sums.py",
    "echo 'raise KeyboardInterrupt' > sums.py",
    f"cat > sums.py <<'EOF'\n{FORGING}EOF",
    "rm -rf $HOME; rm -rf /shoal-home/*; ln -s /etc/passwd /shoal-home/report.xml",
    "rm sums.py; mkfifo sums.py",
    "rm -rf tests; echo file > tests",
]
OF_FILES = [trick for trick in TRICKS if trick.startswith("rm ")]
"""Tricks that depend on how the tree is forked."""


@pytest.mark.parametrize(
    ("trick", "kind"),
    [(trick, ForkKind.OVERLAY) for trick in TRICKS] + [(trick, ForkKind.COPY) for trick in OF_FILES],
    indirect=["kind"],
)
def test_no_trick_gets_a_reward(
    trick: str, tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...], kind: ForkKind
) -> None:
    quick = msgspec.structs.replace(hidden, wall_s=8.0)
    assert verdict(tree, quick, packages, trick, kind=kind).reward == 0.0


OWN_CHECK = "import subprocess, sums\nassert sums.add(1, 2) == 3, subprocess\n"
SHADOWS = [
    "echo 'import os; os._exit(0)' > subprocess.py",
    "echo 'import os; os._exit(0)' > checks/subprocess.py; touch checks/__init__.py",
    "mkdir subprocess; echo 'import os; os._exit(0)' > subprocess/__init__.py; chmod 300 subprocess",
    "echo 'import os; os._exit(0)' > subprocess.py; chmod 300 .",
    "mkdir mine; echo 'import os; os._exit(0)' > mine/__init__.py; ln -s mine subprocess",
    "echo 'import os; os._exit(0)' > a.py; python -c 'import py_compile as p; p.compile(\"a.py\", \"subprocess.pyc\")'",
]


@pytest.mark.parametrize("script", ["check.py", "checks/check.py"])
@pytest.mark.parametrize("shadow", SHADOWS)
def test_no_module_of_an_agent_takes_the_place_of_one_that_a_check_imports(
    shadow: str, script: str, tree: Tree, kind: ForkKind
) -> None:
    command = ("/bin/bash", "-c", f"PYTHONPATH=. python {script}")
    hidden = HiddenTests(command, ReportKind.EXIT_CODE, {script: OWN_CHECK})
    assert verdict(tree, hidden, (), f"mkdir -p checks; {shadow}", kind=kind).reward == 0.0
    assert verdict(tree, hidden, (), f"mkdir -p checks; {shadow}; {MENDED}; chmod 755 .", kind=kind).reward == 1.0


PLUGIN = (
    "print('PLUGGED')\ndef pytest_terminal_summary(terminalreporter):\n    terminalreporter.write_line('PLUGGED')\n"
)


@pytest.mark.parametrize(
    "place",
    [
        "cat > hidden/conftest.py",
        "cat > iniconfig.py",
        "mkdir a.dist-info; printf '[pytest11]\na = mine\n' > a.dist-info/entry_points.txt; "
        "printf 'Name: a\nVersion: 1\n' > a.dist-info/METADATA; cat > mine.py",
        "printf '[pytest]\naddopts = -p mine\n' > hidden/pytest.ini; cat > mine.py",
    ],
)
def test_no_module_of_an_agent_becomes_a_plugin_of_pytest(place: str, tree: Tree, packages: tuple[Path, ...]) -> None:
    content = "from sums import add\ndef test_a():\n    print('ran', add(1, 2))\n    assert add(1, 2) == 3\n"
    command = ("python", "-m", "pytest", "-q", "-rA", "hidden/test_more.py")
    hidden = HiddenTests(command, files={"hidden/test_more.py": content}, red=("hidden/test_more.py::test_a",))
    seen = verdict(tree, hidden, packages, f"mkdir -p hidden; {place} <<'EOF'\n{PLUGIN}EOF")
    assert (seen.reward, "ran -1" in seen.log, "PLUGGED" in seen.log) == (0.0, True, False)


@pytest.mark.parametrize("more", ["true", "touch src/__init__.py"])
def test_a_plugin_in_the_folder_of_sources_steers_no_verdict(
    more: str, source: Path, packages: tuple[Path, ...]
) -> None:
    content = "from sums import add\ndef test_a():\n    print('ran', add(1, 2))\n    assert add(1, 2) == 3\n"
    script = 'PYTHONPATH="src:$PYTHONPATH" exec python -m pytest -q -rA hidden/test_more.py "$@"'
    files = {"hidden/test_more.py": content}
    hidden = HiddenTests(("/bin/bash", "-c", script, "bash"), files=files, red=("hidden/test_more.py::test_a",))
    entry = "mkdir -p src/a.dist-info; printf '[pytest11]\na = mine\n' > src/a.dist-info/entry_points.txt"
    named = "printf 'Name: a\nVersion: 1\n' > src/a.dist-info/METADATA"
    seen = verdict(
        tree_of(source), hidden, packages, f"{entry}; {named}; {more}; cat > src/mine.py <<'EOF'\n{PLUGIN}EOF"
    )
    assert (seen.reward, "ran -1" in seen.log, "PLUGGED" in seen.log) == (0.0, True, False)


def test_a_tree_in_which_the_hidden_tests_cannot_begin_has_no_verdict(tree: Tree, hidden: HiddenTests) -> None:
    with pytest.raises(SandboxUnavailable, match="No module named pytest"):
        verdict(tree, hidden, (), MENDED)


ENTRY = "[pytest11]\na = mine\n"


@pytest.mark.parametrize("entry", ["a.egg-info/entry_points.txt", "b.egg-info/entry_points.txt"])
def test_an_agent_s_installation_keeps_its_version_but_gives_pytest_no_plugin(
    entry: str, source: Path, packages: tuple[Path, ...], kind: ForkKind
) -> None:
    (source / "a.egg-info").mkdir()
    (source / "a.egg-info" / "entry_points.txt").write_text("[console_scripts]\na = a:main\n")
    content = (
        "from importlib.metadata import entry_points, version\nfrom sums import add\n"
        "def test_a():\n    assert (version('a'), version('b'), add(1, 2)) == ('1', '2', 3)\n"
        "    assert [one.value for one in entry_points(name='a')] == ['a:main']\n"
    )
    command = ("python", "-m", "pytest", "-q", "test_more.py")
    hidden = HiddenTests(command, files={"test_more.py": content}, red=("test_more.py::test_a",))
    versions = "printf 'Version: 1\n' > a.egg-info/PKG-INFO; printf 'Version: 2\n' > b.egg-info/PKG-INFO"
    plugged = f"mkdir b.egg-info; {versions}; printf '{ENTRY}' > {entry}; cat > mine.py <<'EOF'\n{PLUGIN}EOF"
    seen = verdict(tree_of(source), hidden, packages, MENDED, plugged, kind=kind)
    assert (seen.reward, "PLUGGED" in seen.log) == (1.0, False), seen.log


def test_an_agent_s_own_modules_stay_in_a_package_beside_its_hidden_tests(
    source: Path, packages: tuple[Path, ...]
) -> None:
    (source / "own").mkdir()
    (source / "own" / "__init__.py").touch()
    content = "from own.types import x\ndef test_a():\n    assert x == 1\n"
    command = ("python", "-m", "pytest", "-q", "own/test_types.py")
    hidden = HiddenTests(command, files={"own/test_types.py": content}, red=("own/test_types.py::test_a",))
    assert verdict(tree_of(source), hidden, packages, "echo x = 1 > own/types.py").reward == 1.0


def test_an_agent_s_new_package_may_have_modules_with_names_of_python_s_around_its_hidden_tests(
    tree: Tree, packages: tuple[Path, ...], kind: ForkKind
) -> None:
    content = "from new.types import x\ndef test_a():\n    assert x == 1\n"
    command = ("python", "-m", "pytest", "-q", "-o", "pythonpath=.", "new/tests/test_types.py")
    hidden = HiddenTests(command, files={"new/tests/test_types.py": content}, red=("new/tests/test_types.py::test_a",))
    made = "mkdir new; echo x = 1 > new/types.py"
    assert verdict(tree, hidden, packages, f"{made}; touch new/__init__.py", kind=kind).reward == 1.0
    assert verdict(tree, hidden, packages, f"{made}; ln -s /dev/null new/__init__.py", kind=kind).reward == 0.0


@pytest.mark.parametrize("lie", ["/usr/bin/check", "/etc/rules"])
def test_an_agent_s_tools_of_an_image_count_for_nothing_where_all_outside_of_its_place_is_restored(
    lie: str, image_root: Path, kind: ForkKind
) -> None:
    check = "#!/bin/bash\n[[ ! -f /etc/rules ]] || . /etc/rules\n[[ $(<value) == $(<wanted) ]]\n"
    (image_root / "usr" / "bin" / "check").write_text(check)
    (image_root / "usr" / "bin" / "check").chmod(0o755)
    (image_root / "home" / "agent" / "work").mkdir(parents=True)
    (image_root / "home" / "agent" / "work" / "value").write_text("1\n")
    tree = tree_of(image_root, place="/home/agent/work")
    hidden = HiddenTests(("/bin/bash", "-c", "check"), ReportKind.EXIT_CODE, {"wanted": "3\n"}, restored=("/",))
    assert verdict(tree, hidden, (), f"echo exit 0 > {lie}", kind=kind).reward == 0.0
    assert verdict(tree, hidden, (), f"echo exit 1 > {lie}; echo 3 > value", kind=kind).reward == 1.0


def test_a_forged_report_is_seen(tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]) -> None:
    assert verdict(tree, hidden, packages, f"cat > sums.py <<'EOF'\n{FORGING}EOF").is_forged


def test_the_agent_finds_neither_hidden_tests_nor_packages_that_it_was_not_given(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]
) -> None:
    async def played() -> str:
        secret = msgspec.structs.replace(hidden, files={"tests/test_hidden.py": "SECRET = 'swordfish'\n"})
        with fork(tree, packages=packages) as workspace:
            await judge(workspace, secret)
            found = await workspace.run(
                "grep -rl swordfish /workspace /tmp /shoal-home; python -c 'import shoal, torch'"
            )
            return found.stdout.decode()

    assert "test_hidden" not in asyncio.run(played())
    assert "ModuleNotFoundError" in asyncio.run(played())


def test_what_cannot_be_judged_is_a_failure_and_no_score(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]
) -> None:
    async def played() -> None:
        with fork(tree, packages=packages) as workspace:
            gone = dataclasses.replace(workspace.tree, layers=(tree.layers[0] / "gone",))
            workspace.tree = gone
            await judge(workspace, hidden)

    with pytest.raises(SandboxUnavailable):
        asyncio.run(played())


@pytest.mark.parametrize(
    ("kind", "output", "expected"),
    [
        (
            ReportKind.UNITTEST,
            "test_a (t.A.test_a) ... ok\ntest_b (t.A)\nWhat it does ... FAIL\n",
            {"t.A.test_a": "passed", "t.A.test_b": "failed"},
        ),
        (ReportKind.UNITTEST, "test_c (t.A.test_c) ... skipped 'no'\nRan 3 tests ... ok\n", {"t.A.test_c": "skipped"}),
        (
            ReportKind.TAP,
            "1..4\nok 1 - a\nnot ok 2 - b\nok 3 # SKIP no\nnot ok 4 - d # TODO later\n",
            {"a": "passed", "b": "failed", "3": "skipped", "d": "xfailed"},
        ),
        (ReportKind.EXIT_CODE, "", {"exit": "passed"}),
        (ReportKind.JUNIT, "", {}),
    ],
)
def test_reports_are_read(kind: ReportKind, output: str, expected: dict[str, str]) -> None:
    assert dict(results(kind, b"", output, 0)) == expected


def test_a_junit_report_has_the_ids_of_pytest() -> None:
    report = b"""<testsuites><testsuite>
    <testcase file="tests/test_a.py" classname="tests.test_a.TestB" name="test_c[1]"/>
    <testcase file="tests/test_a.py" classname="tests.test_a" name="test_d"><error/></testcase>
    <testcase file="tests/test_a.py" classname="tests.test_a" name="test_d"/>
    <testcase file="tests/test_a.py" classname="tests.test_a" name="test_e"><skipped/></testcase>
    </testsuite></testsuites>"""
    assert dict(results(ReportKind.JUNIT, report, "", 1)) == {
        "tests/test_a.py::TestB::test_c[1]": "passed",
        "tests/test_a.py::test_d": "failed",
        "tests/test_a.py::test_e": "skipped",
    }


def test_hidden_tests_stay_inside_of_the_tree() -> None:
    with pytest.raises(TaskError, match="inside of the tree"):
        HiddenTests(files={"../outside": ""})


def test_an_exit_code_decides_where_a_command_has_no_report(tree: Tree) -> None:
    script = HiddenTests(
        ("/bin/bash", "/checks/run.sh"), ReportKind.EXIT_CODE, {"/checks/run.sh": "grep -q plus sums.py\n"}
    )
    assert verdict(tree, script, ()).reward == 0.0
    assert verdict(tree, script, (), "echo plus >> sums.py").reward == 1.0


def test_a_report_of_more_tags_than_tests_could_need_is_not_read() -> None:
    case = b'<testcase file="a.py" name="test"/>'
    assert results(ReportKind.JUNIT, b"<a>" + case * MOST_TAGS + b"</a>", "", 0) == {}
    assert results(ReportKind.JUNIT, b"<a>" + case * 1000 + b"</a>", "", 0) == {"a.py::test": TestStatus.PASSED}


@pytest.mark.parametrize(("files", "restored"), [({"tests/new.py": "x = 1\n"}, ("tests",)), ({}, ("tests/old.py",))])
def test_no_link_of_a_tree_leads_the_hidden_tests_out_of_it(
    files: dict[str, str], restored: tuple[str, ...], tmp_path: Path, own_cache: None
) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "old.py").write_text("y = 2\n")
    (tmp_path / "source" / "tests").symlink_to(tmp_path / "outside")
    with pytest.raises(TaskError, match="inside of the tree"):
        verdict(tree_of(tmp_path / "source"), HiddenTests(files=files, restored=restored), ())
    assert [one.name for one in (tmp_path / "outside").iterdir()] == ["old.py"]


def test_a_folder_in_the_report_s_place_is_a_report_without_tests(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]
) -> None:
    folder = "import os\nos.makedirs('/shoal-home/report.xml', exist_ok=True)\nadd = print\n"
    assert verdict(tree, hidden, packages, f"cat > sums.py <<'EOF'\n{folder}EOF").reward == 0.0


FULL = """
import asyncio, os, sys
from pathlib import Path
from shoal.errors import SandboxUnavailable
from shoal.workspace.fork import ForkKind, fork
from shoal.workspace.judge import HiddenTests, judge
from shoal.workspace.tree import tree_of, trees_directory
(source := Path(os.environ["XDG_CACHE_HOME"], "source")).mkdir()
(source / "program.py").write_text("x" * 300_000)
hidden = HiddenTests(files={"test_hidden.py": "y" * 500_000})
with fork(tree_of(source), ForkKind.COPY) as workspace:
    try:
        asyncio.run(judge(workspace, hidden))
    except SandboxUnavailable as error:
        assert "No space" in str(error), error
        print(len([*(trees_directory() / "forks").iterdir()]))
"""


def test_a_verdict_for_which_the_disk_has_no_room_leaves_no_fork(tmp_path: Path) -> None:
    mounted = f'mount -t tmpfs -o size=2m none {tmp_path} && exec {sys.executable} -c "$0"'
    command = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mounted, FULL]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    found = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert found.stdout == "1\n", found.stderr


async def test_files_are_copied_in_threads_so_that_no_other_rollout_waits(
    tree: Tree, hidden: HiddenTests, packages: tuple[Path, ...]
) -> None:
    copying: list[threading.Thread] = []

    def note(event: str, given: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and given[0] == "cp":
            copying.append(threading.current_thread())

    with fork(tree, ForkKind.COPY, packages=packages) as workspace:
        sys.addaudithook(note)
        await judge(workspace, hidden)
        assert len(copying) == 1
        await patched(
            tree, "--- a/sums.py\n+++ b/sums.py\n@@ -1,2 +1,2 @@\n-def add(a, b):\n+def add(a, c):\n     return a - b\n"
        )
        assert len(copying) == 2
    assert threading.main_thread() not in copying
