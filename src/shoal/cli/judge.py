"""`shoal judge ...` challenges models and grades their answers; the judge has no stake in them."""

import asyncio
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag, announce, show, until_stopped

TrainedBy = StrEnum("TrainedBy", ["swarm", "solo"])
"""Values of `swarm.judge.messages.Condition`; its module imports packages that a task's worker may lack."""

app = typer.Typer(name="judge", help="Challenge models and grade their answers.", no_args_is_help=True)

UrlArgument = Annotated[str, typer.Argument(metavar="URL", help="URL of the judge.")]
JudgeOption = Annotated[str | None, typer.Option(help="The judge's peer id, if any other is to be refused.")]


@app.command()
def serve(
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


@app.command()
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
    from shoal.swarm.answerers import ChatModel
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
