"""Seccomp filter of the system calls that a sandboxed program may not make. Pure.

Calls are allowed unless this list names them or the kernel added them after this list: new calls open new ways out.
Mounts or Landlock restrict files, and limits restrict resources.
"""

import errno
import struct

NEWEST = 462
"""Number of mseal. Larger numbers answer "not implemented"; both architectures use equal numbers from 424 on."""

_DENIED_NEW = (*range(424, 435), 438, 440, 442, 443, 447, 448, 457, 458)
"""pidfd_*, io_uring_*, the new mount calls, process_madvise and _mrelease, quotactl_fd, memfd_secret."""

_DENIED: dict[str, tuple[int, int]] = {
    # name: number on x86_64, on aarch64 (-1: no such call)
    # Network. socketpair(AF_UNIX) stays for streams: they reach no other process, and asyncio needs them.
    "socket": (41, 198),
    "connect": (42, 203),
    "accept": (43, 202),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept4": (288, 242),
    # Other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140),
    "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119),
    "sched_setaffinity": (203, 122),
    "sched_setattr": (314, 274),
    "ioprio_set": (251, 30),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    # Namespaces and mounts.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    # Large attack surfaces of the kernel.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),
    "io_submit": (209, 2),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "seccomp": (317, 277),
    "vmsplice": (278, 75),
    "personality": (135, 92),
    "modify_ldt": (154, -1),
    "iopl": (172, -1),
    "ioperm": (173, -1),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "finit_module": (313, 273),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "lookup_dcookie": (212, 18),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Memory that no limit counts.
    "memfd_create": (319, 279),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    # Watching files.
    "inotify_init": (253, -1),
    "inotify_init1": (294, 26),
    "inotify_add_watch": (254, 27),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
}
_DENIED_WITHOUT_MOUNTS: dict[str, tuple[int, int]] = {
    # Calls on unreadable files that Landlock does not restrict: modes, owners, times, attributes.
    "chmod": (90, -1),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "fchmodat2": (452, 452),
    "chown": (92, -1),
    "fchown": (93, 55),
    "lchown": (94, -1),
    "fchownat": (260, 54),
    "utime": (132, -1),
    "utimes": (235, -1),
    "futimesat": (261, -1),
    "utimensat": (280, 88),
    "setxattr": (188, 5),
    "lsetxattr": (189, 6),
    "fsetxattr": (190, 7),
    "getxattr": (191, 8),
    "lgetxattr": (192, 9),
    "listxattr": (194, 11),
    "llistxattr": (195, 12),
    "removexattr": (197, 14),
    "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    "flock": (73, 32),
    # Calls that make a second process, or signal one.
    "fork": (57, -1),
    "vfork": (58, -1),
    "tkill": (200, 130),
}
_CLONE3 = 435
_CLONE = (56, 220)
_KILL, _TGKILL = (62, 129), (234, 131)
_SOCKETPAIR, _PRCTL, _FCNTL, _IOCTL, _PRLIMIT = (53, 199), (157, 167), (72, 25), (16, 29), (302, 261)
_NEW_NAMESPACES, _THREAD = 0x7E02_0000, 0x0001_0000
_AF_UNIX, _AF_VSOCK, _DATAGRAM = 1, 40, 2
_IO_URING = (425, 426, 427)
_DENIED_PRCTL = (1, 0x59616D61)  # PR_SET_PDEATHSIG, PR_SET_PTRACER
_LEASE = 1024  # F_SETLEASE: another process that opens the file waits for up to 45 s
_DENIED_FCNTL = (8, 10, 15, _LEASE)  # F_SETOWN, F_SETSIG, F_SETOWN_EX: signals to other processes by way of a file
_DENIED_IOCTL = (0x5412, 0x541C, 0x8901, 0x8902)  # TIOCSTI, TIOCLINUX, FIOSETOWN, SIOCSPGRP

_ARCHITECTURES = {"x86_64": (0, 0xC000_003E), "aarch64": (1, 0xC000_00B7)}
_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_ALLOW, _KILL_PROCESS, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_REFUSE, _MISSING = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4


def program_filter(machine: str, own_pid: int | None) -> bytes:
    """Instructions of the filter for a machine.

    `own_pid` names a program that shares process ids and files with others (no namespaces). Such a program gets no
    second process, no signals but to itself, and no calls that Landlock ignores.

    Raises `ValueError` for a machine whose system calls are unknown here.
    """
    column, code = _begin(machine)
    alone = own_pid is not None
    denied = [*_DENIED.values(), *(_DENIED_WITHOUT_MOUNTS.values() if alone else ())]
    numbers = sorted({*_DENIED_NEW, *(pair[column] for pair in denied if pair[column] >= 0)})
    code += _when(_CLONE3, [_word(_RETURN, _MISSING)])  # the filter cannot see its flags; libraries fall back to clone
    code += _when(_CLONE[column], _clone(alone=alone))
    code += _when(_SOCKETPAIR[column], _stream_pair())
    for call, index, values in ((_PRCTL, 0, _DENIED_PRCTL), (_FCNTL, 1, _DENIED_FCNTL), (_IOCTL, 1, _DENIED_IOCTL)):
        code += _when(call[column], _only(index, values, found=_REFUSE, other=_ALLOW))
    code += _when(_PRLIMIT[column], _only(0, (0,)))
    if own_pid is not None:
        code += _when(_KILL[column], _only(0, (own_pid,)))
        code += _when(_TGKILL[column], _only(0, (own_pid,)))
    for number in numbers:
        code += _when(number, [_word(_RETURN, _REFUSE)])
    return b"".join([*code, _word(_RETURN, _ALLOW)])


def agent_filter(machine: str) -> bytes:
    """Instructions of the filter for an agent with a network. Raises `ValueError` as `program_filter`.

    Landlock does not restrict sockets with a path, which services of the machine have (containers, systemd).
    """
    column, code = _begin(machine)
    code += _when(_DENIED["socket"][column], _only(0, (_AF_UNIX, _AF_VSOCK), found=_REFUSE, other=_ALLOW))
    code += _when(_SOCKETPAIR[column], _stream_pair())
    code += _when(_FCNTL[column], _only(1, (_LEASE,), found=_REFUSE, other=_ALLOW))
    for number in _IO_URING:  # it makes sockets unseen
        code += _when(number, [_word(_RETURN, _REFUSE)])
    return b"".join([*code, _word(_RETURN, _ALLOW)])


def _begin(machine: str) -> tuple[int, list[bytes]]:
    """Column of a machine in the tables, and a filter's begin: known system calls of this machine alone go on."""
    if machine not in _ARCHITECTURES:
        raise ValueError(f"expected {' or '.join(_ARCHITECTURES)}, got {machine}")
    column, architecture = _ARCHITECTURES[machine]
    code = [_word(_LOAD, _ARCHITECTURE_AT), _jump(_EQUAL, architecture, 1, 0), _word(_RETURN, _KILL_PROCESS)]
    return column, [*code, _word(_LOAD, _NUMBER_AT), _jump(_GREATER, NEWEST, 0, 1), _word(_RETURN, _MISSING)]


def _word(code: int, value: int) -> bytes:
    return struct.pack("HBBI", code, 0, 0, value)


def _jump(code: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Instructions that apply `body`, which must return, to one system call only."""
    return [_jump(_EQUAL, number, 0, len(body)), *body]


def _argument(index: int) -> bytes:
    """Loads the lower half of an argument; calls that take an int ignore the upper half."""
    return _word(_LOAD, 16 + 8 * index)


def _only(index: int, values: tuple[int, ...], found: int = _ALLOW, other: int = _REFUSE) -> list[bytes]:
    tests = [_jump(_EQUAL, value, len(values) - at, 0) for at, value in enumerate(values)]
    return [_argument(index), *tests, _word(_RETURN, other), _word(_RETURN, found)]


def _stream_pair() -> list[bytes]:
    """A pair that stays a pair: a datagram socket also sends to any path."""
    return [_argument(1), _jump(_ANY_BIT, _DATAGRAM, 0, 1), _word(_RETURN, _REFUSE), *_only(0, (_AF_UNIX,))]


def _clone(*, alone: bool) -> list[bytes]:
    code = [_argument(0), _jump(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _word(_RETURN, _REFUSE)]
    if alone:
        code += [_jump(_ANY_BIT, _THREAD, 1, 0), _word(_RETURN, _REFUSE)]
    return [*code, _word(_RETURN, _ALLOW)]
