"""`shoal swarm ...` serves, joins and inspects a swarm; `shoal judge ...` challenges models and grades answers."""

import asyncio
import json
import os
import sys
import time
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from shoal.cli.arguments import HELP, WithSettings
from shoal.cli.output import JsonFlag, announce, from_checkout, show, until_stopped
from shoal.cli.runs import RunArgument
from shoal.errors import ConfigError, RunDirError

app = typer.Typer(name="swarm", help="Nodes that learn from each other's text.", no_args_is_help=True)


@app.command()
def serve(
    folder: Annotated[Path, typer.Option(help="Where its streams are kept.")] = Path("runs/swarm-server"),
    host: Annotated[
        str, typer.Option(help="Address to listen at; beyond loopback, set a token and TLS.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 4222,
    name: Annotated[str, typer.Option(help="Name of this server, unique in a cluster.")] = "",
    cluster_port: Annotated[int | None, typer.Option(help="Where the other servers of a cluster reach it.")] = None,
    route: Annotated[list[str] | None, typer.Option(help="nats://HOST:CLUSTER_PORT of another server.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM key.")] = None,
    token: Annotated[str | None, typer.Option(help="Token that nodes must know.", envvar="SHOAL_SWARM_TOKEN")] = None,
    include: Annotated[Path | None, typer.Option(help="More nats-server configuration: accounts, leaf nodes.")] = None,
) -> None:
    """Run a server for nodes, until Ctrl-C."""
    from shoal.swarm.wire.server import NatsServer, ServerOptions

    routes = tuple(route or ())
    options = ServerOptions(folder, host, port, name, cluster_port, routes, tls_cert, tls_key, token, include)

    async def run() -> None:
        async with NatsServer(options) as server:
            known = server.url.replace("://", "://TOKEN@") if token else server.url
            announce(f"shoal train CONFIG.toml --swarm.servers='[\"{known}\"]' --swarm.external_groups=4")
            raise RunDirError(f"{await server.died()}; see {folder / 'server.log'}")

    until_stopped(run())


@app.command("desk", cls=WithSettings, epilog=HELP)
def human_ui(
    context: typer.Context,
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.toml", help="Configuration of a node, whose tasks are asked.")
    ],
    folder: Annotated[Path, typer.Option(help="Its key, status and ban list.")] = Path("runs/desk"),
    host: Annotated[str, typer.Option(help="Address to listen at; beyond loopback, put TLS before it.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8400,
    answers: Annotated[int, typer.Option(min=2, max=16, help="Answers that complete a question.")] = 4,
    wait_s: Annotated[
        float, typer.Option(min=0, help="Seconds since the last answer, after which fewer suffice.")
    ] = 30.0,
) -> None:
    """Ask people questions on a web page, and offer their answers to the swarm."""
    from shoal.config import load
    from shoal.run.commands.swarm import serve_human
    from shoal.swarm.human.human_node import QuestionPace

    settings, pace = load(config, context.obj), QuestionPace(answers, wait_s)
    until_stopped(serve_human(settings, folder, pace, host=host, port=port, announce=announce))


@app.command(cls=WithSettings, epilog=HELP)
def join(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Any field can follow as --section.key=value.")],
    server: Annotated[list[str] | None, typer.Option(help="Instead of swarm.servers.")] = None,
    model_url: Annotated[str | None, typer.Option(help="Answer with a frozen model: an OpenAI URL, with /v1.")] = None,
    model: Annotated[str, typer.Option(help="Name of the model there; the only one if unset.")] = "",
    key: Annotated[str, typer.Option(help="API key of the model.", envvar="SHOAL_MODEL_KEY")] = "",
    rule: Annotated[str | None, typer.Option(help="Answer with a program: truth, or module:function.")] = None,
    every: Annotated[float, typer.Option(min=0.125, help="Seconds between two questions that are answered.")] = 1.0,
    groups: Annotated[int | None, typer.Option(min=1, help="Stop after as many.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Join without training: a remote model or a rule answers the tasks.

    A node that trains joins with `shoal train`, with swarm.servers and swarm.external_groups set. Identity and status
    are in the configuration's run_dir with -join after it, unless --run_dir names another folder.
    """
    from shoal.config import load
    from shoal.run.commands.swarm import answerer_of, generate
    from shoal.swarm.generator import GeneratorPace

    settings = load(config, [*([f"--swarm.servers={json.dumps(server)}"] if server else []), *context.obj])
    if not any(override.removeprefix("--").startswith("run_dir=") for override in context.obj):
        settings = settings.model_copy(update={"run_dir": f"{settings.run_dir}-join"})
    pace = GeneratorPace(settings.rollout.group_size, every, groups)
    say = partial(print, file=sys.stderr, flush=True)
    until_stopped(generate(settings, answerer_of(settings, model_url, model, key, rule), pace, say))
    values = status_of(Path(settings.run_dir))
    if values is not None:  # else it was stopped before it began
        show(values, json_)


@app.command()
def status(
    run: RunArgument,
    json_: JsonFlag = False,
) -> None:
    """Show a node's connection, peers, and offers shared, taken and refused."""
    values = status_of(run)
    if values is None:
        raise RunDirError(f"{run} is not the run of a swarm's node: it has no swarm/status.json")
    if not json_ and isinstance(written_s := values.get("time_s"), int | float):
        values["time_s"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    show(values, json_)


def status_of(run: Path) -> dict[str, object] | None:
    """Newest status of a node; None if it has not written any. Raises `RunDirError`."""
    from shoal.run.join_swarm import FOLDER
    from shoal.swarm.peer import STATUS_FILE

    path = run / FOLDER / STATUS_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise RunDirError(f"{path}: expected a node's status: {error}") from error


@app.command(cls=WithSettings, epilog=HELP)
def invite(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Configuration of a node of the swarm.")],
    server: Annotated[list[str] | None, typer.Option(help="Address for guests, instead of swarm.servers.")] = None,
    token: Annotated[str, typer.Option(help="Token of the server.", envvar="SHOAL_SWARM_TOKEN")] = "",
    nkey: Annotated[Path | None, typer.Option(help="Make a key for the guest in this file.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Print the line with which another node joins: address, key and data sets."""
    from shoal.config import load
    from shoal.run.commands.swarm import invite as invited

    settings = load(config, [*([f"--swarm.servers={json.dumps(server)}"] if server else []), *context.obj])
    made = invited(settings, token, nkey)
    if json_:
        print(json.dumps(made))
        return
    print(made["line"])
    if made["public_key"]:
        print(f"give the guest {nkey}, and the server's accounts the user {{ nkey: {made['public_key']} }}")


@app.command()
def ban(run: RunArgument, peer_id: Annotated[str, typer.Argument(help="As `shoal swarm status` shows it.")]) -> None:
    """Ban a peer; a running node follows within seconds."""
    from shoal.run.join_swarm import FOLDER
    from shoal.swarm.peer import ban_in

    if len(peer_id) != 32 or not all(digit in "0123456789abcdef" for digit in peer_id):
        raise ConfigError(f"peer id: expected 32 hexadecimal digits, got {peer_id!r}")
    if not run.is_dir():
        raise RunDirError(f"{run} is not a run directory")
    ban_in(run / FOLDER, [peer_id])


@app.command()
def demo(
    nodes: Annotated[int, typer.Option(min=4, max=16, help="Two of them do not train.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each node, alone and in the swarm.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed of questions and sampling.")] = 0,
    folder: Annotated[Path | None, typer.Option(help="Where it is written; a new one under runs/.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Train nodes together and alone on this machine; from a source checkout."""
    from_checkout("swarm demo")
    from examples.swarm_demo import DemoPlan, run_swarm_demo

    folder = folder or Path("runs") / time.strftime("swarm-demo-%Y%m%d-%H%M%S")
    show(run_swarm_demo(DemoPlan(folder.absolute(), nodes, steps, seed)), json_)


TrainedBy = StrEnum("TrainedBy", ["swarm", "solo"])
"""Values of `swarm.judge.messages.Condition`; its module imports packages that a task's worker may lack."""

judges = typer.Typer(name="judge", help="Challenge models and grade their answers.", no_args_is_help=True)

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="URL of the judge.")]
JudgeOption = Annotated[str | None, typer.Option(help="The judge's peer id, if any other is to be refused.")]


@judges.command("serve")
def judge_models(
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[CONFIG.toml]", help="Configuration whose tasks are asked; SAPO's nine without one."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder of its key and its store.")] = Path("runs/judge"),
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 8300,
    questions: Annotated[int, typer.Option(min=1, max=50, help="Questions of every specialty in a challenge.")] = 3,
    sitting_s: Annotated[float, typer.Option(min=1, help="Seconds that one seed is used.")] = 3600.0,
    answer_s: Annotated[float, typer.Option(min=1, help="Seconds to answer a challenge.")] = 600.0,
    every_s: Annotated[float, typer.Option(min=0.01, help="Seconds between a peer's challenges, on average.")] = 30.0,
    workers: Annotated[int, typer.Option(min=1, help="Processes that score.")] = 1,
) -> None:
    """Issue challenges and grade answers, until Ctrl-C."""
    from shoal.run.commands.swarm import serve_judge
    from shoal.swarm.judge.judging import Rules

    rules = Rules(questions, sitting_s, answer_s, peer_every_s=every_s)
    until_stopped(serve_judge(config, folder, rules, host=host, port=port, workers=workers, announce=announce))


@judges.command()
def take(
    judge_url: UrlArgument,
    engine: Annotated[str, typer.Option(help="OpenAI-compatible URL of the model, with /v1.")],
    model: Annotated[str, typer.Option(help="Its name there, and on the leaderboard.")],
    identity: Annotated[Path, typer.Option(help="The peer's key; created if it does not exist.")] = Path(
        "runs/taker/identity.pem"
    ),
    arm: Annotated[TrainedBy, typer.Option(help="How it is trained.")] = TrainedBy.solo,
    round_: Annotated[int, typer.Option("--round", min=0, help="Training rounds that it has behind it.")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer, at most.")] = 1024,
    temperature: Annotated[float | None, typer.Option(min=0, help="The server's own when unset.")] = None,
    key_env: Annotated[str, typer.Option(help="Environment variable with the model's API key.")] = "OPENAI_API_KEY",
    judge: JudgeOption = None,
    json_: JsonFlag = False,
) -> None:
    """Have a model answer one challenge, and print the verdict."""
    from shoal.config.urls import checked_url
    from shoal.net.identity import Identity
    from shoal.swarm.generator import ChatModel
    from shoal.swarm.judge.client import take as take_challenge
    from shoal.swarm.judge.messages import Condition

    chat = ChatModel(checked_url("--engine", engine), model, os.environ.get(key_env, ""), max_tokens, temperature)
    key = Identity.load(identity)
    challenge, verdict, unanswered = asyncio.run(
        take_challenge(judge_url.rstrip("/"), chat, key, arm=Condition(arm.value), round_=round_, judge=judge)
    )
    passed: dict[str, list[bool]] = {}
    for answer in verdict.marks:
        passed.setdefault(answer.specialty, []).append(answer.passed)
    values: dict[str, object] = {
        "peer_id": key.peer_id,
        "challenge": challenge.id,
        "sitting": challenge.sitting,
        "attempt": challenge.attempt,
        "pass@1": verdict.score,
        "unanswered": unanswered,
    }
    show(values | {name: sum(one) / len(one) for name, one in passed.items()}, json_)
