"""The doctor lists this machine's parts, and what each part of Shoal misses. Reads only; imports nothing heavy."""

import os
import platform
import shutil
import sqlite3
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from shoal.errors import SandboxUnavailable
from shoal.files import cache_directory
from shoal.net.process import cores
from shoal.observe.trackers import KINDS
from shoal.run.machine.devices import Threads
from shoal.sandbox.runner import strongest

REQUIRED = ("torch", "transformers", "tokenizers", "safetensors", "reasoning-gym", "math-verify", "pyarrow")
OPTIONAL = {
    "openai": "tasks.agent = module:function",
    **dict.fromkeys(KINDS, "metrics.trackers"),
    "llguidance": "response_format of shoal serve",
    "trl": "shoal bench trl",
}


def diagnosis() -> dict[str, object]:
    """Collects a line per finding; a value that begins with `missing` needs action."""
    threads = Threads()
    memory = psutil.virtual_memory()
    cache = cache_directory()
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "cores": cores(),
        "threads": f"{threads.engine} for the engine, {threads.trainer} for the trainer",
        "memory": f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB",
        "gpu": "nvidia-smi found" if shutil.which("nvidia-smi") else "none: everything runs on the CPU",
        "sandbox": _sandbox(),
        "sqlite": sqlite3.sqlite_version,
        **{name: _installed(name) or f"missing: pip install {name}" for name in REQUIRED},
        **{name: _installed(name) or f"not installed; only {use} needs it" for name, use in OPTIONAL.items()},
        "cache": f"{cache} ({'writable' if _writable(cache) else 'missing: not writable; set XDG_CACHE_HOME'})",
    }


def _sandbox() -> str:
    """Finds the sandbox backend for untrusted programs by trying."""
    try:
        return strongest().value
    except SandboxUnavailable as error:
        return f"missing: {error}"


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _writable(path: Path) -> bool:
    while not path.exists():
        path = path.parent
    return os.access(path, os.W_OK)
