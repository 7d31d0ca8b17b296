"""`shoal replay`, `whatif`, `why` and `bisect`: compute a run again from its log. Steps count from 1."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from shoal.cli.arguments import HELP, WithSettings
from shoal.cli.output import JsonFlag, printable, show_table
from shoal.cli.runs import RunArgument


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
