"""Ray as the launcher of a run: it starts, places and watches roles, and carries none of their data.

    the run  --starts-->  this process (the Ray driver)  --actors-->  `shoal engine join`, `shoal trainer join`, ...

An actor starts one command on its node and gives its output, which goes to `logs/` of the run. A command that ends and
a node that dies have it started again, within a budget. The ranks of a trainer have one placement group: all start or
none. No other module imports Ray.
"""

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from shoal.net.client import TOKEN_VARIABLE
from shoal.net.process import GRACE_S, PARENT, die_with_parent

PLAN = "SHOAL_RAY_PLAN"
LOOK_EVERY_S = 1.0
LOOK_TIMEOUT_S = 30.0
MOST_OUTPUT_BYTES = 1 << 20
RESTARTS, WITHIN_S = 8, 600.0
"""Starts of one role within a time, after which it is given up."""
AGAIN_S, ROOM_S = 2.0, 15.0
FOLDER = "shoal-role-"
SAID = "said: "
"""Prefix of the driver's sentences about roles."""
COMMAND = "from shoal.net.process import die_with_parent; die_with_parent(); from shoal.cli import main; main()"
"""Program of a role: the command line of Shoal, which ends with its actor."""


class RayPlan(msgspec.Struct, frozen=True):
    """Roles that Ray starts, and where they join."""

    address: str
    url: str
    logs: str
    hosts: int = 0
    """Hosts of the trainer's ranks; with `gpus` 0 each has one rank, on the CPU."""
    gpus: int = 0
    engines: int = 0
    engine_gpus: int = 0
    engine_command: list[str] = []
    rewards: int = 0
    restarts: int = RESTARTS


@contextmanager
def started(plan: RayPlan, token: str, show: Callable[[str], None]) -> Iterator[None]:
    """Runs the driver, again when it ends, for as long as the block lasts.

    `show` gets a sentence for each role that finds no room or whose budget of restarts is spent, in another thread.
    """
    Path(plan.logs).mkdir(parents=True, exist_ok=True)
    done = threading.Event()
    environment = {**os.environ, TOKEN_VARIABLE: token, PLAN: msgspec.json.encode(plan).decode()}
    running: list[subprocess.Popen[bytes]] = []

    def keep() -> None:
        while not done.is_set():
            command, pipe = [sys.executable, "-c", "from shoal.cluster.on_ray import drive; drive()"], subprocess.PIPE
            with (
                (Path(plan.logs) / "ray.log").open("ab") as log,
                subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=log) as driver,
            ):
                running[:] = [driver]
                for line in driver.stdout or ():
                    if line.startswith(SAID.encode()):
                        show(line.decode(errors="replace").removeprefix(SAID).strip())
                    else:  # Ray prints there, too
                        log.write(line)
                        log.flush()
            done.wait(AGAIN_S)

    keeping = threading.Thread(target=keep, name="Ray driver", daemon=True)
    keeping.start()
    try:
        yield
    finally:
        done.set()
        for process in running:
            process.terminate()
        keeping.join(GRACE_S)
        for process in running:
            process.kill()


def own_folder() -> Path:
    """A new folder of this process. Those of processes that have ended, which may hold models, are removed."""
    for lock in Path(tempfile.gettempdir()).glob(f"{FOLDER}*/lock"):
        with suppress(OSError), lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock.parent)
    folder = Path(tempfile.mkdtemp(prefix=FOLDER))
    fcntl.flock(os.open(folder / "unlocked", os.O_CREAT | os.O_WRONLY), fcntl.LOCK_EX)  # as long as the process lives
    (folder / "unlocked").rename(folder / "lock")
    return folder


class RoleProcess:
    """Actor: one command on one node, which ends with it."""

    def __init__(self, words: list[str], environment: dict[str, str]) -> None:
        folder = own_folder()
        self._log = folder / "output"
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", COMMAND, *words],
                cwd=folder,
                env={**os.environ, **environment, PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._read = 0

    def look(self) -> tuple[int | None, bytes]:
        """Exit code, if the command has ended, and its output since the last look."""
        code = self._process.poll()
        with self._log.open("rb") as file:
            file.seek(self._read)
            output = file.read(MOST_OUTPUT_BYTES)
        self._read += len(output)
        return code, output

    def node(self) -> str:
        """Id and address of the node."""
        import ray

        return f"{ray.get_runtime_context().get_node_id()} at {ray.util.get_node_ip_address()}"


def drive() -> None:
    """Starts the roles of the plan and keeps them, until the run ends: it holds the other end of standard input."""
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    die_with_parent()
    plan = msgspec.json.decode(os.environ.pop(PLAN), type=RayPlan)
    token = os.environ.pop(TOKEN_VARIABLE)
    ray.init(address=plan.address, log_to_driver=False, include_dashboard=None)
    actor, wide = ray.remote(RoleProcess), "SPREAD"

    def role(name: str, words: list[str], gpus: int, strategy: object) -> None:
        def start() -> Any:
            options = actor.options(num_cpus=1, num_gpus=gpus, scheduling_strategy=strategy, max_restarts=0)
            return options.remote([*words], {TOKEN_VARIABLE: token})

        log = Path(plan.logs) / f"{name}.log"
        threading.Thread(target=_keep, args=(name, start, log, plan.restarts), name=name, daemon=True).start()

    for index in range(plan.engines):
        command = ["--", *plan.engine_command] if plan.engine_command else []
        role(f"ray-engine-{index}", ["engine", "join", plan.url, *command], plan.engine_gpus, wide)
    for index in range(plan.rewards):
        role(f"ray-rewards-{index}", ["rewards", "serve", "--run", plan.url], 0, wide)
    if plan.hosts:
        ranks = max(plan.gpus, 1)
        bundles = [{"CPU": float(ranks), "GPU": float(plan.gpus)} if plan.gpus else {"CPU": 1.0}] * plan.hosts
        group = placement_group(bundles, strategy="STRICT_SPREAD" if plan.hosts > 1 else "PACK")
        _when_placed("the trainer's ranks", group.ready())
        for index in range(plan.hosts * ranks):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index // ranks)
            role(f"ray-rank-{index}", ["trainer", "join", plan.url], min(plan.gpus, 1), place)
    sys.stdin.read()


def _keep(name: str, start: Callable[[], Any], log: Path, restarts: int) -> None:
    """Starts an actor again and again, and writes its command's output; gives up when the budget is spent."""
    starts: deque[float] = deque(maxlen=restarts)
    why = ""
    while len(starts) < restarts or time.monotonic() - starts[0] > WITHIN_S:
        starts.append(time.monotonic())
        why = _end_of(name, start, log)
        _write(log, f"{name} is started again: {why}\n".encode())
        time.sleep(AGAIN_S)
    ended = f"{name} is given up: it ended {restarts} times within {WITHIN_S:g} s; the last time {why}; see {log}"
    _write(log, f"{ended}\n".encode())
    print(f"{SAID}{ended}", flush=True)


def _end_of(name: str, start: Callable[[], Any], log: Path) -> str:
    """Starts an actor and waits for the end of its command; says why it ended."""
    import ray

    failures = (ray.exceptions.RayError, OSError, RuntimeError, ValueError)  # of a cluster that is away, too
    actor = None
    try:
        actor = start()
        node = _when_placed(name, actor.node.remote())
        _write(log, f"{name} runs on node {node}\n".encode())
        code = None
        while code is None:
            code, output = ray.get(actor.look.remote(), timeout=LOOK_TIMEOUT_S)
            _write(log, output)
            time.sleep(LOOK_EVERY_S)
        return f"its command ended with code {code}"
    except failures as error:
        return f"Ray said: {(str(error).splitlines() or [type(error).__name__])[0]}"
    finally:
        if actor is not None:
            with suppress(*failures):
                ray.kill(actor)


def _when_placed(name: str, placed: Any) -> object:
    """Value that Ray has once the cluster has room for a role; after a while it is said that it waits."""
    import ray

    if not ray.wait([placed], timeout=ROOM_S)[0]:
        free = ray.available_resources()
        has = f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        print(f"{SAID}{name} waits for a node with room; the Ray cluster has {has} free", flush=True)
    return ray.get(placed)


def _write(log: Path, output: bytes) -> None:
    with suppress(OSError), log.open("ab") as file:  # a full disk ends no role
        file.write(output)
