"""`shoal runs`, `shoal init`, `shoal compare` and `shoal chat`. A RUN is a path, or a name under runs/."""

import asyncio
import json
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag, printable, show, show_table, stoppable
from shoal.errors import ModelError, RunDirError, did_you_mean

RUNS = Path("runs")
NEWEST = 5
"""Number of runs that the error about a missing run lists."""


def run_at(name: str) -> Path:
    """Directory of a run: the path itself if it exists, else the run of that name under runs/.

    >>> run_at("nowhere/demo")
    PosixPath('nowhere/demo')
    """
    named = RUNS / name
    return named if not Path(name).exists() and named.is_dir() else Path(name)


def existing_run(name: str) -> Path:
    """Directory of an existing run. Raises `RunDirError` with the nearest name, or the newest runs."""
    run = run_at(name)
    if run.exists():
        return run
    raise RunDirError(f"{name}: expected a run directory, or a run's name under {RUNS}, got neither{_near_runs(name)}")


def _near_runs(name: str) -> str:
    """The end of a complaint about a missing run: the nearest name, or the newest runs."""
    newest = [path.name for path in sorted(_runs(), key=lambda path: path.stat().st_mtime, reverse=True)]
    known = f"; {RUNS} has {', '.join(newest[:NEWEST])}" if newest else f"; {RUNS} has none: shoal demo makes one"
    return did_you_mean(Path(name).name, newest, str) or known


def _runs() -> list[Path]:
    """Folders under runs/."""
    return [path for path in RUNS.iterdir() if path.is_dir()] if RUNS.is_dir() else []


def run_names(incomplete: str) -> list[str]:
    """Names under runs/ that begin with `incomplete`, for a shell's completion."""
    return sorted(path.name for path in _runs() if path.name.startswith(incomplete))


RunArgument = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run directory, or a run's name under runs/.",
        parser=existing_run,
        autocompletion=run_names,
    ),
]
Starter = StrEnum("Starter", ["first", "data", "reward", "agent", "trl", "verifiers", "swarm"])


def list_runs(
    folder: Annotated[Path, typer.Argument(help="Where the run directories lie.")] = RUNS, json_: JsonFlag = False
) -> None:
    """List runs, the newest last: state, steps, reward, held-out reward."""
    from shoal.observe.listing import listed_runs
    from shoal.observe.progress import duration

    found = listed_runs(folder)
    if json_:
        print(json.dumps({"runs": found}))
        return
    if not found:
        print(f"{folder} holds no run; shoal demo makes one")
        return
    rows = [("name", "state", "steps", "reward", "held-out reward", "last record", "model and tasks")]
    for one in found:
        ends = [f"{value:.3g}" for value in (one["eval_reward_before"], one["eval_reward_after"]) if value is not None]
        rows.append(
            (
                str(one["name"]),
                str(one["state"]),
                f"{one['steps']} of {one['of'] or '?'}",
                "-" if one["reward"] is None else f"{one['reward']:.3g}",
                " -> ".join(ends) or "-",
                f"{duration(time.time() - float(str(one['written_s'])))} ago",
                f"{one['model']}: {one['tasks']}",
            )
        )
    show_table(rows)


def restore(
    backup: Annotated[str, typer.Argument(help="A folder or a URL, as in checkpoint.backup.")],
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A new run directory.")],
) -> None:
    """Make a run directory from a backup, for --resume."""
    from shoal.run.backup import restore as restore_run

    restore_run(backup, run)
    print(f"{run}\n\nnext:\n  shoal train {run} --resume")


def init(
    kind: Annotated[Starter, typer.Argument(help="What is your own: data, a reward, an agent, ...")],
    folder: Annotated[Path | None, typer.Argument(help="A new folder; my-KIND when unset.")] = None,
) -> None:
    """Write a folder that runs, to be changed into your own.

    first: the demo as a configuration; data: a file of questions; reward: a function; agent: an OpenAI client; trl and
    verifiers: tasks written for them; swarm: two nodes.
    """
    from shoal.run.commands.starters import write_starter

    folder = folder or Path(f"my-{kind.value}")
    written, commands = write_starter(kind.value, folder)
    print("\n".join(str(path) for path in written))
    print("\nnext:")
    print("\n".join(f"  {command}" for command in (f"cd {folder}", *commands)))


def chat(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL", help="A run, a Hugging Face directory or hub name, or demo.", autocompletion=run_names
        ),
    ],
    system: Annotated[str, typer.Option(help="Message before the conversation.")] = "",
    temperature: Annotated[float, typer.Option(min=0, max=2, help="0 takes the most likely token each time.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens of one answer.")] = 512,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Talk with a model. /new begins anew; Ctrl-D ends."""
    from shoal.config import parse
    from shoal.run.commands.chat import ChatOptions, Prompt, chat_with
    from shoal.run.prepare import check_model

    def say(text: str) -> None:
        print("\n".join(map(printable, text.split("\n"))), end="", flush=True)

    try:
        check_model(str(run_at(model)))
    except ModelError as error:
        raise ModelError(f"{error}; a run would do too{_near_runs(model)}") from None
    config = parse({"model": {"path": str(run_at(model)), "device": device}, "tasks": [{"name": "chain_sum"}]})
    options = ChatOptions(system, temperature, max_tokens)
    asyncio.run(chat_with(config, options, Prompt(), say))


def compare(
    context: typer.Context,
    first: Annotated[
        str, typer.Argument(metavar="A", help="A run, RUN@start, a model or an engine's URL.", autocompletion=run_names)
    ],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.", autocompletion=run_names)],
    config: Annotated[
        Path | None, typer.Option(help="CONFIG.toml with the tasks to ask; those of the run when unset.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, help="Held-out questions at most.")] = 1024,
    json_: JsonFlag = False,
) -> None:
    """Ask two models the same held-out questions until one is surely better."""
    from shoal.run.commands.compare import START
    from shoal.run.commands.compare import compare as compare_models

    def place(model: str) -> str:
        return f"{run_at(model.removesuffix(START))}{START}" if model.endswith(START) else str(run_at(model))

    models = [model if "://" in model else place(model) for model in (first, second)]
    with stoppable():
        values = compare_models(
            (models[0], models[1]), config, context.obj, questions, lambda words: print(words, file=sys.stderr)
        )
    verdict = str(values.pop("verdict"))
    if not json_:
        print(printable(verdict))
    show({**values, "verdict": verdict} if json_ else values, json_)
