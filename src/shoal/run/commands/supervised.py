"""Supervised stages: imitation of conversations (sft) and preference pairs (dpo), on the trainer of a run.

The rows of one conversation are one per assistant's turn, each with the whole conversation before it as its prompt.
The trainer computes common beginnings once, so this costs no more than one row, and every turn is rendered as the model
will see it. Order and steps depend on the seed alone: a resumed stage continues from its checkpoint as if never ended.

Stages of one configuration run in order, and each begins with the model of the previous stage:

<run_dir>/stages/0-sft/            a stage's own run directory, with its model
<run_dir>/stages/0-sft/done.json   its figures, once it has ended
"""

import asyncio
import json
import math
import random
import shutil
from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import msgspec
import uvloop

from shoal.config import Config, EngineConfig
from shoal.config.training import DPOLoss, foreign_setting
from shoal.errors import ConfigError, TaskError
from shoal.experience import checkpoint
from shoal.experience.log import locked
from shoal.files import replaced
from shoal.model.chat_template import ChatRenderer
from shoal.model.renderer_loading import load_renderer
from shoal.net.chat import ChatReply
from shoal.observe.metrics import trackers_of
from shoal.run.machine.devices import Threads, devices_of
from shoal.run.policy import Steps
from shoal.run.prepare import check_run_dir, model_directory
from shoal.run.run_dir import write_resolved
from shoal.tasks.jsonl import rows_of
from shoal.tasks.library import held_out
from shoal.trainer.worker import TrainerProcess, local_ranks
from shoal.types import Json, Message, Role, Sample, seed_for

Rows: TypeAlias = tuple[Sample, ...]
"""Rows of one conversation, or the preferred answer's row and the other's."""


Placed: TypeAlias = tuple[dict[str, Json], str]
"""A row of the file, and where it is."""


class _Said(ChatReply, kw_only=True):
    """Message of any role in OpenAI's form."""

    role: Role
    tool_call_id: str = ""


def run_supervised(config: Config, data: Path, *, resume: bool = False) -> dict[str, object]:
    """Trains on a file and returns the figures; the model is in `run_dir/model`. Raises a `ShoalError`."""
    kind = "dpo" if isinstance(config.train.loss, DPOLoss) else "sft"
    if complaint := foreign_setting(kind, config.train.model_fields_set):
        raise ConfigError(complaint)
    return uvloop.run(_train(config, data, resume=resume))


async def _train(config: Config, data: Path, *, resume: bool) -> dict[str, object]:
    run_dir, train, loss = Path(config.run_dir), config.train, config.train.loss
    model_dir = model_directory(config.model.path)
    renderer = load_renderer(model_dir)
    read = pair_of if isinstance(loss, DPOLoss) else turns_of
    rows = [(row, f"{data}:{number}") for number, row in rows_of(data)]
    kept, left_out = trained_rows(rows, config)
    lessons = [read(renderer, row, where) for row, where in kept]
    if not lessons:
        raise TaskError(f"{data}: expected at least one row whose question is not held out, got {len(rows)} rows")
    threads = Threads().trainer
    gpus = devices_of(config.model_copy(update={"engine": EngineConfig(count=0)})).ranks
    async with AsyncExitStack() as stack:
        stack.enter_context(locked(run_dir))
        (run_dir / "logs").mkdir(exist_ok=True)
        write_resolved(config, run_dir)
        trackers = stack.enter_context(closing(trackers_of(config.metrics, run_dir)))
        if left_out:
            trackers.log_event("left_out", reason=left_out)
        opening = local_ranks(run_dir / "logs" / "trainer.log", threads, config.train.ranks, gpus)
        trainer = TrainerProcess(await stack.enter_async_context(opening))
        await trainer.start(model_dir, _as_trained(config), threads)
        references = await _margins(trainer, lessons) if isinstance(loss, DPOLoss) else []
        saved = checkpoint.intact(run_dir) if resume else None
        if saved is not None:
            await trainer.load(saved.path)
        losses = []
        for step in range(saved.step + 1 if saved else 0, train.steps):
            chosen = _drawn(len(lessons), train.groups_per_step, step, config.seed)
            groups = [lessons[i] for i in chosen]
            values: dict[str, float] = {}
            if isinstance(loss, DPOLoss):
                groups, values = await _preferred(trainer, groups, [references[i] for i in chosen], loss.beta)
            stats = await trainer.step(groups)
            values = {"loss": stats.loss, **values}
            losses.append(values["loss"])
            trackers.log(step + 1, {"lr": stats.lr, "grad_norm": stats.grad_norm, "tokens": stats.tokens, **values})
            if step + 1 == train.steps or (step + 1) % config.checkpoint.every_steps == 0:
                await trainer.save(await asyncio.to_thread(checkpoint.begin, run_dir, step))
                await asyncio.to_thread(checkpoint.seal, run_dir, step, keep=config.checkpoint.keep)
        await Steps(config, trainer, None).write_model(model_dir, run_dir / "model", run_dir / "adapter")
    tenth = max(1, len(losses) // 10)
    means = {"loss_first": fmean(losses[:tenth] or [0.0]), "loss_last": fmean(losses[-tenth:] or [0.0])}
    return {**means, "steps": train.steps, "rows": len(lessons), "run_dir": str(run_dir)}


def trained_rows(rows: Sequence[Placed], config: Config) -> tuple[list[Placed], str]:
    """Rows without held-out questions, and a sentence about the omitted ones. Raises `TaskError`."""
    held, name = held_out(config.tasks), "chosen" if isinstance(config.train.loss, DPOLoss) else "messages"
    kept = [(row, where) for row, where in rows if not held.has(_messages(row, name, where))]
    if len(kept) == len(rows):
        return kept, ""
    return kept, (
        f"{len(rows) - len(kept)} of {len(rows)} rows ask held-out questions of the tasks' files "
        "(tasks.eval_share) and are not trained on"
    )


def _as_trained(config: Config) -> Config:
    """Settings for the trainer: temperature 1, and for preference pairs a sum over the tokens of each row."""
    rollout = config.rollout.model_copy(update={"temperature": 1.0, "max_tokens": 1})
    train = config.train
    if isinstance(train.loss, DPOLoss):
        train = train.model_copy(update={"loss_mean": "budget"})
    return config.model_copy(update={"rollout": rollout, "train": train})


def turns_of(renderer: ChatRenderer, row: dict[str, Json], where: str) -> Rows:
    """Rows that teach every turn of the assistant. Raises `TaskError`."""
    messages, tools = _messages(row, "messages", where), _tools(row, where)
    turns = [i for i, message in enumerate(messages) if i and message.role is Role.ASSISTANT]
    if not turns:
        raise TaskError(f"{where}: messages: expected an assistant's message after another one")
    return tuple(_taught(renderer, messages[: i + 1], tools, where) for i in turns)


def pair_of(renderer: ChatRenderer, row: dict[str, Json], where: str) -> Rows:
    """Rows of the preferred answer and the other. Raises `TaskError`."""
    tools = _tools(row, where)
    first, second = (_taught(renderer, _messages(row, name, where), tools, where) for name in ("chosen", "rejected"))
    return first, second


def _tools(row: dict[str, Json], where: str) -> str:
    """Tools of a conversation as the renderer takes them. Raises `TaskError`."""
    tools = row.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise TaskError(f"{where}: tools: expected a list of tables in OpenAI's form, got {str(tools)[:80]!r}")
    return json.dumps(tools) if tools else ""


def _messages(row: dict[str, Json], name: str, where: str) -> list[Message]:
    try:
        said = msgspec.convert(row.get(name), list[_Said])
    except msgspec.ValidationError as error:
        raise TaskError(f"{where}: {name}: {error}") from None
    return [replace(one.message, role=one.role, tool_call_id=one.tool_call_id) for one in said]


def _taught(renderer: ChatRenderer, messages: Sequence[Message], tools: str, where: str) -> Sample:
    """Row that teaches the last message."""
    if len(messages) < 2 or messages[-1].role is not Role.ASSISTANT:
        raise TaskError(f"{where}: expected messages that end in an assistant's")
    prompt, said = renderer.prompt_ids(messages[:-1], tools), messages[-1]
    answer = renderer.message_ids(said, messages[:-1], tools, prompt)
    if answer is None:
        what = f"{said.content[:80]!r}" + f" with calls of {said.tool_calls[0].name!r}" * bool(said.tool_calls)
        raise TaskError(f"{where}: expected an answer that the model's template and tokens can write, got {what}")
    answer += renderer.stop_token_ids[:1]
    before, taught = len(prompt), len(answer)
    return Sample(
        (*prompt, *answer),
        (0,) * before + (1,) * taught,
        (0.0,) * (before + taught),
        (-1,) * before + (0,) * taught,
        (0.0,) * before + (1.0,) * taught,
    )


def _drawn(count: int, most: int, step: int, seed: int) -> list[int]:
    """Rows of a step: each epoch has all rows once, newly shuffled."""

    def order(epoch: int) -> list[int]:
        return random.Random(seed_for("stage", seed, epoch)).sample(range(count), count)

    first = step * most
    ahead = (i for epoch in range(first // count, (first + most) // count + 1) for i in order(epoch))
    return list(islice(ahead, first % count, first % count + most))


async def _with_logprobs(trainer: TrainerProcess, pairs: Sequence[Rows]) -> list[Sample]:
    """Rows of the pairs with their tokens' logprobs under the present weights."""
    rows = [row for pair in pairs for row in pair]
    logprobs = await trainer.logprobs([row.tokens for row in rows])
    return [
        replace(row, logprobs=tuple(m * min(p, 0.0) for m, p in zip(row.mask, (0.0, *logp), strict=True)))
        for row, logp in zip(rows, logprobs, strict=True)
    ]


async def _margins(trainer: TrainerProcess, pairs: Sequence[Rows]) -> list[float]:
    """Logprob of the preferred answer of each pair less the other's."""
    sums = [sum(row.logprobs) for row in await _with_logprobs(trainer, pairs)]
    return [chosen - rejected for chosen, rejected in zip(sums[::2], sums[1::2], strict=True)]


async def _preferred(
    trainer: TrainerProcess, pairs: Sequence[Rows], references: Sequence[float], beta: float
) -> tuple[list[Rows], dict[str, float]]:
    """Pairs with the advantages whose policy gradient is DPO's, and the metrics of the step.

    d = (log pi - log pi_ref)(chosen) - the same (rejected),   loss = -log sigmoid(beta d)

    The loss falls by beta sigmoid(-beta d) for each nat of a chosen token. Source: DPO (arXiv 2305.18290 Eq. 7).
    """
    rows = await _with_logprobs(trainer, pairs)
    sums = [sum(row.logprobs) for row in rows]
    margins = [beta * (sums[2 * i] - sums[2 * i + 1] - before) for i, before in enumerate(references)]
    pushes = [2 * beta / (1 + math.exp(min(margin, 700.0))) for margin in margins]  # the mean is over two rows a pair
    signed = [push * sign for push in pushes for sign in (1.0, -1.0)]
    pushed = [
        replace(row, advantages=tuple(push * m for m in row.mask)) for row, push in zip(rows, signed, strict=True)
    ]
    loss = fmean(max(-margin, 0.0) + math.log1p(math.exp(-abs(margin))) for margin in margins)
    preferred = fmean(margin > 0 for margin in margins)
    return list(zip(pushed[::2], pushed[1::2], strict=True)), {
        "loss": loss,
        "margin": fmean(margins),
        "preferred": preferred,
    }


DONE = "done.json"


def run_stages(config: Config, *, resume: bool = False) -> dict[str, object]:
    """Runs the stages that have not ended yet; returns the figures of all. Raises a `ShoalError`."""
    if not resume:
        check_run_dir(Path(config.run_dir), resume=False)
    with locked(Path(config.run_dir)):
        write_resolved(config, Path(config.run_dir))
        return _run_each(config, resume=resume)


def _run_each(config: Config, *, resume: bool) -> dict[str, object]:
    figures: dict[str, object] = {}
    model = config.model
    for index, stage in enumerate(config.stages):
        settings = config.stage(index).model_copy(update={"model": model})
        run_dir = Path(settings.run_dir)
        if not (run_dir / DONE).is_file():
            _write(run_dir / DONE, _run(settings, stage.data, resume=resume))
        figures[run_dir.name] = json.loads((run_dir / DONE).read_text())
        model = model.model_copy(update={"path": str(run_dir / "model")})
    return {**figures, "model": model.path, "run_dir": config.run_dir}


def _run(config: Config, data: str | None, *, resume: bool) -> dict[str, object]:
    run_dir = Path(config.run_dir)
    if data is not None:
        return run_supervised(config, Path(data), resume=resume)
    from shoal.run.training import run_training

    begun = (run_dir / "log.sqlite").is_file()
    if not begun:
        shutil.rmtree(run_dir, ignore_errors=True)
    return run_training(config, resume=begun).figures


def _write(path: Path, figures: dict[str, object]) -> None:
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(figures))
