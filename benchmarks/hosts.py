"""Hosts of a bench: parts of this machine that share nothing but the Python installation and a network.

A host is a set of Linux namespaces with another user: an own network interface, own processes, an own /tmp. Where this
process may not make namespaces, a host is a Ray node of this machine.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks import child_environment
from shoal.errors import ShoalError

NETWORK = "10.77.0"
HEAD = f"{NETWORK}.1"
HOST_NAME = "host-"
"""Name of a host, before its number."""
FIRST_USER = 20_000
RAY_VARIABLES = {
    "RAY_raylet_start_wait_time_s": "180",
    "RAY_agent_register_timeout_ms": "180000",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
}
"""A machine may be busy with other things, its memory is not that of one node, and nobody uses idle workers."""
RESOURCES: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20}
UNSHARED = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
READY = b"ready\n"
SETUP = """
set -e
IFS='
'
echo ready
read -r _
ip link set lo up
ip addr add "$ADDRESS/24" dev eth0
ip link set eth0 up
mount -t tmpfs tmpfs /dev/shm
index=0
for tree in $TREES; do
    mkdir "/dev/shm/$index"; mount --bind "$tree" "/dev/shm/$index"; index=$((index + 1))
done
for hidden in $HIDDEN; do mount -t tmpfs -o mode=755 tmpfs "$hidden"; done
chmod 1777 "$TMPDIR"
index=0
for tree in $TREES; do
    mkdir -p "$tree"; mount --bind "/dev/shm/$index" "$tree"; umount "/dev/shm/$index"; index=$((index + 1))
done
mount -t tmpfs -o mode=1777 tmpfs /dev/shm
hostname "$HOST_NAME"
cd "$TMPDIR"
exec setpriv --reuid="$HOST_USER" --regid="$HOST_USER" --clear-groups --no-new-privs "$@"
"""
"""Hides the temporary folder and homes that other users may not enter, then shows what Python needs of them.

Newlines separate folders, since a clone's path may have spaces."""


class Hosts(Protocol):
    """Hosts of a Ray cluster, by the name that the run's logs have for their node."""

    address: str
    """Address of the run's own host."""
    isolated: bool
    """Whether hosts have namespaces and users of their own."""

    def add(self) -> str:
        """Starts one more host; returns its name."""

    def kill(self, name: str) -> None:
        """Ends a host with all its processes at once."""

    def start(self, name: str, words: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a command on a host, as its user."""


class RayNodes:
    """Hosts that are Ray nodes of this machine."""

    isolated, address = False, "127.0.0.1"

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._nodes: dict[str, Any] = {}

    def add(self) -> str:
        """Starts one more node; returns its id."""
        node = self._cluster.add_node(**RESOURCES, include_dashboard=False)
        self._nodes[node.node_id] = node
        return str(node.node_id)

    def kill(self, name: str) -> None:
        """Kills a node."""
        self._cluster.remove_node(self._nodes.pop(name), allow_graceful=False)

    def start(self, name: str, words: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a command on this machine."""
        subprocess.Popen(words, env={**child_environment(), **environment})


class Namespaces:
    """Hosts in namespaces of their own, at one bridge in the network namespace of this process."""

    isolated, address = True, HEAD

    def __init__(self, command: Callable[[str], Sequence[str]], first_user: int = FIRST_USER, hidden: str = "") -> None:
        """`command` is what a host runs, by its address, as a user from `first_user` on, or as root when that is 0.

        `hidden` is one more folder that each host has for itself.
        """
        self._command, self._first_user, self._hidden = command, first_user, hidden
        self._inits: dict[str, int] = {}

    @staticmethod
    def bridge() -> None:
        """Makes the bridge; before a server starts at its address."""
        for words in ("link set lo up", "link add br0 type bridge", f"addr add {HEAD}/24 dev br0", "link set br0 up"):
            _ip(words)

    def add(self) -> str:
        """Starts one more host; returns its address."""
        number = len(self._inits) + 2
        address, trees = f"{NETWORK}.{number}", _trees()
        trees["HIDDEN"] += f"\n{self._hidden}"
        process = subprocess.Popen(
            [*UNSHARED, "sh", "-c", SETUP, "host", *self._command(address)],
            env={**self._environment(number), "ADDRESS": address, "HOST_NAME": f"{HOST_NAME}{number}", **trees},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if (said := process.stdout.readline()) != READY:
            raise ShoalError(f"a host in namespaces: expected {READY!r}, got {said!r}")
        self._connect(number, process.pid)
        process.stdin.write(b"go\n")
        process.stdin.close()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._inits[address] = int(child)
        return address

    def _connect(self, number: int, pid: int) -> None:
        """Gives the network namespace of a process its interface eth0."""
        _ip(f"link add veth{number} type veth peer name eth0 netns {pid}")
        _ip(f"link set veth{number} master br0 up")

    def kill(self, name: str) -> None:
        """Kills the first process of a host, and with it all others and the network."""
        os.kill(self._inits[name], signal.SIGKILL)

    def sees(self, name: str, path: Path) -> bool:
        """Whether a path of this host is on another one."""
        return self.path_of(name, path).exists()

    def start(self, name: str, words: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a command in the namespaces of a host."""
        given = self._environment(int(name.rpartition(".")[2]))
        user = given["HOST_USER"]
        enter = ["nsenter", f"--target={self._inits[name]}", "--net", "--mount", "--pid", "--uts", "--ipc"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
        there = ["sh", "-c", 'cd "$TMPDIR" && exec "$@"', "role"]
        subprocess.Popen([*enter, *become, *there, *words], env={**given, **environment})

    def path_of(self, name: str, path: Path) -> Path:
        """Path by which this process finds what a host has at `path`."""
        return Path(f"/proc/{self._inits[name]}/root") / path.relative_to("/")

    def _environment(self, number: int) -> dict[str, str]:
        return environment_of(self._first_user and self._first_user + number)


def can_isolate() -> bool:
    """Whether this process may make namespaces, interfaces and become another user."""
    tried = [*UNSHARED, "sh", "-c", "ip link add br0 type bridge && setpriv --reuid=20000 true"]
    try:
        return subprocess.run(tried, capture_output=True, check=False, timeout=60).returncode == 0
    except OSError:
        return False


def ray_node(gcs: str) -> Callable[[str], list[str]]:
    """Command of a host by its address: a Ray node of the cluster whose head has the address `gcs`."""
    given = [f"--{name.replace('_', '-')}={value}" for name, value in RESOURCES.items()]
    start = [str(Path(sys.executable).parent / "ray"), "start", f"--address={gcs}", *given]
    return lambda address: [*start, f"--node-ip-address={address}", "--block", "--disable-usage-stats"]


def environment_of(user: int) -> dict[str, str]:
    """Variables of a host's processes: nothing of this user's but what Python needs."""
    home, name = tempfile.gettempdir(), f"host-{user}"
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"HOME": home, "TMPDIR": home, "USER": name, "LOGNAME": name, "HOST_USER": str(user)}
    return {**child_environment(), **RAY_VARIABLES, **kept, **own}


def _trees() -> dict[str, str]:
    """Folders that Python needs, and folders to hide: the temporary one, and those that other users may not enter."""
    trees = {Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)}
    trees = {tree for tree in trees if not any(other in tree.parents for other in trees)}
    hidden = {Path(tempfile.gettempdir())}
    for tree in trees:
        closed = [folder for folder in (tree, *tree.parents) if not folder.stat().st_mode & 0o001]
        hidden |= {closed[-1]} if closed else set()
    return {"TREES": "\n".join(map(str, trees)), "HIDDEN": "\n".join(map(str, hidden))}


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
