"""Sandbox backends that work on this machine, found by running a trial program in each."""

import sys
from collections.abc import Mapping
from functools import cache

from shoal.errors import SandboxUnavailable
from shoal.sandbox.program import Backend, Program, ProgramLimits
from shoal.sandbox.supervisor import run_on

_ADVICE = "install bubblewrap (on Debian and Ubuntu: apt install bubblewrap), or use Linux 6.2 or newer with Landlock"
_TRIAL = Program("open('file', 'w').write('x'); print(input())", stdin=b"works")
_LIMITS = ProgramLimits(wall_s=20.0)


@cache
def why_not(backend: Backend) -> str:
    """Reason why this machine lacks a backend; empty when a program ran in it."""
    if sys.platform != "linux":
        return "needs Linux"
    try:
        finished = run_on(backend, _TRIAL, _LIMITS)
    except (SandboxUnavailable, OSError) as error:
        return str(error)
    if finished.stdout != b"works\n":
        return f"a trial program {finished.ended.value}: {finished.stderr.decode(errors='replace').strip()[-300:]}"
    return ""


def probe() -> Mapping[Backend, str]:
    """Reasons (`why_not`) of every backend, strongest first."""
    return {backend: why_not(backend) for backend in Backend}


@cache
def backend() -> Backend:
    """Strongest backend that works. Raises `SandboxUnavailable` when none works."""
    for candidate in Backend:
        if not why_not(candidate):
            return candidate
    found = "; ".join(f"{candidate.value}: {why}" for candidate, why in probe().items())
    raise SandboxUnavailable(f"no sandbox for untrusted programs works on this machine ({found}); {_ADVICE}")


def in_use() -> str:
    """Name of the strongest backend that works, or `none`."""
    try:
        return backend().value
    except SandboxUnavailable:
        return "none"
