"""Trees are named by their content; forks share nothing but the tree; a shell goes on from command to command."""

import asyncio
import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from shoal.errors import TaskError
from shoal.sandbox.command import own_package
from shoal.sandbox.program import Ended, ProgramLimits
from shoal.workspace.fork import LIMITS, ForkKind, Workspace, fork, fork_kind, new_folder, sweep
from shoal.workspace.tree import Tree, discard, tree_named, tree_of, trees_directory

pytest_plugins = ("small_workspaces",)
KINDS = (ForkKind.OVERLAY, ForkKind.COPY)


def said(workspace: Workspace, command: str, limits: ProgramLimits = LIMITS) -> str:
    return asyncio.run(workspace.run(command, limits)).stdout.decode()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> ForkKind:
    if request.param is ForkKind.OVERLAY and fork_kind() is not ForkKind.OVERLAY:
        pytest.skip(f"this machine forks by {fork_kind()}")
    return ForkKind(request.param)


def test_a_tree_has_the_same_name_from_a_directory_a_tar_a_wheel_and_a_bundle(source: Path, tmp_path: Path) -> None:
    (source / "run.sh").write_text("echo run\n")
    with tarfile.open(tmp_path / "made-1.0.tar.gz", "w:gz") as archive:
        archive.add(source, "made-1.0")
    with zipfile.ZipFile(tmp_path / "made.whl", "w") as wheel:
        for path in source.rglob("*.*"):
            wheel.write(path, path.relative_to(source))
    names = {tree_of(path).digest for path in (source, tmp_path / "made-1.0.tar.gz", tmp_path / "made.whl")}
    assert len(names) == 1
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(source)]
    for words in (
        ["init", "-q"],
        ["add", "."],
        ["commit", "-qm", "all"],
        ["bundle", "create", "-q", "../a.bundle", "HEAD"],
    ):
        subprocess.run([*git, *words], check=True)
    assert (tree_of(tmp_path / "a.bundle").base / "run.sh").read_text() == "echo run\n"


def test_a_changed_byte_a_mode_or_a_name_gives_another_tree_and_no_change_the_same(source: Path) -> None:
    first = tree_of(source)
    assert tree_of(source) == first == tree_named(first.digest)
    (source / "sums.py").chmod(0o755)
    second = tree_of(source)
    (source / "sums.py").rename(source / "sum.py")
    third = tree_of(source)
    (source / "sum.py").write_text("")
    assert len({first.digest, second.digest, third.digest, tree_of(source).digest}) == 4


def test_an_archive_is_unpacked_once(source: Path, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(source, "a")
    made = tree_of(tmp_path / "a.tar")
    began = (trees_directory() / "trees" / made.digest).stat().st_mtime_ns
    assert tree_of(tmp_path / "a.tar") == made
    assert (trees_directory() / "trees" / made.digest).stat().st_mtime_ns == began


@pytest.mark.parametrize("name", ["a.txt", "a.tar", "a.whl", "a.bundle"])
def test_what_is_no_tree_is_refused_in_a_sentence(name: str, tmp_path: Path, own_cache: None) -> None:
    (tmp_path / name).write_bytes(b"nothing")
    with pytest.raises(TaskError, match=f"workspace tree .*{name}"):
        tree_of(tmp_path / name)
    with pytest.raises(TaskError, match="absolute path"):
        tree_of(tmp_path, place="relative")


def test_an_archive_cannot_place_files_outside_of_its_tree(tmp_path: Path, own_cache: None) -> None:
    (tmp_path / "secret").write_text("outside")
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        archive.add(tmp_path / "secret", "../../../escaped")
    with pytest.raises(TaskError, match="escaped"):
        tree_of(tmp_path / "a.tar")


@pytest.mark.parametrize("name", ["app", "shoal-home", "tmp"])
def test_a_link_of_a_root_leads_no_folder_of_the_tree_to_this_machine(
    name: str, tmp_path: Path, own_cache: None
) -> None:
    for folder in ("root/usr", "root/etc", "root/bin", "outside"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "root" / name).symlink_to(tmp_path / "outside")
    with pytest.raises(TaskError, match="a link that leads elsewhere"):
        tree_of(tmp_path / "root", place="/app")
    assert not list((tmp_path / "outside").iterdir())


def test_forks_share_the_tree_and_nothing_else(tree: Tree, kind: ForkKind) -> None:
    with fork(tree, kind) as one, fork(tree, kind) as other:
        assert said(one, "echo mine > new; rm -r tests; echo '#' >> sums.py; ls") == "new\nsums.py\n"
        assert said(other, "ls; cat sums.py") == "sums.py\ntests\ndef add(a, b):\n    return a - b\n"
        assert (tree.base / "sums.py").read_text().endswith("a - b\n")
        assert said(one, "cat new; tail -n 1 sums.py") == "mine\n#\n"
    assert not one.folder.exists()
    assert not other.folder.exists()


def test_the_shell_goes_on_from_command_to_command(tree: Tree, kind: ForkKind) -> None:
    with fork(tree, kind) as workspace:
        finished = asyncio.run(
            workspace.run("cd tests; X='a b'; export Y=2; f() { echo \"f $X\"; }; alias g='echo g'; exit 7")
        )
        assert finished.exit_code == 7
        assert said(workspace, "pwd; f; g; python -c 'import os; print(os.environ[\"Y\"])'") == (
            "/workspace/tests\nf a b\ng\n2\n"
        )


def test_no_process_outlives_its_command(tree: Tree, kind: ForkKind) -> None:
    with fork(tree, kind) as workspace:
        seconds = f"1000.{os.getpid()}"
        assert said(workspace, f"(sleep {seconds} &) ; setsid sleep {seconds} & echo begun") == "begun\n"
        assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and seconds.encode() in _command_line(pid)]


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize(
    ("command", "limits", "ended"),
    [
        ("sleep 100", ProgramLimits(wall_s=0.5), Ended.KILLED_WALL),
        ("yes", ProgramLimits(output_bytes=1000), Ended.KILLED_OUTPUT),
        ("while true; do :; done", ProgramLimits(cpu_s=0.5), Ended.KILLED_CPU),
        (
            "for i in 1 2 3 4; do head -c 600000 /dev/zero > $i; done; sleep 9",
            ProgramLimits(file_bytes=1 << 20),
            Ended.KILLED_FILES,
        ),
    ],
)
def test_limits_end_a_command_and_the_workspace_goes_on(
    command: str, limits: ProgramLimits, ended: Ended, tree: Tree, kind: ForkKind
) -> None:
    with fork(tree, kind) as workspace:
        assert asyncio.run(workspace.run(command, limits)).ended is ended
        assert said(workspace, "echo here") == "here\n"


@pytest.mark.parametrize(
    "command",
    [
        "echo 2 > tests/a",
        "rm -r tests && mkdir tests && echo 2 > tests/a",
        "rm tests/test_sums.py && echo 2 > tests/a",
        "mv tests t && mkdir tests && echo 2 > tests/a && rm -r t",
        "rm -r tests && echo 2 > tests",
    ],
)
def test_a_snapshot_has_the_files_of_its_workspace_whatever_was_kept_before(command: str, tree: Tree) -> None:
    if fork_kind() is not ForkKind.OVERLAY:
        pytest.skip(f"this machine forks by {fork_kind()}")
    listing = "find . -type f | sort | xargs cat; find . | sort"
    with fork(tree) as before:
        said(before, "echo 2 > tests/a")
        before.snapshot()
    with fork(tree) as workspace:
        said(workspace, command)
        kept, there = workspace.snapshot(), said(workspace, listing)
    with fork(kept) as again:
        assert said(again, listing) == there


def test_names_that_are_no_text_are_part_of_a_tree_s_name(source: Path) -> None:
    digests = set()
    for name in (b"\xff", b"\xfe", b"?", "\N{REPLACEMENT CHARACTER}".encode()):
        made = Path(os.fsdecode(os.fsencode(source) + b"/" + name))
        made.write_bytes(b"x")
        digests.add(tree_of(source).digest)
        made.unlink()
    assert len(digests) == 4


@pytest.mark.parametrize("kind", [None, ForkKind.COPY])
def test_a_copy_goes_on_with_the_files_the_deletions_and_the_shell_and_changes_alone(
    kind: ForkKind | None, tree: Tree
) -> None:
    with fork(tree, kind) as workspace:
        said(workspace, "rm tests/test_sums.py; echo one > one; cd tests; X=1")
        with workspace.copy() as other:
            said(workspace, "echo two > ../two")
            assert said(other, "pwd; echo $X; ls ..; ls") == "/workspace/tests\n1\none\nsums.py\ntests\n"
            said(other, "rm ../one")
        assert said(workspace, "ls ..") == "one\nsums.py\ntests\ntwo\n"
        assert not other.folder.exists()


def test_a_snapshot_is_forked_again_with_its_shell_and_its_deletions(tree: Tree) -> None:
    if fork_kind() is not ForkKind.OVERLAY:
        pytest.skip(f"this machine forks by {fork_kind()}")
    with fork(tree) as workspace:
        said(workspace, "rm tests/test_sums.py; echo one > one; cd tests; X=1")
        first = workspace.snapshot()
        said(workspace, "echo two > ../two")
        assert workspace.snapshot() != first
    with fork(first) as again, fork(first) as beside:
        assert (
            said(again, "pwd; echo $X; ls ..; ls; echo three > ../three")
            == "/workspace/tests\n1\none\nsums.py\ntests\n"
        )
        assert said(beside, "ls ..") == "one\nsums.py\ntests\n"
        deeper = again.snapshot()
    with fork(deeper) as deep:
        assert said(deep, "ls ..") == "one\nsums.py\ntests\nthree\n"
    assert len(deeper.layers) == 3
    assert tree_named(deeper.digest) == deeper
    discard(deeper)
    discard(tree)
    with pytest.raises(TaskError):
        tree_named(deeper.digest)
    assert tree_named(first.digest) == first
    assert tree_named(tree.digest) == tree


def test_forks_of_killed_processes_are_swept_and_those_of_living_ones_stay(tree: Tree) -> None:
    code = (
        "import sys; from shoal.workspace.fork import fork; from shoal.workspace.tree import tree_named; "
        "w = fork(tree_named(sys.argv[1])); print(w.folder, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, tree.digest]
    with fork(tree) as workspace, subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().decode().strip())
        assert sweep() == 0
        assert left.is_dir()
        other.kill()
        other.wait(60)
        assert sweep() == 1
        assert not left.exists()
        assert said(workspace, "echo lives") == "lives\n"


def test_a_fork_that_holds_anything_is_removed(tree: Tree) -> None:
    with fork(tree) as workspace:
        said(workspace, "mkdir -p a/b; chmod 0 a; mkfifo pipe; ln -s / root; touch $'strange\\nname'")
        assert stat.S_ISFIFO((workspace.own / "workspace" / "pipe").lstat().st_mode)
    assert not workspace.folder.exists()
    assert not list(new_folder().parent.glob(f"{workspace.folder.name}*"))


def test_python_in_the_root_of_an_image_is_the_image_s_and_first_that_of_its_environment_for_tests(
    image_root: Path, kind: ForkKind
) -> None:
    def ran() -> bytes:
        with fork(tree_of(image_root), kind) as workspace:
            assert asyncio.run(workspace.run("python3 -m pytest")).stdout == printed
            return asyncio.run(workspace.run_program(("python", "-m", "pytest"))).stdout

    printed = b"opt/miniconda3/envs/testbed/bin -m pytest\n"
    assert ran() == printed
    shutil.rmtree(image_root / "opt")
    printed = b"usr/bin -m pytest\n"
    assert ran() == printed


def test_the_root_of_an_image_has_devices_and_all_of_its_own_folders(image_root: Path, kind: ForkKind) -> None:
    own = Path("/", own_package().parts[1], "of_the_image")
    (image_root / own.parent.name).mkdir(exist_ok=True)
    (image_root / own.parent.name / own.name).write_text("x")
    with fork(tree_of(image_root), kind) as workspace:
        assert said(workspace, f": </dev/null && echo x >/dev/null && : <{own} && echo $(</dev/null)fine") == "fine\n"


def test_processes_of_a_command_share_locks_and_memory(tree: Tree, kind: ForkKind) -> None:
    code = "from multiprocessing import Array, shared_memory as s; s.SharedMemory(create=True, size=9).unlink()"
    with fork(tree, kind) as workspace:
        assert said(workspace, f"python -c '{code}; print(Array(\"i\", 3)[:])'") == "[0, 0, 0]\n"


def test_a_file_that_its_owner_may_not_read_is_copied(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from" / "file").write_text("text")
    (tmp_path / "from" / "file").chmod(0)
    script = "import sys; from pathlib import Path; from shoal.workspace.fork import copied; "
    script += "sys.exit(not copied(Path(sys.argv[1]), Path(sys.argv[2]), 'auto'))"
    owner = [] if os.getuid() else ["unshare", "-U", "--map-user=1000", "--map-group=1000"]
    subprocess.run([*owner, sys.executable, "-c", script, tmp_path / "from", tmp_path / "to"], check=True)
    assert (tmp_path / "to" / "file").stat().st_mode & 0o777 == 0
    (tmp_path / "to" / "file").chmod(0o600)
    assert (tmp_path / "to" / "file").read_text() == "text"
