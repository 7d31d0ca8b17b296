"""Commands about runs, which compute them again or ahead, too. A RUN is a path, or a name under runs/."""

import asyncio
import json
import sys
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.arguments import HELP, WithSettings
from shoal.cli.output import JsonFlag, printable, show, show_table, stoppable
from shoal.errors import ModelError, RunDirError, ShoalError, did_you_mean

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
    from shoal.observe.progress import duration
    from shoal.observe.status import listed_runs

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


def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="The step to take again.")],
    to: Annotated[int | None, typer.Option(min=1, help="The last of a range of steps.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Take logged steps again, and compare weights and statistics with the run's."""
    from shoal.run.blocking import run_blocking
    from shoal.run.commands.replay import Repeated, replay_steps

    def show(one: Repeated) -> None:
        if not json_:
            print(one.sentence, flush=True)

    found = run_blocking(replay_steps(run, step - 1, (to or step) - 1, show))
    differ = [one.step + 1 for one in found if not one.same]
    unrecorded = sum(one.recorded is None for one in found)
    if json_:
        weights = {one.step + 1: one.weights for one in found}
        print(json.dumps({"steps": len(found), "differ": differ, "unrecorded": unrecorded, "weights": weights}))
    elif unrecorded:
        print(f"{unrecorded} of {len(found)} steps have no recorded weights: an earlier Shoal trained them")
    else:
        print(f"{len(found) - len(differ)} of {len(found)} steps have the same bits as in the run")
    raise typer.Exit(int(bool(differ)))


def whatif(
    context: typer.Context,
    run: RunArgument,
    first: Annotated[int, typer.Option("--from", min=1, help="The first step to train anew.")],
    until: Annotated[int, typer.Option(min=1, help="The last one.")],
    out: Annotated[
        Path | None, typer.Option(help="A new folder for metrics and model, for shoal view and compare.")
    ] = None,
    json_: JsonFlag = False,
) -> None:
    """Train logged groups again under another loss, advantage, rate or filter, such as --train.loss=cispo."""
    from shoal.run.blocking import run_blocking
    from shoal.run.commands.whatif import OtherStep, curves, summary, what_if

    def show(one: OtherStep) -> None:
        if not json_:
            print(one.sentence, flush=True)

    found = run_blocking(what_if(run, first - 1, until - 1, context.obj, show, out))
    if json_:
        print(json.dumps(summary(found)))
        return
    print("\n".join(curves(found)))
    if doubtful := [one.step + 1 for one in found if not one.believable]:
        print(f"from step {doubtful[0]} on this policy would have given other answers: believe only what is before")


def why(
    run: RunArgument,
    step: Annotated[int, typer.Option(min=1, help="The step to explain.")],
    json_: JsonFlag = False,
) -> None:
    """Tell what moved the weights in a step: its groups by influence, and what was clipped, late or changed."""
    from shoal.run.blocking import run_blocking
    from shoal.run.commands.replay import HEADS, reasons

    found = run_blocking(reasons(run, step - 1))
    if json_:
        print(json.dumps(found.values))
        return
    print("\n".join(printable(line) for line in found.sentences), end="\n\n")
    show_table([HEADS, *(one.row for one in found.groups)])


def bisect(
    run: RunArgument,
    bad: Annotated[int, typer.Option(min=1, help="A step by whose end the run is damaged.")],
    good: Annotated[int, typer.Option(min=0, help="An earlier step that is not; 0 is the start.")] = 0,
    metric: Annotated[
        Literal["heldout", "reward"],
        typer.Option(help="Logprob of right held-out answers, or reward expected among logged held-out answers."),
    ] = "heldout",
    json_: JsonFlag = False,
) -> None:
    """Find the step, its groups and their tokens whose removal removes a damage."""
    from shoal.run.blocking import run_blocking
    from shoal.run.commands import bisect as bisection
    from shoal.run.commands.replay import GROUP_HEADS

    def show(line: str) -> None:
        if not json_:
            print(line, flush=True)

    found = run_blocking(bisection.bisect(run, good - 1, bad - 1, bisection.Metric(metric), show))
    if json_:
        print(json.dumps(found.values))
        return
    print(found.sentence)
    if found.tokens:
        show_table([(*GROUP_HEADS, "tokens"), *found.rows])


def add_to(app: typer.Typer, panel: str) -> None:
    """Adds these commands to a panel of the command line's help."""
    app.command(rich_help_panel=panel)(replay)
    app.command(cls=WithSettings, epilog=HELP, rich_help_panel=panel)(whatif)
    app.command(rich_help_panel=panel)(why)
    app.command(rich_help_panel=panel)(bisect)


ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Any field can follow as --section.key.")]
GpusOption = Annotated[str, typer.Option(help="TRAINER+ENGINES, or TRAINER+ENGINESxGPUS_PER_ENGINE: 8+24x2.")]
GpuOption = Annotated[str, typer.Option(help="a100, h100, h800, h20, h200, b200 or l40s.")]
LikeOption = Annotated[Path | None, typer.Option(help="A run whose answers have the lengths and rewards.")]
TokensOption = Annotated[int | None, typer.Option(min=1, help="Mean tokens of an answer; a third of max_tokens.")]
PromptOption = Annotated[int, typer.Option(min=0, help="Tokens of a prompt.")]
PriceOption = Annotated[float | None, typer.Option(min=0, help="Price of a GPU; a round guess when unset.")]


def rehearse(
    context: typer.Context,
    config: ConfigArgument,
    gpus: GpusOption = "8+24",
    gpu: GpuOption = "h100",
    like: LikeOption = None,
    answer_tokens: TokensOption = None,
    prompt_tokens: PromptOption = 256,
    hours: Annotated[float | None, typer.Option(min=0.01, help="Rehearsed hours; all steps when unset.")] = None,
    score_s: Annotated[float, typer.Option(min=0, help="Seconds to score an answer.")] = 0.0,
    spot_hours: Annotated[float | None, typer.Option(min=0.01, help="Hours between losses of one engine.")] = None,
    usd_per_gpu_hour: PriceOption = None,
    tokens_per_s: Annotated[float | None, typer.Option(min=1, help="Search for the cheapest way there.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Run a configuration's control code on a virtual clock with GPUs that are not there."""
    from shoal.config import load
    from shoal.rehearsal.rehearse import rehearse as rehearsed
    from shoal.rehearsal.scene import Spot, figures_of
    from shoal.rehearsal.search import RehearsedSettings, answers_of, hardware_of, scene_of, searched

    settings = load(config, context.obj)
    answers = answers_of(settings, like and existing_run(str(like)), answer_tokens, prompt_tokens)
    hardware = hardware_of(settings, gpus, gpu, answers, usd_per_gpu_hour)
    spot = Spot(3600 * spot_hours) if spot_hours else None
    if tokens_per_s is not None:

        def said(found: RehearsedSettings) -> None:
            print(found.sentence(), file=sys.stderr)

        show(asdict(searched(settings, hardware, answers, tokens_per_s=tokens_per_s, said=said, spot=spot)), json_)
        return
    seconds = None if hours is None else 3600 * hours
    scene = scene_of(
        settings, hardware, answers, seconds=seconds, spot=spot, score_s=lambda rng: score_s,
        scorers=settings.reward.workers or 1,
    )  # fmt: skip
    try:
        figures = figures_of(scene, rehearsed(scene), hardware.count, hardware.usd_per_gpu_hour)
    except ValueError as error:
        raise ShoalError(f"--hours: {error}") from error
    show(asdict(figures), json_)


def plan(
    context: typer.Context,
    config: ConfigArgument,
    gpus: GpusOption = "8+24",
    gpu: GpuOption = "h100",
    like: LikeOption = None,
    answer_tokens: TokensOption = None,
    prompt_tokens: PromptOption = 256,
    json_: JsonFlag = False,
) -> None:
    """Print the expected seconds of a step on GPUs, the idle shares and a better split."""
    from shoal.config import load
    from shoal.rehearsal.search import answers_of, hardware_of, step_cost

    settings = load(config, context.obj)
    answers = answers_of(settings, like and existing_run(str(like)), answer_tokens, prompt_tokens)
    show(step_cost(settings, hardware_of(settings, gpus, gpu, answers, None), answers), json_)
