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
    ]


@contextmanager
def vllm_serving(model: Path, log: Path, *more: str) -> Iterator[str]:
    """The URL of a server, started as docs/guides/gpus.md says with more arguments, and ended at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, **ENVIRONMENT}
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
