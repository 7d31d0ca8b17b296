"""Runs programs one after another inside a sandbox, each in processes of its own. Its text is what the sandbox runs.

Standard library only, and no import that costs time: every batch waits for it. It reads jobs (`shoal.reward.code`)
from standard input and writes one record per run to standard output. What it must keep from the programs:

- expected values never come in here where they can stay outside (`stdin` and `call` jobs);
- where assertions are run (`code` and `pytest` jobs), a tester process runs them, and the program lives in another one
  that was forked before the tester read them; values cross between the two as text;
- standard output, the way out, is closed in every process before a program's first line runs; results go through
  a pipe that this process reads, and it, not the program, says which program they are of;
- after each run everything else in the sandbox is killed and the work folder is emptied.
"""

# mypy: ignore-errors
# ruff: noqa: SIM105
# Untyped on purpose: values of every type pass through, and annotations would cost each batch the import of typing.

import gc
import json
import os
import select
import signal
import struct
import sys
import time

from shoal.reward.in_sandbox.plumbing import (
    ERROR_BYTES,
    close_output,
    complain,
    feed,
    finish,
    namespace,
    read,
    words,
    write_all,
)
from shoal.reward.in_sandbox.tester import run_tests
from shoal.reward.in_sandbox.values import encoded

RECORD = struct.Struct(">IIBiII")
EXITED, SIGNALLED, TIMED_OUT, TOO_MUCH = range(4)
WAKE = []
"""Both ends of the pipe that says that a child has ended."""
_CHUNK = 1 << 16
_HEADER = struct.Struct(">Q")


def main():
    sys.path.pop(0)  # the work folder: what one program leaves there must not be imported by what comes after
    (size,) = _HEADER.unpack(read((0, _HEADER.size)))
    plan = json.loads(read((_HEADER.size, size)))
    gc.freeze()  # a collection in a fork would copy every page that an object of ours lies on
    WAKE.extend(os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(WAKE[1], warn_on_full_buffer=False)
    for number, job in enumerate(plan["jobs"]):
        for span in (job["program"], *job["inputs"]):
            span[0] += _HEADER.size + size
        for case, given in enumerate(job["inputs"]):
            if plan["alone"]:
                run_alone(job, given)
                return
            status, code, out, err = run_apart(job, given)
            tidy()
            write_all(1, RECORD.pack(number, case, status, code, len(out), len(err)) + out + err)
            if status == TIMED_OUT or (code and job["stop"]):
                break


def tidy():
    """Nothing is left of a program: no process, no file."""
    if os.getppid() == 1:  # the first process of this PID namespace, so that all others are the program's
        try:
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
    while True:
        try:
            if os.waitpid(-1, 0)[0] == 0:
                break
        except ChildProcessError:
            break
    empty(".")


def empty(folder):
    for entry in list(os.scandir(folder)):
        if entry.is_dir(follow_symlinks=False):
            os.chmod(entry.path, 0o700)
            empty(entry.path)
            os.rmdir(entry.path)
        elif entry.path != "./main.py":
            os.unlink(entry.path)


def run_apart(job, given):
    """Status, exit code or signal, output and error of one run in a fork."""
    out, their_out = os.pipe()
    err, their_err = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            signal.set_wakeup_fd(-1)
            for descriptor in (out, err, *WAKE):
                os.close(descriptor)
            run_child(job, given, their_out, their_err)
        finally:
            os._exit(70)
    os.close(their_out)
    os.close(their_err)
    for descriptor in (out, err):
        os.set_blocking(descriptor, False)
    status, code, outputs = collected(job, pid, out, err)
    os.close(out)
    os.close(err)
    return status, code, bytes(outputs[out]), bytes(outputs[err][-ERROR_BYTES:])


def collected(job, pid, out, err):
    """What comes out until the process ends, however long its own children go on; it is killed at its limits."""
    outputs = {out: bytearray(), err: bytearray()}
    began = time.monotonic()
    poll = select.poll()
    for descriptor in (out, err, WAKE[0]):
        poll.register(descriptor, select.POLLIN)
    status = None
    while status is None:
        parts = min(outputs[out].count(b"\n") + 1, job["parts"]) if job["parts"] > 1 else 1
        left = began + job["timeout_s"] * parts + job["extra_s"] - time.monotonic()
        for descriptor, _ in poll.poll(max(left, 0) * 1000 + 1):
            if descriptor == WAKE[0]:
                os.read(WAKE[0], _CHUNK)
            elif not drain(descriptor, outputs[descriptor], job["limit"] if descriptor == out else 1 << 20):
                poll.unregister(descriptor)
        ended, waited = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if len(outputs[out]) > job["limit"]:
            status = TOO_MUCH
        elif left <= 0:
            status = TIMED_OUT
    else:
        os.kill(pid, signal.SIGKILL)
        _, waited = os.waitpid(pid, 0)
    drain(out, outputs[out], job["limit"])
    drain(err, outputs[err], 1 << 20)
    code = os.waitstatus_to_exitcode(waited)
    if status is None and len(outputs[out]) > job["limit"]:
        status = TOO_MUCH
    del outputs[out][job["limit"] :]
    if status is None:
        status = SIGNALLED if code < 0 else EXITED
    return status, code, outputs


def drain(descriptor, output, limit):
    """Reads what is there, up to a byte over the limit; whether more may come."""
    while len(output) <= limit:
        try:
            chunk = os.read(descriptor, min(_CHUNK, limit + 1 - len(output)))
        except BlockingIOError:
            return True
        if not chunk:
            return False
        output += chunk
    return True


def run_child(job, given, out, err):
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    os.dup2(err, 2)
    os.close(err)
    kind = job["kind"]
    if kind == "stdin":
        program = read(job["program"])
        feed(read(given))
        os.dup2(out, 1)
        os.close(out)
        finish(run_program(program))
    elif kind == "call":
        program, cases = read(job["program"]), json.loads(read(given))
        feed(b"")
        close_output()
        finish(run_calls(program, cases, out))
    else:
        finish(run_tests(job, given, out))


def run_alone(job, given):
    """Where a sandbox allows one process only: the program runs here, and nothing comes after it."""
    program, data = read(job["program"]), read(given)
    if job["kind"] == "stdin":
        feed(data)
        finish(run_program(program))
    feed(b"")
    out = os.dup(1)
    close_output()
    finish(run_calls(program, json.loads(data), out))


def run_program(program):
    """Runs a script as `python main.py` does; its exit code."""
    sys.argv = ["main.py"]
    try:
        exec(compile(program, "main.py", "exec"), namespace("__main__"))
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        if "atexit" in sys.modules:
            sys.modules["atexit"]._run_exitfuncs()
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 255
        complain(str(error.code))
        return 1
    except BaseException as error:
        complain(words(error))
        return 1
    return 0


def run_calls(program, cases, out):
    """Writes a line per call: its value, or what it raised."""
    scope = namespace("solution")
    try:
        exec(compile(program, "solution.py", "exec"), scope)
    except BaseException as error:
        complain(words(error))
        return 1
    for case in cases:
        try:
            line = {"v": encoded(called(scope, case))}
        except BaseException as error:
            line = {"e": words(error)}
        write_all(out, json.dumps(line).encode() + b"\n")
    return 0


def called(scope, case):
    name, _, method = case["call"].partition(".")
    target = scope[name]
    if method:
        target = getattr(target(), method)
    return target(*case["args"], **case["kwargs"])


if __name__ == "__main__":
    main()
