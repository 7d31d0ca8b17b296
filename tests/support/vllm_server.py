"""A real vLLM server on the CPU, for the tests that `make test-vllm` runs."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PYTHON = os.path.abspath(said) if (said := os.environ.get("SHOAL_VLLM_PYTHON")) else ""
"""Of an environment that has vLLM; absolute, since roles start it in folders of their own. Empty: none is named."""
START_TIMEOUT_S = 240.0
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
    "PYTHONPATH": "",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""Variables of a small server."""


def command_at(model: str, port: str) -> list[str]:
    """The command of a server, as docs/guides/gpus.md says."""
    return [
        *(PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", "127.0.0.1", "--port", port, "--dtype", "float32", "--max-num-seqs", "64"),
        *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
        *("--max-logprobs", "528"),
    ]


def second_runner(folder: Path) -> dict[str, str]:
    """Variables with which vLLM's Model Runner V2, made for GPUs, runs on the CPU: masks and experts are told by it.

    Triton interprets its kernels. A plugin of vLLM, written into `folder`, names the interpreter as Triton's backend,
    gives it loops over numbers that convert, and leaves experts to the CPU's kernel while adapters are on: theirs has
    an operation that the wheel for CPUs lacks, and no adapter of these tests is of an expert.
    """
    for name, text in PLUGIN.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


PLUGIN = {
    "interpreted-0.dist-info/METADATA": "Metadata-Version: 2.1\nName: interpreted\nVersion: 0\n",
    "interpreted-0.dist-info/entry_points.txt": (
        "[triton.backends]\ncpu = interpreted\n[vllm.general_plugins]\ninterpreted = interpreted:load\n"
    ),
    "interpreted/compiler.py": (
        "from triton.backends.compiler import BaseBackend\n"
        "class Backend(BaseBackend): pass\n"
        "Backend.__abstractmethods__ = frozenset()\n"
    ),
    "interpreted/driver.py": (
        "from triton.backends.driver import DriverBase\n"
        "class Driver(DriverBase):\n"
        "    is_active = classmethod(lambda cls: True)\n"
        "Driver.__abstractmethods__ = frozenset()\n"
    ),
    "interpreted/__init__.py": (
        "class Number(int):\n"
        "    def to(self, dtype): return self\n"
        "def load():\n"
        "    from triton.runtime import interpreter\n"
        "    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig\n"
        "    interpreter.range = lambda *bounds: map(Number, range(*map(int, bounds)))\n"
        "    FusedMoEConfig.is_lora_enabled = property(lambda self: False, lambda self, value: None)\n"
    ),
}


@contextmanager
def vllm_serving(model: Path, log: Path, *more: str, **environment: str) -> Iterator[str]:
    """The URL of a server, started as docs/guides/gpus.md says with more arguments, and ended at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **ENVIRONMENT, **environment}
    command = [*command_at(str(model), str(port)), *more]
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=env, stdout=output, stderr=output, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not answers(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answers(url: str) -> bool:
    """Whether the server says that it is well."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False
