"""Processes that a test starts in the background: none outlives its test, whatever becomes of it."""

import subprocess

_started: "list[subprocess.Popen[str]]" = []


def ended_with_its_test(process: "subprocess.Popen[str]") -> "subprocess.Popen[str]":
    """The process, which is killed after the test unless it has ended; its children end with it."""
    _started.append(process)
    return process


def end_all() -> None:
    """Kills what is left."""
    while _started:
        process = _started.pop()
        process.kill()
        process.wait()
