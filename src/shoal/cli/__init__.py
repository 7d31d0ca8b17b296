"""The command line. Exit code 0 means success, 2 a user error."""

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli import runs as run_commands
from shoal.cli import services, workspace
from shoal.cli import swarm as swarm_commands
from shoal.cli.arguments import HELP, GoalOption, Misuse, WithSettings, misuse
from shoal.cli.output import (
    JsonFlag,
    ViewFlag,
    fail,
    from_checkout,
    page_beside,
    printable,
    show,
    show_answers,
    show_what_next,
    stoppable,
    until_stopped,
    warn,
)
from shoal.cli.runs import RunArgument, existing_run, run_at, run_names
from shoal.cli.serving import serve
from shoal.errors import ShoalError
from shoal.net.collection import uncollected

app = typer.Typer(name="shoal", no_args_is_help=True, pretty_exceptions_enable=False)

FIRST, LOOK, MODELS = "Begin here", "Look at runs", "Use models"
MACHINE, MANY = "This machine", "Several machines"
BENCHES = (
    *("async", "chaos", "cli", "cluster", "engine", "gateway", "hostile", "links", "memory", "orchestrator", "packing"),
    *("push", "real", "rewards", "sealing", "slurm", "swarm", "tinker", "trainer", "trl", "view", "workspaces"),
)
"""Names of `benchmarks.MODULES`, which an installed package does not have."""


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version as installed_version

        print(f"shoal {installed_version('shoal')}")
        raise typer.Exit


@app.callback()
def shoal(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    """Shoal trains language models with reinforcement learning: on this machine, on many, and in swarms."""


@app.command(cls=WithSettings, epilog=HELP, rich_help_panel=FIRST)
def demo(
    context: typer.Context,
    run_dir: Annotated[Path | None, typer.Option(help="Where the run is written; a new folder under runs/.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the questions and the sampling.")] = 0,
    real: Annotated[bool, typer.Option("--real", help="A pretrained model, SmolLM2, learns sums.")] = False,
    view: ViewFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Train the embedded model on this machine."""
    from shoal.run.commands.demo import demo_config, real_config, run_demo

    config = (real_config if real else demo_config)(run_dir, seed, context.obj)
    with page_beside(config.run_dir, view):
        with stoppable(config.run_dir):
            figures, words = run_demo(config)
        print(words)
        show_answers(config.run_dir)
        show(figures, json_)
        show_what_next(Path(config.run_dir))


app.command(rich_help_panel=FIRST)(run_commands.init)


@app.command(cls=WithSettings, epilog=HELP, rich_help_panel=FIRST)
def train(
    context: typer.Context,
    config: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG.toml",
            help="Any field can follow as --section.key=value; with --resume also a run, or its name under runs/.",
            autocompletion=run_names,
        ),
    ],
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run directory's log ends.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Validate, print the plan and stop.")] = False,
    gpu: Annotated[str, typer.Option(help="GPU of a dry run, such as h200; the machine's own when unset.")] = "",
    view: ViewFlag = False,
    json_: JsonFlag = False,
) -> None:
    """Train a model as a configuration says."""
    from shoal.config import load

    if resume and config.suffix != ".toml" and not config.is_file():
        run = existing_run(str(config))
        config, context.obj = run / "resolved.toml", [f"run_dir={json.dumps(str(run))}", *context.obj]
    settings = load(config, context.obj)
    if remote := [task.name for task in settings.tasks if task.service == "remote"]:
        at = "http://{}:{}".format(*settings.services_at or ())
        print(f"waiting for: shoal task serve MODULE:TASK --orchestrator {at}  ({', '.join(remote)})", file=sys.stderr)
    if dry_run:
        from shoal.run.commands.plan import plan

        show(plan(settings, resume=resume, gpu=gpu), json_)
        return
    if settings.stages:
        from shoal.run.commands.supervised import run_stages

        with stoppable(settings.run_dir):
            show(run_stages(settings, resume=resume), json_)
        return
    with uncollected():
        from shoal.observe.report import write_report
        from shoal.run.training import train_with_progress

    with page_beside(settings.run_dir, view):
        with stoppable(settings.run_dir):
            result = train_with_progress(settings, resume=resume)
        write_report(result.run_dir)
        show_answers(settings.run_dir, sys.stderr)
        show(result.figures, json_)
        show_what_next(result.run_dir)
        if result.warning:
            warn(result.warning)


@app.command(rich_help_panel=LOOK)
def view(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="Run directories, or names under runs/; the newest there when none.",
            parser=run_at,
            autocompletion=run_names,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Beyond loopback the address that is printed has a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    attached: Annotated[
        bool, typer.Option("--attached", hidden=True, help="Wait for the run; end with the caller.")
    ] = False,
) -> None:
    """Watch runs on a page: curves, rollouts, tokens, waits."""
    import webbrowser

    from shoal.net.process import die_with_parent
    from shoal.observe.metrics import newest_run
    from shoal.observe.view.server import serve_view

    if attached:
        die_with_parent()

    def announce(url: str) -> None:
        print(url, flush=True)
        if not no_open:
            webbrowser.open(url)

    chosen = [run if attached else existing_run(str(run)) for run in runs or [newest_run(Path("runs"))]]
    until_stopped(serve_view(chosen, host=host, port=port, announce=announce, waits=attached))


run_commands.add_to(app, LOOK)
app.command(rich_help_panel=MANY)(run_commands.restore)
app.command("runs", rich_help_panel=LOOK)(run_commands.list_runs)


@app.command(cls=WithSettings, epilog=HELP, rich_help_panel=MODELS)
def sft(
    context: typer.Context,
    data: Annotated[
        Path, typer.Argument(metavar="DATA.jsonl", help="Rows with `messages`; the assistant's are taught.")
    ],
    model: Annotated[str, typer.Option(help="A Hugging Face directory, hub name or embedded model.")],
    run_dir: Annotated[Path, typer.Option(help="Where the run and its model are written.")],
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    json_: JsonFlag = False,
) -> None:
    """Teach a model the assistant's side of conversations (supervised fine-tuning)."""
    from shoal.config import parse
    from shoal.run.commands.supervised import run_supervised
    from shoal.run.prepare import check_run_dir

    config = parse(
        {
            "run_dir": str(run_dir),
            "model": {"path": model},
            "tasks": [{"name": "chain_sum"}],
            "train": {"loss": "positive_only", "lr": 1e-4},
        },
        context.obj,
    )
    if not resume:
        check_run_dir(run_dir, resume=False)
    with stoppable(config.run_dir):
        show(run_supervised(config, data, resume=resume), json_)


@app.command(name="eval", cls=WithSettings, epilog=HELP, rich_help_panel=MODELS)
def evaluate(
    context: typer.Context,
    config: Annotated[Path, typer.Argument(metavar="CONFIG.toml", help="Configuration of the model and the tasks.")],
    questions: Annotated[int | None, typer.Option(min=1, help="Held-out questions; eval.questions when unset.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Measure a model on held-out questions, sampled and greedy."""
    from shoal.config import load
    from shoal.run.commands.compare import run_evaluation

    extra = [] if questions is None else [f"eval.questions={questions}"]
    show(run_evaluation(load(config, [*context.obj, *extra])), json_)


app.command(cls=WithSettings, epilog=HELP, rich_help_panel=MODELS)(run_commands.compare)
app.command(rich_help_panel=MODELS)(run_commands.chat)
app.command(cls=WithSettings, rich_help_panel=MODELS)(serve)


@app.command(rich_help_panel=LOOK)
def report(run: RunArgument) -> None:
    """Write report.png and report.html."""
    from shoal.observe.report import write_report

    png, html = write_report(run)
    print(f"{png}\n{html}")


@app.command(rich_help_panel=LOOK)
def export(
    run: RunArgument,
    jsonl: Annotated[Path | None, typer.Option(help="A line per rollout.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="A row per rollout.")] = None,
) -> None:
    """Write the rollouts of a run to a file."""
    from shoal.experience.export import export_jsonl, export_parquet
    from shoal.observe.export_extras import extras_of

    if jsonl is None and parquet is None:
        raise ShoalError("export: expected --jsonl FILE or --parquet FILE, got none")
    extras = extras_of(run)
    if jsonl is not None:
        print(f"{export_jsonl(run, jsonl, extras)} rollouts in {jsonl}")
    if parquet is not None:
        print(f"{export_parquet(run, parquet, extras)} rollouts in {parquet}")


@app.command(rich_help_panel=LOOK)
def audit(run: RunArgument, json_: JsonFlag = False) -> None:
    """Check from the log that nothing was lost, trained twice or too stale."""
    from shoal.experience.audit import audit as audit_run

    result = audit_run(run)
    if json_:
        findings = {check.value: finding.ids for check, finding in result.findings.items()}
        print(json.dumps({"ok": result.ok, "consumed": result.consumed, "steps": result.steps, "findings": findings}))
    else:
        print("\n".join(result.sentences()))
    raise typer.Exit(int(not result.ok))


@app.command(rich_help_panel=LOOK)
def status(run: RunArgument, goal: GoalOption = None, json_: JsonFlag = False) -> None:
    """Show each task's groups: running, waiting, trained, failed or dropped, with reasons."""
    from shoal.observe import status as of_run

    values = of_run.status(run, goal)
    print(json.dumps(values) if json_ else "\n".join(of_run.status_lines(values)))
    raise typer.Exit(int(of_run.is_doubted(values)))


@app.command(cls=WithSettings, epilog=HELP, rich_help_panel=MACHINE)
def doctor(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Argument(metavar="[CONFIG.toml]", help="A run to be; it trains nothing.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=1, help="How long the run's model answers.")] = 60,
    json_: JsonFlag = False,
) -> None:
    """Predict whether a run will learn and what to set; without one, check this machine.

    Exit code 1 when no task of the run teaches the model.
    """
    if config is None:
        from shoal.run.machine.doctor import diagnosis

        if context.obj:
            raise ShoalError(f"doctor: expected a CONFIG.toml before settings, got {context.obj[0]} alone")
        show(diagnosis(), json_)
        return
    from shoal.config import load
    from shoal.run.commands.prospect import prospect_of

    settings = load(config, context.obj)
    with stoppable():
        prospect = prospect_of(settings, seconds, lambda words: print(words, file=sys.stderr, flush=True))
    if not json_:
        print(printable(prospect.verdict))
    show(prospect.values if json_ else prospect.tables, json_)
    raise typer.Exit(int(not prospect.learns))


@app.command(rich_help_panel=MACHINE)
def bench(
    name: Annotated[
        str, typer.Argument(metavar="BENCH", help=", ".join(BENCHES) + ".", autocompletion=lambda: list(BENCHES))
    ],
    quick: Annotated[bool, typer.Option("--quick", help="A shortened run: the figures are rough.")] = False,
    model: Annotated[str | None, typer.Option(help="smollm2: engine and trainer on a real model.")] = None,
    minutes: Annotated[float | None, typer.Option(min=0.1, help="How long chaos lasts; 10 when unset.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Where chaos begins; the first new one when unset.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32 or bfloat16: trl; float32 when unset.")] = None,
    json_: JsonFlag = False,
) -> None:
    """Measure ratios side by side on this machine.

    async, engine and trl take 15 to 17 minutes each on two quiet cores; --quick shortens them. Progress of a bench goes
    to standard error. chaos kills, stops and starves real runs and counts what they lose.
    """
    from_checkout("bench")
    from benchmarks import run_bench

    options = {"minutes": minutes, "seed": seed, "dtype": dtype}
    given = {name: value for name, value in options.items() if value is not None}
    show(run_bench(name, quick=quick, model=model, **given), json_)


app.command(cls=WithSettings, epilog=HELP, rich_help_panel=MACHINE)(run_commands.rehearse)
app.command(cls=WithSettings, epilog=HELP, rich_help_panel=MACHINE)(run_commands.plan)
for _commands in (swarm_commands.app, swarm_commands.judges, workspace.app, *services.groups):
    app.add_typer(_commands, rich_help_panel=MANY)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the console script; `arguments` default to the process's."""
    try:
        code = app(arguments, prog_name="shoal", standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
    except Misuse as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            raise SystemExit(2) from None
        fail(misuse(error), 2)
    except typer.Abort:
        raise SystemExit(1) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from None
    except (ShoalError, OSError, BaseExceptionGroup) as error:
        leaves = sorted(_leaves(error), key=lambda leaf: not isinstance(leaf, ShoalError))  # the user's errors first
        sentences = [_sentence(leaf) for leaf in leaves]
        if None in sentences:
            raise
        fail("; ".join([str(sentences[0]), *getattr(error, "__notes__", ())]), 2)


def _leaves(error: BaseException) -> list[BaseException]:
    """The exceptions of a group, and of the groups in it."""
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _sentence(error: BaseException) -> str | None:
    """Message of a user error: a `ShoalError`, or a path that the system refuses; None for our bugs."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: expected a path that can be used, got: {error.strerror}"
    return str(error) if isinstance(error, ShoalError) else None
