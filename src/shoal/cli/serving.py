"""`shoal serve` answers clients of a model, or the tinker package's training loops."""

import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import until_stopped
from shoal.errors import ConfigError


class Api(StrEnum):
    """Clients that `shoal serve` answers."""

    OPENAI = "openai"
    TINKER = "tinker"


def serve(
    context: typer.Context,
    model: Annotated[
        list[str], typer.Option(help="Directory, hub name, GGUF file, demo or smollm2; tinker takes several.")
    ],
    api: Annotated[Api, typer.Argument(help="Clients to answer: OpenAI's and Anthropic's, or the tinker package.")] = (
        Api.OPENAI
    ),
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8000,
    host: Annotated[
        str, typer.Option(help="Beyond loopback an API key is wanted: SHOAL_ADMIN_KEY, or a new one.")
    ] = "127.0.0.1",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    promote: Annotated[
        str | None,
        typer.Option(help="Run or model for a growing share of users, until it is surely better or worse."),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where tinker's models and requests, or outcomes of --promote, are kept: in runs/."),
    ] = None,
    engines: Annotated[
        int, typer.Option(min=0, help="Weights that tinker's clients sample from at once, on this host.")
    ] = 1,
    log: Annotated[Path | None, typer.Option(help="File that gets a line of JSON per request.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request in the terminal.")] = False,
) -> None:
    """Answer OpenAI, Anthropic or tinker clients.

    With tinker, --cluster.listen=HOST:PORT and other settings of that section let engines and the trainer join it.
    """
    from shoal.config import parse
    from shoal.gateway.chat import example
    from shoal.gateway.request_log import RequestLog, RequestRecord
    from shoal.net.process import cores
    from shoal.run.commands.serve import serve as serve_model
    from shoal.run.machine.devices import devices_of

    if api is Api.TINKER:
        if log is not None:
            raise ConfigError(f"--log: expected none with tinker, whose requests are kept in --folder; got {log}")
        if promote is not None:
            raise ConfigError(f"--promote: expected none with tinker, whose clients choose weights; got {promote}")
        from shoal.run.commands.serve import serve_tinker

        kept = folder or Path("runs/tinker")

        def announce_tinker(url: str, key: str, names: Sequence[str], roles_url: str) -> None:
            print(f"TINKER_BASE_URL={url} TINKER_API_KEY={key}", f"base_model: {', '.join(names)}", sep="\n")
            if roles_url:
                print(f"roles join {roles_url}; SHOAL_RUN_TOKEN is in {kept / 'run.token'}")
            sys.stdout.flush()

        share = max(cores() // 2, 1)
        serving = serve_tinker(
            model,
            kept.absolute(),
            host=host,
            port=port,
            engines=engines,
            threads=share,
            device=device,
            announce=announce_tinker,
            on_event=lambda name, state: print(name, state, flush=True),
            overrides=context.obj,
        )
        until_stopped(serving)
        return
    if context.obj:
        raise ConfigError(f"{context.obj[0]}: expected an option of this command; settings are taken with tinker")
    if len(model) > 1:
        raise ConfigError(f"--model: expected one, got {len(model)}; only tinker serves several")
    config = parse({"model": {"path": model[0], "device": device}, "tasks": [{"name": "chain_sum"}]})
    devices_of(config, trains=False)

    def announce(url: str, name: str, key: str, chats: bool) -> None:
        path, body = example(name, chats=chats)
        known = f" -H 'Authorization: Bearer {key}'" if key else ""
        curl = f"curl {url}{path} -H 'Content-Type: application/json'{known} -d '{body}'"
        print(f"{url}/v1", curl, sep="\n", flush=True)

    with closing(RequestLog(log)) if log else nullcontext() as file:

        def on_request(record: RequestRecord) -> None:
            if not quiet:
                print(record.line, file=sys.stderr, flush=True)
            if file is not None:
                file.write(record)

        until_stopped(
            serve_model(
                config.model,
                promote=promote or "",
                folder=folder or Path("runs/promotion"),
                host=host,
                port=port,
                threads=cores(),
                announce=announce,
                on_promotion=lambda words: print(words, file=sys.stderr, flush=True),
                on_request=on_request,
            )
        )
