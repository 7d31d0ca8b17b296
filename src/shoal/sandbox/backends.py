"""Which sandboxes this machine can build: each is tried, not looked up."""

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
    """Why this machine has no such sandbox; empty when a program ran in one."""
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
    """`why_not` of every rung, strongest first."""
    return {backend: why_not(backend) for backend in Backend}


@cache
def backend() -> Backend:
    """The strongest that works. Raises `SandboxUnavailable` when none does."""
    for candidate in Backend:
        if not why_not(candidate):
            return candidate
    found = "; ".join(f"{candidate.value}: {why}" for candidate, why in probe().items())
    raise SandboxUnavailable(f"no sandbox for untrusted programs works on this machine ({found}); {_ADVICE}")


def in_use() -> str:
    """The name of the strongest that works, or `none`."""
    try:
        return backend().value
    except SandboxUnavailable:
        return "none"
