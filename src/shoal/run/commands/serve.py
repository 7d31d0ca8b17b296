"""`shoal serve` answers clients with a model: a separate engine, and the gateway before it."""

import os
import secrets
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from shoal.config import EngineConfig, ModelConfig
from shoal.config.settings import EMBEDDED
from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.server.http_client import HttpEngine
from shoal.engine.server.launch import EngineChild, engine_child
from shoal.errors import ChildDied, ModelError, SessionError
from shoal.gateway.request_log import OnRequest
from shoal.gateway.server import Gateway
from shoal.model.renderer_loading import load_renderer
from shoal.net.listening import is_loopback, listening_socket
from shoal.net.process import collect_rarely
from shoal.net.server import serving
from shoal.run.engines import START_TIMEOUT_S
from shoal.run.prepare import model_directory
from shoal.types import Message, Role

ADMIN_KEY = "SHOAL_ADMIN_KEY"
PATIENCE_S = 10.0
"""Seconds for which a request waits for an engine that is full or gone."""


@asynccontextmanager
async def lone_engine(
    model_dir: Path, model: ModelConfig, threads: int
) -> AsyncIterator[tuple[EngineChild, HttpEngine]]:
    """Starts an engine process of a model; yields it with its client. Raises `ChildDied`."""
    with tempfile.TemporaryDirectory(prefix="shoal-engine-") as logs:
        log = Path(logs) / "engine.log"
        child = engine_child(model_dir, EngineConfig(), model, max_model_len=None, threads=threads, log=log)
        async with child, aclosing(await child.serving(START_TIMEOUT_S)) as engine:
            yield child, engine


async def serve(
    model: ModelConfig,
    *,
    host: str,
    port: int,
    threads: int,
    announce: Callable[[str, str, str, bool], None],
    on_request: OnRequest,
) -> None:
    """Serves OpenAI and Anthropic clients until it is cancelled. Raises a `ShoalError`.

    `announce` gets URL, model name, API key and whether the model chats, once requests are answered. The key is empty
    on loopback; elsewhere it comes from the environment, or is new. `on_request` gets each request once it is answered.
    """
    admin_key = "" if is_loopback(host) else os.environ.get(ADMIN_KEY) or secrets.token_urlsafe(24)
    directory = model_directory(model.path)
    name = _served_name(model.path)
    renderer = load_renderer(directory)
    try:
        renderer.prompt_ids([Message(Role.USER, "question")])
    except SessionError as error:
        raise ModelError(f"model {str(directory)!r} has a chat template that cannot be used: {error}") from error
    with listening_socket(host, port) as listening:
        async with lone_engine(directory, model, threads) as (child, engine):
            pool = EnginePool(patience_s=PATIENCE_S)  # of one: it continues aborted answers
            await pool.join("engine", engine)
            longest = (await engine.info()).max_model_len
            gateway = Gateway(
                pool,
                renderer,
                max_model_len=longest,
                model=name,
                also_called=(model.path,),
                model_server=engine,
                on_request=on_request,
                admin_key=admin_key,
                host=host,
            )
            collect_rarely()
            async with serving(gateway.app, listening=listening) as url:
                announce(url, name, admin_key, renderer.has_template)
                raise ChildDied(str(await child.died()))


def _served_name(path: str) -> str:
    """Name of a model for clients: its folder's or file's, or the given name."""
    given = Path(path).expanduser()
    return given.resolve().name if given.exists() and path not in EMBEDDED else path
