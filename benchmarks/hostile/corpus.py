# ruff: noqa: E501
"""The corpus holds programs that try to leave a sandbox, harm targets outside, exceed their share, or lie.

A successful case prints BREACH. `bare` cases also run without a sandbox, where they must succeed: an attack that never
works proves nothing. In the sources, @NAME@ stands for a target outside (see `Outside`).
"""

from dataclasses import dataclass
from enum import StrEnum

from shoal.sandbox.program import Ended


class Verdict(StrEnum):
    """Required end of a case."""

    REFUSED = "refused"
    """Program that exits with an error, without what it asked for."""
    KILLED = "killed"
    """Program that a limit ends, or refuses until it gives up."""
    WRONG = "wrong"
    """Program that ends as it likes, without a right answer."""


@dataclass(frozen=True, slots=True)
class Case:
    """One hostile program."""

    name: str
    verdict: Verdict
    source: str
    bare: bool = False
    """True if the case succeeds without a sandbox, harmlessly enough to be shown."""
    ends: frozenset[Ended] = frozenset(Ended)
    files: tuple[tuple[str, bytes], ...] = ()


def _refused(name: str, source: str, *, bare: bool = True) -> Case:
    return Case(name, Verdict.REFUSED, source, bare, frozenset({Ended.EXITED}))


def _killed(name: str, source: str, *ends: Ended) -> Case:
    return Case(name, Verdict.KILLED, source, ends=frozenset(ends))


def _wrong(name: str, source: str, files: tuple[tuple[str, bytes], ...] = ()) -> Case:
    return Case(name, Verdict.WRONG, source, files=files)


_TIME = (Ended.KILLED_WALL, Ended.KILLED_CPU)
_READING = [
    _refused("read_passwd", "print('BREACH', open('/etc/passwd').read())"),
    _refused("read_run_directory", "print('BREACH', open('@SECRET@').read())"),
    _refused("list_run_directory", "import os; print('BREACH', os.listdir('@FOLDER@'))"),
    _refused("read_by_symlink", "import os; os.symlink('@SECRET@', 'link'); print('BREACH', open('link').read())"),
    _refused(
        "read_by_hard_link", "import os; os.link('@SECRET@', 'link'); print('BREACH', open('link').read())", bare=False
    ),
    _refused("read_by_dots", "print('BREACH', open('../' * 40 + '@SECRET@').read())"),
    _refused("read_by_chroot_escape", "import os; os.mkdir('x'); os.chroot('x'); print('BREACH')", bare=False),
    _refused(
        "read_home",
        "import os; print('BREACH', os.listdir('/home') + os.listdir('/root' if os.getuid() == 0 else '/home'))",
        bare=False,
    ),
    _refused("read_proc_self_environ", "print('BREACH', open('/proc/self/environ').read())"),
    _refused("read_parent_environ", "import os; print('BREACH', open(f'/proc/{os.getppid()}/environ').read())"),
    _refused("read_parent_memory", "print('BREACH', open('/proc/@PARENT@/mem', 'rb'))"),
    _refused(
        "walk_proc",
        "import os; print('BREACH', [open(f'/proc/{n}/cmdline').read() for n in os.listdir('/proc') if n.isdigit()])",
    ),
    _refused("walk_proc_descriptors", "import os; print('BREACH', os.listdir('/proc/@PARENT@/fd'))"),
    _refused("root_through_proc", "import os; print('BREACH', os.listdir('/proc/@PARENT@/root@FOLDER@'))"),
    _refused("read_sys", "import os; print('BREACH', os.listdir('/sys'))"),
    _refused(
        "read_disk",
        "import glob; print('BREACH', open((glob.glob('/dev/[sv]da') + ['/dev/disk'])[0], 'rb'))",
        bare=False,
    ),
    _refused("read_kernel_log", "print('BREACH', open('/dev/kmsg'))", bare=False),
    _refused(
        "open_by_handle",
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); b = ctypes.create_string_buffer(b'\\x80' + b'\\0' * 200); m = ctypes.c_int(); assert l.name_to_handle_at(-100, b'/', b, ctypes.byref(m), 0) == 0; print('BREACH')",
    ),
    _wrong("read_environment", "import os; print('BREACH' if set(os.environ) - {'LC_CTYPE'} else 'nothing')"),
    _wrong(
        "find_inherited_descriptors",
        """
import os
for number in range(3, 1024):
    try: os.fstat(number)
    except OSError: continue
    print('BREACH', number)
""",
    ),
]
_WRITING = [
    _refused("write_outside", "open('@TARGET@', 'w').write('x'); print('BREACH')"),
    _refused("write_over_a_secret", "open('@SECRET@', 'a').write('x'); print('BREACH')"),
    _refused("truncate_outside", "import os; os.truncate('@VICTIM@', 0); print('BREACH')"),
    _refused("remove_outside", "import os; os.remove('@VICTIM@'); print('BREACH')"),
    _refused("rename_outside", "import os; os.rename('@VICTIM@', '@VICTIM@2'); print('BREACH')"),
    _refused("change_mode_outside", "import os; os.chmod('@VICTIM@', 0o777); print('BREACH')"),
    _refused("change_times_outside", "import os; os.utime('@VICTIM@', (1, 1)); print('BREACH')"),
    _refused("make_folder_outside", "import os; os.mkdir('@TARGET@'); print('BREACH')"),
    _refused("make_symlink_outside", "import os; os.symlink('/', '@TARGET@'); print('BREACH')"),
    _refused(
        "write_by_symlink", "import os; os.symlink('@TARGET@', 'link'); open('link', 'w').write('x'); print('BREACH')"
    ),
    _refused("write_tmp", "open('/tmp/shoal-hostile', 'x'); print('BREACH')", bare=False),
    Case(
        "write_shared_memory",
        Verdict.WRONG,
        """
import os
try: open('/dev/shm/shoal-hostile', 'x')
except OSError: print('nothing')
else: print('nothing' if os.path.samefile('/dev/shm', '.') else 'BREACH')
""",
        bare=False,
    ),
    _refused(
        "write_standard_library",
        "import os; open(os.path.dirname(os.__file__) + '/hostile.py', 'w'); print('BREACH')",
        bare=False,
    ),
    _refused(
        "write_sitecustomize",
        "import os, sys; open(os.path.join(sys.path[-1], 'sitecustomize.py'), 'w').write('x'); print('BREACH')",
        bare=False,
    ),
    _refused(
        "make_device",
        "import os, stat; os.mknod('disk', stat.S_IFBLK | 0o666, os.makedev(254, 0)); open('disk', 'rb').read(1); print('BREACH')",
        bare=False,
    ),
    _refused("set_user_id_program", "import os; os.setuid(0); print('BREACH', open('@SECRET@').read())", bare=False),
    _refused(
        "mount",
        "import ctypes; l = ctypes.CDLL(None); assert l.mount(b'none', b'.', b'tmpfs', 0, None) == 0; print('BREACH')",
        bare=False,
    ),
    _refused(
        "namespaces_of_its_own",
        "import ctypes; l = ctypes.CDLL(None); assert l.unshare(0x10000000) == 0; print('BREACH')",
    ),
]
_NETWORK = [
    _refused(
        "connect_loopback",
        "import socket; socket.create_connection(('127.0.0.1', @PORT@), 2).send(b'x'); print('BREACH')",
    ),
    _refused(
        "connect_outside", "import socket; socket.create_connection(('192.0.2.1', 80), 2); print('BREACH')", bare=False
    ),
    _refused(
        "send_datagram",
        "import socket; socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', @UDP@)); print('BREACH')",
    ),
    _refused("resolve_name", "import socket; print('BREACH', socket.getaddrinfo('example.invalid', 80))", bare=False),
    _refused("listen", "import socket; socket.create_server(('127.0.0.1', 0)); print('BREACH')"),
    _refused(
        "abstract_socket",
        "import socket; s = socket.socket(socket.AF_UNIX); s.connect('\\0@ABSTRACT@'); print('BREACH')",
    ),
    _refused(
        "datagram_with_a_path",
        "import socket; a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', '@DATAGRAMS@'); print('BREACH')",
    ),
    _refused("unix_socket", "import socket; s = socket.socket(socket.AF_UNIX); s.connect('@UNIX@'); print('BREACH')"),
    _refused(
        "packet_socket", "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print('BREACH')", bare=False
    ),
    _refused("netlink_socket", "import socket; socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); print('BREACH')"),
    _refused(
        "urlopen",
        "import urllib.request; print('BREACH', urllib.request.urlopen('http://127.0.0.1:@PORT@', timeout=2))",
        bare=False,
    ),
    _refused(
        "io_uring",
        "import ctypes; l = ctypes.CDLL(None); b = ctypes.create_string_buffer(120); assert l.syscall(425, 2, b) >= 0; print('BREACH')",
        bare=False,
    ),
]
_PROCESSES = [
    _refused(
        "lease_on_a_library",
        "import fcntl, os; fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), 1024, fcntl.F_RDLCK); print('BREACH')",
    ),
    *(
        _refused(
            f"guessed_{call}",
            f"import ctypes, os; l = ctypes.CDLL(None, use_errno=True); l.{call}(*{arguments}); "
            "assert ctypes.get_errno() not in (1, 13), 'refused'; print('BREACH')",
        )
        for call, arguments in (
            ("semctl", (1 << 20, 0, 0)),
            ("semop", (1 << 20, 0, 0)),
            ("msgctl", (1 << 20, 0, 0)),
            ("msgrcv", (1 << 20, 0, 0, 0, 2048)),
            ("mq_unlink", (b"/shoal-none",)),
        )
    ),
    _refused("signal_parent", "import os, signal; os.kill(@PARENT@, signal.SIGUSR1); print('BREACH')"),
    _refused("signal_others", "import os; os.kill(@DECOY@, 9); print('BREACH')"),
    _refused("signal_group_of_others", "import os; os.killpg(@DECOY@, 9); print('BREACH')"),
    _refused(
        "signal_by_pidfd", "import os, signal; signal.pidfd_send_signal(os.pidfd_open(@DECOY@), 9); print('BREACH')"
    ),
    _refused(
        "signal_by_file_owner",
        "import os, fcntl, struct; r, w = os.pipe(); fcntl.fcntl(r, 10, 9); fcntl.fcntl(r, 8, @DECOY@); fcntl.fcntl(r, fcntl.F_SETFL, os.O_ASYNC); os.write(w, b'x'); print('BREACH')",
    ),
    _refused(
        "limits_of_others", "import resource; resource.prlimit(@DECOY@, resource.RLIMIT_CORE, (0, 0)); print('BREACH')"
    ),
    _refused("priority_of_others", "import os; os.setpriority(os.PRIO_PROCESS, @DECOY@, 19); print('BREACH')"),
    _refused("cores_of_others", "import os; os.sched_setaffinity(@DECOY@, [0]); print('BREACH')"),
    _refused(
        "trace_parent",
        "import ctypes; l = ctypes.CDLL(None, use_errno=True); assert l.ptrace(16, @DECOY@, None, None) == 0; print('BREACH')",
    ),
    _refused(
        "read_memory_of_others",
        "import ctypes; l = ctypes.CDLL(None); b = ctypes.create_string_buffer(8); v = (ctypes.c_void_p * 2)(ctypes.addressof(b), 8); assert l.process_vm_readv(@DECOY@, v, 1, v, 1, 0) >= 0; print('BREACH')",
        bare=False,
    ),
    _refused("shell", "import subprocess; print('BREACH', subprocess.check_output(['/bin/sh', '-c', 'id']))"),
    _wrong("system", "import os; print('BREACH' if os.system('id') == 0 else 'nothing')"),
    _wrong("signal_everybody", "import os, signal; signal.signal(15, signal.SIG_IGN); os.kill(-1, 15)"),
    _wrong("kill_group", "import os; os.kill(0, 9)"),
    _wrong("kill_first_process", "import os; os.kill(1, 9); print('alive')"),
    _wrong(
        "stay_behind",
        """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for stream in (0, 1, 2): os.close(stream)
        time.sleep(3600)
""",
    ),
    _wrong(
        "debugger_door",
        "import ctypes; l = ctypes.CDLL(None); l.prctl(0x59616d61, -1, 0, 0, 0); l.prctl(1, 0, 0, 0, 0)",
    ),
]
_USING = [
    _killed("loop", "while True: pass", *_TIME),
    _killed("sleep", "import time; time.sleep(3600)", Ended.KILLED_WALL),
    _killed(
        "loop_deaf_to_signals",
        """
import signal
for number in set(signal.valid_signals()) - {9, 19, 32, 33}: signal.signal(number, signal.SIG_IGN)
while True: pass
""",
        *_TIME,
    ),
    _killed("loop_inside_c", "sum(range(10 ** 15))", *_TIME),
    _killed("huge_power", "print(len(str(9 ** 9 ** 9)))", *_TIME, Ended.EXITED, Ended.KILLED_MEMORY),
    _killed("huge_shift", "x = 1 << (1 << 40)", Ended.EXITED),
    _killed("huge_int_text", "int('9' * 10 ** 7)", Ended.EXITED, *_TIME),
    _killed("regex_backtracking", "import re; re.match('(a+)+$', 'a' * 60 + 'b')", *_TIME),
    _killed("memory_at_once", "x = bytearray(1 << 30); print('BREACH')", Ended.EXITED),
    _killed("memory_bit_by_bit", "x = []\nwhile True: x.append(bytearray(1 << 20))", Ended.EXITED, Ended.KILLED_MEMORY),
    _killed("memory_by_mapping", "import mmap; m = mmap.mmap(-1, 1 << 30); print('BREACH')", Ended.EXITED),
    _killed(
        "memory_of_many_processes",
        """
import os, time
for _ in range(15):
    if os.fork() == 0: break
x = bytearray(b'x' * (60 << 20))
time.sleep(3600)
""",
        Ended.KILLED_MEMORY,
        Ended.EXITED,
        *_TIME,
    ),
    _killed(
        "memory_by_file",
        "import ctypes; l = ctypes.CDLL(None); assert l.memfd_create(b'x', 0) >= 0; print('BREACH')",
        Ended.EXITED,
    ),
    _killed("fork_bomb", "import os\nwhile True: os.fork()", Ended.EXITED, Ended.KILLED_PROCESSES, *_TIME),
    _killed(
        "fork_bomb_that_goes_on",
        """
import os
while True:
    try: os.fork()
    except OSError: pass
""",
        Ended.KILLED_PROCESSES,
        *_TIME,
    ),
    _killed(
        "thread_bomb",
        """
import threading, time
threading.stack_size(32768)
while True: threading.Thread(target=time.sleep, args=(3600,)).start()
""",
        Ended.EXITED,
        Ended.KILLED_PROCESSES,
        *_TIME,
    ),
    _killed(
        "gigabyte_of_output", "import os\nfor _ in range(1024): os.write(1, b'x' * (1 << 20))", Ended.KILLED_OUTPUT
    ),
    _killed("endless_errors", "import os\nwhile True: os.write(2, b'x' * 65536)", Ended.KILLED_OUTPUT),
    _killed(
        "large_file", "f = open('f', 'wb')\nwhile True: f.write(b'x' * (1 << 20))", Ended.EXITED, Ended.KILLED_FILES
    ),
    _killed("sparse_file", "open('f', 'wb').truncate(1 << 40); print('BREACH')", Ended.EXITED),
    _killed(
        "many_files", "n = 0\nwhile True:\n    open(f'f{n}', 'w').close(); n += 1", Ended.EXITED, Ended.KILLED_FILES
    ),
    _killed(
        "much_in_many_files",
        "n = 0\nwhile True:\n    open(f'f{n}', 'wb').write(b'x' * (1 << 20)); n += 1",
        Ended.EXITED,
        Ended.KILLED_FILES,
    ),
    _killed(
        "deep_folders",
        "import os\nwhile True: os.mkdir('d' * 50); os.chdir('d' * 50)",
        Ended.EXITED,
        Ended.KILLED_FILES,
    ),
    _killed(
        "many_descriptors",
        "import os\nx = [os.open('/dev/null', 0) for _ in range(1000)]; print('BREACH')",
        Ended.EXITED,
    ),
    _killed(
        "pipes_full",
        "import os\nfor _ in range(1000):\n    r, w = os.pipe(); os.set_blocking(w, False); os.write(w, b'x' * 65536)\nprint('BREACH')",
        Ended.EXITED,
    ),
    _killed(
        "zip_bomb",
        """
import io, zipfile
data = io.BytesIO()
with zipfile.ZipFile(data, 'w', zipfile.ZIP_DEFLATED) as z:
    with z.open('x', 'w', force_zip64=True) as f:
        for _ in range(300): f.write(bytes(1 << 20))
zipfile.ZipFile(data).read('x'); print('BREACH')
""",
        Ended.EXITED,
        Ended.KILLED_MEMORY,
        *_TIME,
    ),
    _killed("deep_recursion", "f = lambda: f()\nf()", Ended.EXITED),
    _killed(
        "recursion_without_limit",
        "import sys; sys.setrecursionlimit(10 ** 9)\nf = lambda n: [f, f(n + 1)]\nf(0)",
        Ended.EXITED,
        Ended.SIGNALLED,
        Ended.KILLED_MEMORY,
    ),
    _killed("nested_source", "eval('(' * 10 ** 6)", Ended.EXITED, Ended.SIGNALLED),
    _killed("crash", "import ctypes; ctypes.string_at(0)", Ended.SIGNALLED),
    _killed(
        "raise_own_limits",
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)); print('BREACH')",
        Ended.EXITED,
    ),
    _killed(
        "never_reads_never_ends",
        "import sys, time\nsys.stdout.close()\nsys.stderr.close()\ntime.sleep(3600)",
        Ended.KILLED_WALL,
    ),
    _killed("stop_itself", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", Ended.KILLED_WALL),
    _killed(
        "timer_storm",
        "import signal, time\nsignal.signal(14, lambda *_: None); signal.setitimer(0, 1e-5, 1e-5)\nwhile True: time.sleep(1)",
        *_TIME,
    ),
]
_LYING = [
    _wrong("leave_at_once", "import os; os._exit(0)"),
    _wrong("leave_quietly", "raise SystemExit(0)"),
    _wrong("leave_by_exec", "import os, sys; os.execv(sys.executable, [sys.executable, '-c', ''])"),
    _wrong("say_passed", "print('PASSED\\nOK\\n1 passed in 0.01s\\nreward: 1.0')"),
    _wrong(
        "say_ended",
        "import os\nfor n in range(3, 64):\n    try: os.write(n, b'ended 0 0.0\\n{\"child-pid\": 1}\\n')\n    except OSError: pass",
    ),
    _wrong("other_stream", "import os; os.write(2, b'42\\n')"),
    _wrong("answer_and_more", "print(42); print(43)"),
    _wrong("answer_and_crash", "import os; print(42, flush=True); os.abort()"),
    _wrong("answer_and_hang", "import time; print(42, flush=True); time.sleep(3600)"),
    _wrong("answer_by_exit_code", "raise SystemExit(42)"),
    _wrong(
        "trace", "import sys; sys.settrace(lambda *a: sys.exit(0)); sys.setprofile(lambda *a: None)\n(lambda: None)()"
    ),
    _wrong(
        "patch_builtins",
        "import builtins, sys; builtins.print = lambda *a: sys.stdout.write('PASSED'); builtins.input = lambda: '42'; print(1)",
    ),
    _wrong(
        "equal_to_everything",
        "class Always(int):\n    __eq__ = lambda *a: True\n    __str__ = __repr__ = lambda self: 'PASSED'\nprint(Always(1))",
    ),
    _wrong("leave_at_exit", "import atexit, os; atexit.register(os._exit, 0)\nassert False"),
    _wrong("shadow_modules", "import json; print(json.VALUE)", files=(("json.py", b"VALUE = 'PASSED'"),)),
    _wrong(
        "sitecustomize_of_its_own",
        "print('ran' if 'marked' in __builtins__.__dict__ else 'nothing')",
        files=(("sitecustomize.py", b"import builtins; builtins.marked = 1"), ("usercustomize.py", b"print('BREACH')")),
    ),
    _wrong(
        "import_hooks",
        "import sys\nclass Finder:\n    def find_spec(self, *a): raise SystemExit(0)\nsys.meta_path.insert(0, Finder())\nimport decimal",
    ),
    _wrong(
        "turn_back_the_clock",
        "import time; time.time = time.monotonic = lambda: 0.0; time.clock_settime(time.CLOCK_REALTIME, 0)",
    ),
]
CASES = (*_READING, *_WRITING, *_NETWORK, *_PROCESSES, *_USING, *_LYING)
