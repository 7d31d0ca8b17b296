"""Each limit by itself stops a program that runs to its end where only that limit is larger."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from shoal.sandbox import usage
from shoal.sandbox.program import Backend, Ended, Program, ProgramLimits
from shoal.sandbox.runner import run, why_not

AMPLE = ProgramLimits(
    wall_s=30.0, cpu_s=20.0, memory_bytes=512 << 20, processes=16, output_bytes=4 << 20, file_bytes=16 << 20
)


@dataclass(frozen=True, slots=True)
class Excess:
    """A program that uses more than `tight` allows and less than `AMPLE`, in so many seconds as it reads.

    A busy machine looks at a program seldom: one that shall be stopped stays for longer than any pause between looks.
    """

    source: str
    tight: ProgramLimits
    ends: tuple[Ended, ...]
    least_s: str = "0.3"
    """Seconds of the program that runs to its end."""

    def program(self, seconds: str) -> Program:
        """The program, which takes these seconds."""
        return Program(f"import time\nseconds = float(input())\n{self.source}", stdin=seconds.encode())


EXCESSES = {
    "wall": Excess("time.sleep(seconds)", replace(AMPLE, wall_s=0.2), (Ended.KILLED_WALL,), "0.6"),
    "cpu": Excess("while time.process_time() < seconds: pass", replace(AMPLE, cpu_s=0.3), (Ended.KILLED_CPU,), "0.9"),
    "memory": Excess(
        "x = bytearray(200 << 20)",
        replace(AMPLE, memory_bytes=100 << 20),
        (Ended.EXITED, Ended.KILLED_MEMORY),
    ),
    "processes": Excess(
        "import threading\ndone = threading.Event()\nmany = [threading.Thread(target=done.wait) for _ in range(10)]\n"
        "try:\n    for one in many: one.start()\n    time.sleep(seconds)\nfinally: done.set()",
        replace(AMPLE, processes=4),
        (Ended.EXITED, Ended.KILLED_PROCESSES),
    ),
    "output": Excess(
        "import os\nfor _ in range(200): os.write(1, b'x' * 10000)",
        replace(AMPLE, output_bytes=1 << 20),
        (Ended.KILLED_OUTPUT,),
    ),
    "file_size": Excess(
        "with open('f', 'wb') as f: f.write(b'x' * (4 << 20))\ntime.sleep(seconds)",
        replace(AMPLE, file_bytes=1 << 20),
        (Ended.EXITED, Ended.KILLED_FILES),
    ),
}


@pytest.fixture(params=list(Backend), ids=lambda backend: str(backend.value))
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every rung that this machine has."""
    chosen: Backend = request.param
    if why_not(chosen):
        pytest.skip(f"{chosen.value}: {why_not(chosen)}")
    return chosen


@pytest.mark.parametrize("name", EXCESSES)
def test_a_limit_stops_what_a_larger_one_lets_through(name: str, backend: Backend) -> None:
    excess = EXCESSES[name]
    stopped = run(excess.program("20"), excess.tight, backend=backend)
    assert not stopped.ok
    assert stopped.ended in excess.ends, stopped
    through = run(excess.program(excess.least_s), AMPLE, backend=backend)
    assert through.ok, through


@pytest.fixture
def neighbour() -> Iterator[int]:
    """The number of a process of the same user."""
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)"]) as process:
        yield process.pid
        process.kill()


def test_a_program_has_no_network_no_environment_and_no_other_processes(backend: Backend, neighbour: int) -> None:
    reaching = {
        "network": "import socket; socket.socket(socket.AF_INET).bind(('127.0.0.1', 0))",
        "names": "import socket; print(socket.getaddrinfo('localhost', 80)); socket.socket(socket.AF_INET)",
        "environment": "import os; [os.environ[name] for name in ('PATH', 'HOME', 'SHOAL_LIMITS_TEST')]",
        "process list": "import os; os.listdir('/proc')",
        "priority": f"import os; os.setpriority(os.PRIO_PROCESS, {neighbour}, 19)",
        "signal": f"import os; os.kill({neighbour}, 9)",
    }
    got = {}
    for name, source in reaching.items():
        if run(Program(source), AMPLE, backend=backend).ok:
            got[name] = source
    assert got == {}
    outside = {**os.environ, "PATH": "x", "HOME": "x", "SHOAL_LIMITS_TEST": "x"}
    for source in reaching.values():  # what fails without a sandbox as well would show nothing
        subprocess.run([sys.executable, "-I", "-S", "-c", source], check=True, capture_output=True, env=outside)


MEASURES = """import os, sys
sys.path.insert(0, sys.argv[1])
from shoal.sandbox.usage import folder_holds_more
os.mkdir("own")
os.mkdir("own/hidden")
with open("own/hidden/file", "wb") as file:
    file.write(bytes(1 << 20))
os.chmod("own/hidden", int(sys.argv[2], 8))
print([folder_holds_more("own", most, 9) for most in (2 << 20, 1 << 19)], folder_holds_more("own", 2 << 20, 1))
os.chmod("own/hidden", 0o700)"""


@pytest.mark.parametrize("mode", ["0", "300", "400"])
def test_a_folder_whose_rights_its_program_took_is_measured_all_the_same(mode: str) -> None:
    source = str(Path(usage.__file__).parents[2])
    user = 65534 if os.geteuid() == 0 else None  # root reads every folder
    for python in (sys.executable, "/usr/bin/python3"):  # the first one may lie in root's home
        with tempfile.TemporaryDirectory() as folder:
            os.chmod(folder, 0o777)
            with suppress(PermissionError, FileNotFoundError):
                command = [python, "-I", "-S", "-c", MEASURES, source, mode]
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder, user=user, check=True)
                assert done.stdout == "[False, True] True\n"
                return
    pytest.skip("no Python for another user")
