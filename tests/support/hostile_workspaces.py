"""Hostile attempts from inside of a workspace, generated from classes of attack.

An attempt is a shell command. A reading attempt tries to print a secret of a target; a changing attempt tries to change
a target, to outlive its command, or to reach a process or a server outside.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

SECRET = "swordfish-"
READING: Mapping[str, str] = {
    "by its path": "cat {path}",
    "by a link in the tree": "ln -s {path} l1; cat l1",
    "by a hard link": "ln {path} l2; cat l2",
    "by a path with dots": "cat ../../../../../../../..{path}",
    "by the root of the first process": "cat /proc/1/root{path}",
    "by the root of its own process": "cat /proc/self/root{path} /proc/self/cwd/../..{path}",
    "by the folders of all descriptors": "for d in /proc/self/fd/* /dev/fd/*; do cat $d/..{path}; done",
    "by a search": "grep -rsD skip swordfish- /workspace /tmp /root /etc; find / -name '{stem}*' -exec cat {{}} +",
    "by a bound mount": "mkdir -p m; mount --bind / m; cat m{path}",
    "by a new user namespace": "unshare -Urm sh -c 'mount -t proc proc /tmp; cat /tmp/1/root{path}; cat {path}'",
    "by another root": 'mkdir -p r; chroot r cat {path}; python -c \'import os; os.chroot("."); open("..{path}")\'',
    "by the disk itself": "mknod disk b 254 0; mknod disk2 b 8 0; strings disk disk2 /dev/vda | grep {stem}",
    "by an archive with its path": "tar -P -cf a.tar {path}; tar -P -xOf a.tar",
    "by a working tree of git": "git --work-tree=/ hash-object {path}; git diff --no-index /dev/null {path}",
    "by an overlay of its own": "mkdir -p o u w; mount -t overlay o -o lowerdir=/,upperdir=u,workdir=w o; cat o{path}",
    "by a redirect in the layer": (
        'mkdir d; setfattr -n user.overlay.redirect -v / d; python -c \'import os; os.setxattr("d", '
        '"user.overlay.redirect", b"/"); os.setxattr("d", "user.overlay.metacopy", b"")\'; cat d{path}'
    ),
    "by a file handle": (
        "python -c 'import ctypes, os; libc = ctypes.CDLL(None); h = ctypes.create_string_buffer(b\"\\x08\\0\\0\\0"
        '\\x01\\0\\0\\0\\x02\\0\\0\\0\\0\\0\\0\\0", 64); f = libc.open_by_handle_at(os.open(".", 0), h, 0); '
        'print(os.read(libc.openat(f, b".{path}", 0), 99))\''
    ),
    "by a new root from inside": (
        'python -c \'import ctypes; libc = ctypes.CDLL(None); libc.pivot_root; print(libc.syscall(155, b"/", b"/"), '
        'libc.syscall(428, -100, b"/", 1), libc.syscall(442, -100, b"/", 0, 0, 0))\'; cat {path}'
    ),
}
CHANGING: Mapping[str, str] = {
    "write over it": "echo x > {path}",
    "append by a link": "ln -s {path} c1; echo x >> c1",
    "remove it": "rm -rf {path}",
    "move over it": "echo x > c2; mv c2 {path}",
    "remove all": "rm -rf --no-preserve-root / 2>/dev/null",
    "replace its folder": "mv $(dirname {path}) gone; mkdir -p {path}",
    "extract over it": "mkdir -p t; echo x > t/x; tar -C t --transform='s,x,{path},' -P -cf b.tar x; tar -P -xf b.tar",
}
LIVING: Mapping[str, str] = {
    "a process in the background": "sleep {mark} &",
    "a daemon": "(setsid sleep {mark} >/dev/null 2>&1 < /dev/null &)",
    "a double fork": "python -c 'import os, time; os.fork() or os.setsid() or os.fork() or time.sleep({mark})'",
    "a process that ignores signals": "(trap '' HUP TERM INT; nohup sleep {mark} &) ; :",
    "a stopped process": "sleep {mark} & kill -STOP $!",
    "many processes": "for i in $(seq 200); do sleep {mark} & done",
    "a fork bomb": "b() {{ b | b & }}; b; sleep 1",
}
REACHING: Mapping[str, str] = {
    "the server by bash": "exec 3<>/dev/tcp/127.0.0.1/{port}; echo hello >&3",
    "the server by python": "python -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}))'",
    "the server by curl": "curl -m 2 http://127.0.0.1:{port}/hello",
    "an abstract socket": "python -c 'import socket; socket.socket(socket.AF_UNIX).connect(\"\\0shoal-{port}\")'",
    "variables of all processes": "cat /proc/*/environ /proc/*/cmdline | strings | grep {secret}; env | grep {secret}",
    "the memory of its parent": 'python -c \'import os; print(open(f"/proc/{{os.getppid()}}/mem", "rb").read(9))\'',
    "all processes by a signal": "kill -9 -1; kill -9 {pid}; kill -STOP {pid}",
    "its parent by ptrace": "python -c 'import ctypes; print(ctypes.CDLL(None).ptrace(16, {pid}, 0, 0))'",
    "a key ring": "python -c 'import ctypes; print(ctypes.CDLL(None).syscall(250, 1, -3, 0))'; keyctl show",
    "shared memory": "python -c 'import ctypes; print(ctypes.CDLL(None).shmget(1, 4096, 950))'; ipcs -m | grep 0x",
    "a whiteout in the layer": "mknod sums.py c 0 0; rm sums.py; mknod sums.py c 0 0; mknod /workspace/tests2 c 0 0",
    "the machine's name": "hostname broken; python -c 'import socket; socket.sethostname(\"broken\")'",
    "the clock": "date -s '2000-01-01'; python -c 'import time; time.clock_settime(0, 1)'",
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """One hostile command."""

    name: str
    command: str


def reading(target: str, path: str) -> Iterator[Attempt]:
    """Attempts to print a file outside."""
    for way, command in READING.items():
        yield Attempt(f"read {target} {way}", command.format(path=path, stem=path.rpartition("/")[2].partition(".")[0]))


def changing(target: str, path: str) -> Iterator[Attempt]:
    """Attempts to change a file outside."""
    for way, command in CHANGING.items():
        yield Attempt(f"{way}: {target}", command.format(path=path))
