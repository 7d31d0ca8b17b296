"""`shoal rehearse` and `shoal plan`: what a run on GPUs would do and cost, without them."""

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag, show
from shoal.cli.runs import existing_run
from shoal.errors import ShoalError

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
