"""A process that scores: `python -m shoal.reward.worker --fd N`. It may be killed at any moment.

The worker holds untrusted text, so it starts in a sandbox with namespaces where the machine has one (`--boxed`).
Elsewhere it takes system calls, capabilities and, with Landlock, files from itself before the first answer. In both
cases it gives up environment, inherited files, writing to files, new processes and memory beyond a limit. An audit hook
refuses the remaining ways out of Python code.
"""

import argparse
import math
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal import checker, wire
from shoal.checker import Spec
from shoal.errors import TaskError
from shoal.net.process import die_with_parent, send_frame, serve
from shoal.patterns import compiled
from shoal.reward import checkers
from shoal.reward.bound import OutOfTime, within
from shoal.reward.mathematics import mathematics
from shoal.reward.messages import MEMORY_BYTES, OPEN_FILES, AnswerVerdict, Batch, WorkerReady
from shoal.reward.reasoning import scorer_of
from shoal.reward.schema import complaint_of, json_in
from shoal.sandbox import files, kernel, seccomp
from shoal.sandbox.command import installed_packages, own_package, visible

Judging = Callable[[str], tuple[float, str]]
"""An answer's value, and the evidence for it."""


def judge_of(spec: Spec, truth: str | None) -> Judging:
    """The function that judges the answers to a task. Raises `TaskError` for a truth that the checker cannot use."""
    if truth is None and checker.needs_truth(spec):
        raise TaskError(f"expected a task with an answer, which {spec.__struct_config__.tag} compares with")
    judge = _judging(spec, truth or "")
    if truth is not None and checker.needs_truth(spec):
        try:
            judge(truth)
        except ValueError as error:
            raise TaskError(str(error)) from None
    return judge


def _judging(spec: Spec, truth: str) -> Judging:
    match spec:
        case checker.Exact():
            fold = str.casefold if spec.ignore_case else str
            return lambda answer: (checkers.exact(fold(answer), fold(truth)), "")
        case checker.Contains():
            return lambda answer: (checkers.contains(answer, truth), "")
        case checker.Number():
            return lambda answer: (checkers.number(answer, truth), "")
        case checker.Math():
            return lambda answer: mathematics(answer, truth, spec.tolerance)
        case checker.Regex():
            return _regex(spec, truth)
        case checker.JsonSchema():
            return _json_schema(spec, truth)
        case checker.Format():
            return lambda answer: checkers.formatted(answer, spec.tags)
        case checker.Language():
            return lambda answer: (checkers.script_share(answer, spec.script), "")
        case checker.Length():
            return lambda answer: _length(spec, answer)
        case _:
            raise TaskError(f"{spec.__struct_config__.tag} is not checked by a worker process")


def _length(spec: checker.Length, answer: str) -> tuple[float, str]:
    count = len(answer.split()) if spec.unit == "words" else len(answer)
    return checkers.length_share(count, spec.at_most, spec.over, spec.at_least), f"{count} {spec.unit}"


def _regex(spec: checker.Regex, truth: str) -> Judging:
    try:
        pattern = compiled(spec.pattern or truth)
    except ValueError as error:
        raise TaskError(str(error)) from None
    match = pattern.fullmatch if spec.match == "full" else pattern.search
    return lambda answer: (float(match(answer.strip()) is not None), "")


def _json_schema(spec: checker.JsonSchema, truth: str) -> Judging:
    try:
        complaint = complaint_of(spec.schema)
        differs = complaint_of({"const": json_in(truth)} if truth else True)
    except ValueError as error:
        raise TaskError(str(error)) from None

    def judge(answer: str) -> tuple[float, str]:
        try:
            value = json_in(answer)
        except ValueError as error:
            return 0.0, f"no JSON: {error}"
        why = complaint(value) or (differs(value) and "another value than the truth")
        return float(not why), why

    return judge


_REFUSED = (
    *("os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link", "os.mkdir"),
    *("os.posix_spawn", "os.putenv", "os.remove", "os.rename", "os.rmdir", "os.spawn", "os.symlink", "os.system"),
    *("os.truncate", "os.utime", "ctypes.", "pty.", "shutil.", "socket.", "subprocess.", "sys.settrace"),
)
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def prepared(batch: Batch) -> Callable[[str], tuple[float, str]]:
    """The function that gives an answer's value and evidence. Raises `TaskError` when the task cannot be scored."""
    if not isinstance(batch.spec, checker.ReasoningGym):
        return judge_of(batch.spec, batch.truth)
    if batch.receipt is None:
        raise TaskError("expected a task with a receipt: reasoning_gym scores its own questions only")
    return scorer_of(batch.receipt, batch.truth)


def verdict_of(judge: Callable[[str], tuple[float, str]], answer: str, cpu_s: float) -> AnswerVerdict:
    """One answer's verdict. A scorer's error makes the answer wrong, because the task was prepared without error."""
    try:
        value, evidence = within(cpu_s, judge, answer)
    except OutOfTime:
        return AnswerVerdict(0.0, exhausted=True)
    except Exception as error:  # scorers raise whatever an odd answer makes them raise
        return AnswerVerdict(0.0, f"the scorer could not read it: {type(error).__name__}: {error}"[:500])
    if not math.isfinite(value):
        return AnswerVerdict(0.0, error=f"the scorer answered {value}")
    return AnswerVerdict(value, evidence)


def replies(frame: bytes) -> Iterator[bytes]:
    """The reply on the task of a batch, then the verdict on each answer."""
    batch = wire.decode(frame, Batch)
    try:
        judge = prepared(batch)
    except TaskError as error:
        yield wire.encode(WorkerReady(str(error)))
        return
    yield wire.encode(WorkerReady())
    for answer in batch.answers:
        yield wire.encode(verdict_of(judge, answer, batch.cpu_s))


def confine(*, boxed: bool) -> None:
    """Gives up all that scoring does not need; with `boxed` the process is inside of a sandbox already."""
    os.environ.clear()
    os.environ["PYTHONHASHSEED"] = "0"  # states what this process was started with
    sys.dont_write_bytecode = True
    if boxed:
        os.chdir("/")
    else:
        folder = tempfile.mkdtemp(prefix="shoal-")
        os.chdir(folder)
        shutil.rmtree(folder)  # a folder that is gone stays empty, and leaves nothing to clean up
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nowhere, stream)
    os.close(nowhere)
    limits = {
        resource.RLIMIT_AS: MEMORY_BYTES,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: OPEN_FILES,
    }
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))
    if not boxed:
        _enter_sandbox()
    sys.addaudithook(_refuse)


def _enter_sandbox() -> None:
    """Takes from the running process what the kernel can: system calls always, files where it has Landlock."""
    caches = [Path(os.path.expanduser(place)) for place in ("~/.cache/matplotlib", "~/.config/matplotlib")]
    readable = visible(own_package(), *installed_packages(), *(path for path in caches if path.is_dir()))
    kernel.drop_capabilities()
    if files.landlock_version() >= files.OLDEST:
        files.restrict(readable, "")
    kernel.install_filter(seccomp.program_filter(kernel.MACHINE, os.getpid()))


def _refuse(event: str, arguments: tuple[object, ...]) -> None:
    if event.startswith(_REFUSED):
        raise PermissionError(f"{event} is refused while scoring")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITING:
        raise PermissionError("writing to files is refused while scoring")


def main() -> None:
    """Entry point of the process."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--boxed", action="store_true")
    arguments = parser.parse_args()
    connection = socket.socket(fileno=arguments.fd)
    confine(boxed=arguments.boxed)
    send_frame(connection, wire.encode(WorkerReady()))
    serve(connection, replies)


if __name__ == "__main__":
    main()
