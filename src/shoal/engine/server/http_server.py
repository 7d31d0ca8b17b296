"""Engine process: `python -m shoal.engine.server.http_server --model DIR [--port 0] [--weights DIR]`.

The process serves `routes` to clients with its token, by default on loopback. A parent sends the token as a frame over
the socket `--fd`, and gets the URL in answer when the engine is ready. An engine started by hand reads the token from
the environment (`SHOAL_ENGINE_TOKEN`), or makes one and prints it.
"""

import argparse
import asyncio
import os
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shoal import files
from shoal.engine.compute.options import EngineLimits, OnUpdate
from shoal.engine.server.http_client import TOKEN_VARIABLE
from shoal.errors import ConfigError, ShoalError
from shoal.net.collection import UNUSED_BY_MODELS, loading
from shoal.net.listening import listening_socket
from shoal.net.process import die_with_parent, receive_frame, send_frame
from shoal.net.server import serving

if TYPE_CHECKING:
    from shoal.engine.compute.step_engine import StepEngine
    from shoal.engine.server.routes import EngineServer


def main(arguments: Sequence[str]) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    options = options_of(arguments)
    if options.die_with_parent:
        die_with_parent()
    try:
        with loading(hidden=UNUSED_BY_MODELS):
            engine = engine_of(options)
        listening = listening_socket(options.host, options.port)
    except ShoalError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return asyncio.run(_serve(engine, listening, options))


async def _serve(engine: "StepEngine", listening: socket.socket, options: argparse.Namespace) -> int:
    stopping, failures = asyncio.Event(), list[BaseException]()

    def crashed(error: BaseException) -> None:
        failures.append(error)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    token, report = _token(options.fd)
    server = server_of(engine, options, token, crashed)
    async with serving(server.app, listening=listening, idle_s=600, grace_s=1) as url:
        report(url)
        await stopping.wait()
        server.stop()  # while answers can still be sent
    return 1 if failures else 0


def server_of(
    engine: "StepEngine", options: argparse.Namespace, token: str, crashed: Callable[[BaseException], None]
) -> "EngineServer":
    """Routes of an engine as the options say; clients send the token."""
    from shoal.engine.compute.weight_loading import weight_file
    from shoal.engine.server.routes import EngineServer

    model = Path(options.model)
    # The cache of the Hugging Face hub links to another folder.
    own = [model, weight_file(model).resolve().parent] if model.is_dir() else []
    return EngineServer(engine, crashed=crashed, token=token, weights=[*options.weights, *own], model_dir=model)


def engine_of(options: argparse.Namespace) -> "StepEngine":
    """Engine of the options' model. Raises a `ShoalError`."""
    import torch

    from shoal.engine.compute.step_engine import StepEngine
    from shoal.engine.compute.weight_loading import weight_file
    from shoal.model.file_sizes import longest_row
    from shoal.model.loading import load_model, resolve_device

    torch.set_num_threads(options.threads)
    path = Path(options.model)
    device = resolve_device(options.device)
    model = load_model(options.model, dtype=options.dtype, device=device)
    own = longest_row(model.config.get_text_config())
    longest = options.max_model_len or own
    if longest is None or (own is not None and longest > own):
        raise ConfigError(f"max_model_len: expected at most the {own} tokens of the model, got {longest}")
    if options.kv_tokens is not None and options.kv_tokens < longest:
        raise ConfigError(f"kv_tokens: expected room for max_model_len = {longest} tokens, got {options.kv_tokens}")
    return StepEngine(
        model,
        EngineLimits(
            max_model_len=longest,
            max_running=options.max_running,
            max_waiting=options.max_waiting,
            chunk_tokens=options.chunk_tokens,
            kv_tokens=options.kv_tokens,
            max_adapters=options.max_adapters,
            prefix_cache_bytes=options.prefix_cache_megabytes * 2**20,
        ),
        on_update=OnUpdate(options.on_update),
        version=options.version,
        checksum=files.checksum(weight_file(path)) if weight_file(path).is_file() else "",
        seed=secrets.randbits(63),
        records_routing=options.record_routing,
    )


def _token(fd: int | None) -> tuple[str, Callable[[str], object]]:
    """Token that clients must send, and the function that reports the URL."""
    if fd is not None:
        parent = socket.socket(fileno=fd)
        if (sent := receive_frame(parent)) is None:
            sys.exit("the parent process has ended")
        return sent[1].decode(), lambda url: send_frame(parent, url.encode(), sent[0])
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if not token:
        token = secrets.token_urlsafe(24)
        sys.stderr.write(f"clients need {TOKEN_VARIABLE}={token}\n")
    return token, lambda url: sys.stderr.write(f"serving at {url}\n")


def options_of(arguments: Sequence[str]) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(prog="python -m shoal.engine.server.http_server")
    defaults = EngineLimits(max_model_len=2)
    parser.add_argument("--model", required=True, help="Hugging Face directory or hub name")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda or auto")
    parser.add_argument("--threads", type=int, default=1, help="cores that compute")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--fd", type=int, help="inherited socket: the token comes in, the URL goes out when ready")
    parser.add_argument(
        "--weights", type=Path, action="append", default=[], help="folder that new weights are loaded from; repeatable"
    )
    parser.add_argument("--die-with-parent", action="store_true", help="end when the parent does (Linux)")
    parser.add_argument("--max-model-len", type=int, help="tokens of one sequence; the model's own limit when unset")
    parser.add_argument("--max-running", type=int, default=defaults.max_running, help="sequences decoded at once")
    parser.add_argument("--max-waiting", type=int, default=defaults.max_waiting, help="sequences queued")
    parser.add_argument("--chunk-tokens", type=int, default=defaults.chunk_tokens, help="tokens prefilled per step")
    parser.add_argument("--kv-tokens", type=int, help="tokens of KV storage; room for all that may run when unset")
    parser.add_argument(
        "--prefix-cache-megabytes", type=int, default=256, help="KV kept of ended sequences; 0 keeps none"
    )
    parser.add_argument("--max-adapters", type=int, default=defaults.max_adapters, help="adapters loaded by name")
    parser.add_argument("--on-update", default=OnUpdate.RECOMPUTE, choices=list(OnUpdate))
    parser.add_argument("--record-routing", action="store_true", help="answer with the experts of each token, too")
    parser.add_argument("--version", type=int, default=0, help="of the weights in --model")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
