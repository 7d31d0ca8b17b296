"""A program in a sandbox computes as anywhere else, on every rung of this machine, and leaves nothing behind."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from shoal.errors import SandboxUnavailable
from shoal.sandbox.command import installed_packages, outermost, package_folders
from shoal.sandbox.program import Backend, Ended, Program, ProgramLimits
from shoal.sandbox.runner import is_shortage, probe, run, run_async, why_not
from shoal.sandbox.supervisor import run_on
from until import until

FOREVER = "while True: pass"


@pytest.fixture(params=list(Backend), ids=lambda backend: str(backend.value))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every rung that this machine has."""
    chosen: Backend = request.param
    if why_not(chosen):
        pytest.skip(f"{chosen.value}: {why_not(chosen)}")
    return chosen


def test_a_program_reads_its_input_and_files_and_is_reported_as_it_ended(backend: Backend) -> None:
    source = "import sys, part.other\nprint(input() + part.other.NAME)\nsys.stderr.write('bad')\nsys.exit(3)"
    finished = run(Program(source, files={"part/other.py": b"NAME = '!'"}, stdin=b"hello"), backend=backend)
    assert (finished.ended, finished.exit_code, finished.signal) == (Ended.EXITED, 3, None)
    assert (finished.stdout, finished.stderr, finished.backend) == (b"hello!\n", b"bad", backend)
    assert not finished.ok
    assert 0 < finished.cpu_s < 5


def test_a_program_that_kills_itself_was_signalled(backend: Backend) -> None:
    finished = run(Program("import os; os.kill(os.getpid(), 9)"), backend=backend)
    assert (finished.ended, finished.exit_code, finished.signal) == (Ended.SIGNALLED, None, signal.SIGKILL)


@pytest.mark.parametrize("umask", [0o22, 0o77])
def test_packages_that_only_their_owner_may_read_are_imported(backend: Backend, umask: int, tmp_path: Path) -> None:
    """As root installs them under umask 077."""
    before = os.umask(umask)
    try:
        (tmp_path / "packages" / "part").mkdir(parents=True)
        (tmp_path / "packages" / "part" / "__init__.py").write_text("NAME = 'whole'")
    finally:
        os.umask(before)
    finished = run(Program("import part; print(part.NAME)", packages=(tmp_path / "packages",)), backend=backend)
    assert finished.stdout == b"whole\n", finished.stderr


def test_asyncio_threads_and_temporary_files_work(backend: Backend) -> None:
    source = """
import asyncio, tempfile, threading
threads = [threading.Thread(target=print, args=(n,)) for n in range(4)]
for thread in threads: thread.start(); thread.join()
with tempfile.TemporaryDirectory() as folder: open(folder + "/file", "w").write("x")
print(asyncio.run(asyncio.sleep(0, "slept")))
"""
    finished = run(Program(source), backend=backend)
    assert (finished.stdout, finished.stderr) == (b"0\n1\n2\n3\nslept\n", b"")


def test_installed_packages_are_there_when_asked_for(backend: Backend) -> None:
    source = "import pytest, sys; print(pytest.__name__, 'site' in sys.modules)"
    with_them = run(Program(source, packages=installed_packages()), backend=backend)
    assert with_them.stdout == b"pytest False\n", with_them.stderr
    assert b"ModuleNotFoundError" in run(Program(source), backend=backend).stderr


def test_a_command_that_is_not_there_ends_as_in_a_shell(backend: Backend) -> None:
    finished = run(Program(argv=("/bin/sh", "-c", "true")), backend=backend)
    assert finished.exit_code == 127
    assert finished.stderr.startswith(b"/bin/sh: ")


def test_setting_up_does_not_count_against_the_programs_time(backend: Backend) -> None:
    began = time.monotonic()
    finished = run(Program(FOREVER), ProgramLimits(wall_s=0.3), backend=backend)
    assert finished.ended is Ended.KILLED_WALL
    assert 0.3 <= finished.wall_s <= time.monotonic() - began


def test_a_cancelled_program_is_gone(backend: Backend) -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}

    async def main() -> None:
        running = asyncio.create_task(run_async(Program(FOREVER), backend=backend))
        await asyncio.sleep(0.3)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(main())
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


STARTER = """
import sys
from shoal.sandbox.program import Backend, Program, ProgramLimits
from shoal.sandbox.runner import run
run(Program("import time; time.sleep(600)"), ProgramLimits(wall_s=600), Backend(sys.argv[1]))
"""


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_sandbox_ends_with_its_starter_however_far_it_was(backend: Backend, processes: int) -> None:
    """bubblewrap's own two processes may outlive it, idle, until the launcher runs: no program is there yet."""
    starter = psutil.Popen([sys.executable, "-c", STARTER, backend.value])
    most = {Backend.LANDLOCK: 1, Backend.BUBBLEWRAP: 3}.get(backend, processes)
    while len(started := starter.children(recursive=True)) < most or session_of(started[0].pid) != started[0].pid:
        assert starter.poll() is None
    session = started[0].pid
    starter.kill()
    starter.wait()
    asyncio.run(until(lambda: session not in map(session_of, psutil.pids())))


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize("backend", [one for one in Backend if one is not Backend.LANDLOCK], indirect=True)
def test_a_sandbox_that_is_killed_from_outside_failed_and_its_program_ended_in_no_way(backend: Backend) -> None:
    """With Landlock alone the only process is the program's."""
    before = psutil.Process().children(recursive=True)
    ours, theirs = socket.socketpair()
    source = "import os, time; os.write(0, b'begun'); time.sleep(60)"
    with ours, ThreadPoolExecutor(1) as thread:
        running = thread.submit(run_on, backend, Program(source), ProgramLimits(wall_s=30), None, theirs)
        assert ours.recv(5) == b"begun"
        launcher, first, _ = (one for one in psutil.Process().children(recursive=True) if one not in before)
        assert first.parent() == launcher
        first.kill()
        with pytest.raises(SandboxUnavailable, match=f"the {backend.value} sandbox was ended from outside"):
            running.result()


def test_packages_of_pth_files_and_python_path_are_found_and_the_current_folder_is_not(tmp_path: Path) -> None:
    script, named, standard, packages, by_pth = (str(tmp_path / name) for name in ("s", "n", "std", "site", "pth"))
    for folder in (script, named, standard, packages, by_pth):
        os.mkdir(folder)
    path = [script, named, standard, packages, by_pth, str(tmp_path / "gone")]
    assert package_folders(path, [packages], named) == tuple(map(Path, (named, packages, by_pth)))


LEAVING = """
import os, sys
import psutil
from shoal.sandbox.program import Backend, Program, ProgramLimits
from shoal.sandbox.runner import run

def held():
    open_now = {}
    for fd in os.listdir("/proc/self/fd"):
        try:
            open_now[fd] = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # the listing's own
    return open_now, psutil.Process().children(recursive=True)

for source in ("pass", "while True: pass", "import os; os.mkdir('a', 0); os.symlink('/etc', 'b')"):
    run(Program(source), ProgramLimits(wall_s=0.2), backend=Backend(sys.argv[1]))
    before = held()
    run(Program(source), ProgramLimits(wall_s=0.2), backend=Backend(sys.argv[1]))
    after = held()
    assert after == before, (source, before, after)
"""


def test_nothing_is_left_open_or_lying_about(backend: Backend, tmp_path: Path) -> None:
    """In a process of its own: threads that earlier tests left open and close files, too."""
    command = [sys.executable, "-c", LEAVING, backend.value]
    left = subprocess.run(
        command, check=False, capture_output=True, text=True, timeout=60, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert left.returncode == 0, left.stderr
    assert not list(tmp_path.iterdir())


def test_a_program_outside_of_its_work_folder_is_refused() -> None:
    for name in ("../up", "/etc/x", "", "a/../../b", "a\0b"):
        with pytest.raises(ValueError, match="Program"):
            Program("pass", files={name: b""})
    with pytest.raises(ValueError, match="both or neither"):
        Program()
    with pytest.raises(ValueError, match=r"Limits\.wall_s"):
        ProgramLimits(wall_s=0)
    with pytest.raises(ValueError, match=r"expected at most 5 bytes \(Limits\.file_bytes\), got 7"):
        run(Program("x = 1; "), ProgramLimits(file_bytes=5))


def test_a_sandbox_that_cannot_be_set_up_says_why(backend: Backend) -> None:
    with pytest.raises(SandboxUnavailable, match=f"the {backend.value} sandbox could not be set up: .*nowhere"):
        run(Program("pass", packages=(Path("/nowhere"),)), backend=backend)


def test_the_probe_names_every_rung() -> None:
    assert list(probe()) == list(Backend)


SHORT_OF_DESCRIPTORS = """
import asyncio, os, resource
from shoal.errors import SandboxUnavailable
from shoal.sandbox.runner import in_use, strongest, strongest_if_any
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")), limits[1]))
for probe in (strongest, strongest_if_any):
    try:
        print(probe())
    except SandboxUnavailable as error:
        print(error)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
print(in_use())
"""


def test_a_machine_short_of_something_gets_no_weaker_sandbox_and_its_own_one_later() -> None:
    command = [sys.executable, "-c", SHORT_OF_DESCRIPTORS]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    first = next(iter(Backend))
    assert all(f"{first.value} could not be tried, and may work later" in one for one in said[:2]), said
    assert said[2] == next((one.value for one, why in probe().items() if not why), "none")


@pytest.mark.parametrize(
    ("why", "passes"),
    [
        ("the sandbox failed fork: Resource temporarily unavailable", True),
        ("bwrap: Creating new namespace failed: Resource temporarily unavailable", True),
        ("[Errno 12] Cannot allocate memory", True),
        ("the bubblewrap sandbox could not be set up: no report came in 20 s", True),
        ("bwrap: setting up uid map: Permission denied", False),
        ("[Errno 2] No such file or directory: 'bwrap'", False),
        ("the sandbox failed unshare: Operation not permitted", False),
        ("Landlock 3 (Linux 6.2) or newer is needed, the kernel has none", False),
    ],
)
def test_a_reason_that_may_pass_is_told_from_one_that_stays(why: str, passes: bool) -> None:
    assert is_shortage(why) is passes


def test_only_the_outermost_of_nested_paths_is_kept() -> None:
    assert outermost(["/a/b", "/a", "/ab", "/c/d/e", "/c/d/"]) == ["/a", "/ab", "/c/d"]


@pytest.mark.parametrize("backend", [one for one in Backend if one is not Backend.LANDLOCK], indirect=True)
def test_locks_and_shared_memory_are_a_program_s_own_files(backend: Backend) -> None:
    source = (
        "import multiprocessing, os\nmultiprocessing.Lock()\nassert os.path.samefile('/dev/shm', '.')\n"
        "print('locked', flush=True)\nopen('/dev/shm/large', 'wb').write(bytes(2 << 20))"
    )
    finished = run(Program(source), ProgramLimits(file_bytes=1 << 20), backend)
    assert (finished.stdout, finished.ok) == (b"locked\n", False)
    assert b"No space left" in finished.stderr or finished.ended is Ended.KILLED_FILES
    assert "large" not in os.listdir("/dev/shm")
