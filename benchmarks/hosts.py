"""Hosts of a bench: parts of this machine that share nothing but the Python installation and a network.

A host is a set of Linux namespaces with another user: an own network interface, own processes, an own /tmp. Where this
process may not make namespaces, a host is a Ray node of this machine.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from benchmarks import child_environment
from shoal.errors import ShoalError

NETWORK = "10.77.0"
HEAD = f"{NETWORK}.1"
FIRST_USER = 20_000
RESOURCES: dict[str, Any] = {"num_cpus": 4, "object_store_memory": 80 << 20}
UNSHARED = ["unshare", "--net", "--mount", "--pid", "--uts", "--ipc", "--fork", "--kill-child", "--mount-proc"]
READY = b"ready\n"
SETUP = """
set -e
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
cd "$TMPDIR"
exec setpriv --reuid="$HOST_USER" --regid="$HOST_USER" --clear-groups --no-new-privs "$@"
"""
"""Hides the temporary folder and homes that other users may not enter, then shows what Python needs of them."""


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

    def __init__(self, gcs: str) -> None:
        """`gcs` is the address of Ray's head."""
        self._gcs = gcs
        self._inits: dict[str, int] = {}

    @staticmethod
    def bridge() -> None:
        """Makes the bridge; before Ray's head starts."""
        for words in ("link set lo up", "link add br0 type bridge", f"addr add {HEAD}/24 dev br0", "link set br0 up"):
            _ip(words)

    def add(self) -> str:
        """Starts one more host with a Ray node; returns its address."""
        number = len(self._inits) + 2
        address, user = f"{NETWORK}.{number}", FIRST_USER + number
        ray = str(Path(sys.executable).parent / "ray")
        given = [f"--{name.replace('_', '-')}={value}" for name, value in RESOURCES.items()]
        start = [ray, "start", f"--address={self._gcs}", f"--node-ip-address={address}", *given, "--block"]
        process = subprocess.Popen(
            [*UNSHARED, "sh", "-c", SETUP, "host", *start, "--disable-usage-stats"],
            env={**_environment(user), "ADDRESS": address, **_trees()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        if (said := process.stdout.readline()) != READY:
            raise ShoalError(f"a host in namespaces: expected {READY!r}, got {said!r}")
        _ip(f"link add veth{number} type veth peer name eth0 netns {process.pid}")
        _ip(f"link set veth{number} master br0 up")
        process.stdin.write(b"go\n")
        process.stdin.close()
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        self._inits[address] = int(child)
        return address

    def kill(self, name: str) -> None:
        """Kills the first process of a host, and with it all others and the network."""
        os.kill(self._inits[name], signal.SIGKILL)

    def sees(self, name: str, path: Path) -> bool:
        """Whether a path of this host is on another one."""
        look = ["nsenter", f"--target={self._inits[name]}", "--mount", "test", "-e", str(path)]
        return subprocess.run(look, check=False).returncode == 0

    def start(self, name: str, words: Sequence[str], environment: dict[str, str]) -> None:
        """Starts a command in the namespaces of a host."""
        user = FIRST_USER + int(name.rpartition(".")[2])
        enter = ["nsenter", f"--target={self._inits[name]}", "--net", "--mount", "--pid", "--uts", "--ipc"]
        become = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", "--no-new-privs"]
        there = ["sh", "-c", 'cd "$TMPDIR" && exec "$@"', "role"]
        subprocess.Popen([*enter, *become, *there, *words], env={**_environment(user), **environment})


def can_isolate() -> bool:
    """Whether this process may make namespaces, interfaces and become another user."""
    tried = [*UNSHARED, "sh", "-c", "ip link add br0 type bridge && setpriv --reuid=20000 true"]
    try:
        return subprocess.run(tried, capture_output=True, check=False, timeout=60).returncode == 0
    except OSError:
        return False


def _environment(user: int) -> dict[str, str]:
    """Variables of a host's processes: nothing of this user's but what Python needs."""
    home, name = tempfile.gettempdir(), f"host-{user}"
    kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
    own = {"HOME": home, "TMPDIR": home, "USER": name, "LOGNAME": name, "HOST_USER": str(user)}
    return {**child_environment(), **kept, **own}


def _trees() -> dict[str, str]:
    """Folders that Python needs, and folders to hide: the temporary one, and those that other users may not enter."""
    trees = {Path(__file__).parents[1], Path(sys.prefix), Path(sys.base_prefix)}
    trees = {tree for tree in trees if not any(other in tree.parents for other in trees)}
    hidden = {Path(tempfile.gettempdir())}
    for tree in trees:
        closed = [folder for folder in (tree, *tree.parents) if not folder.stat().st_mode & 0o001]
        hidden |= {closed[-1]} if closed else set()
    return {"TREES": " ".join(map(str, trees)), "HIDDEN": " ".join(map(str, hidden))}


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
