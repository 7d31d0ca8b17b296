"""Draws procedural tasks in a separate process, `python -m shoal.tasks.procedural_worker --fd N`."""

import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from shoal import procedural, wire
from shoal.errors import OutOfBounds, TaskError
from shoal.net.process import from_parent, send_frame, serve
from shoal.tasks.holdout import MOST_ATTEMPTS, first_of, prompt, rewritten, split_of
from shoal.tasks.procedural_client import CheckSettings, Draw, ProceduralReply, Redraw, Redrawn, Spec
from shoal.types import Receipt, Split, Task, seed_for

BOXED_BYTES = 1 << 30
"""Bytes of memory that a boxed process may add to its memory at the start."""


def drawn_task(spec: Spec, split: Split, seed: int, index: int) -> Task:
    """The task at `index`: the first of a path of seeds whose question belongs to the split.

    The run's seed moves only the training questions: all runs are compared on equal held-out questions. Raises
    `TaskError`.
    """
    run, failures = (
        (seed,) if split is Split.TRAIN else (),
        [TaskError(f"{spec.dataset}: these settings allow too few")],
    )

    def drawn() -> Iterator[tuple[str, Task]]:
        for attempt in range(MOST_ATTEMPTS):
            # 31 bits: what every generator in use accepts, numpy's included.
            item_seed = seed_for(split, spec.dataset, spec.config, *run, index, attempt) >> 32
            receipt = Receipt(spec.dataset, procedural.VERSION, spec.config, item_seed, 0)
            try:
                entry = procedural.entry_of(receipt)
            except procedural.DrawFailed as error:
                failures.append(error)
            else:
                yield entry.question, _task(spec, receipt, entry, f"{spec.dataset}/{split}/{index}")

    try:
        return first_of(split, spec.eval_share, drawn(), spec.dataset)
    except TaskError as error:
        raise TaskError(f"{error}; {failures[-1]}") from None


def _task(spec: Spec, receipt: Receipt, entry: procedural.Entry, task_id: str) -> Task:
    """The task that asks an entry's question."""
    question = rewritten(entry.question, spec.rewrite)
    messages = prompt(procedural.system_prompt(spec.system_prompt), question)
    return Task(task_id, spec.dataset, messages, entry.truth, spec.info, receipt)


def redrawn(spec: Spec, receipt: Receipt, most_characters: int | None = None) -> Redrawn:
    """The question and the task of a receipt; `most_characters` bounds settings and question. Raises `TaskError`."""
    if most_characters is not None:
        procedural.check_bounds(receipt.dataset, receipt.config)
    entry = procedural.entry_of(receipt)
    size = len(entry.question) + len(entry.truth or "")
    if most_characters is not None and size > most_characters:
        raise OutOfBounds(f"{spec.dataset}: expected a question of at most {most_characters} characters, got {size}")
    task = _task(spec, receipt, entry, f"{receipt.dataset}/{receipt.seed}-{receipt.index}")
    return Redrawn(entry.question, task, split_of(entry.question, spec.eval_share))


def reply_to(request: CheckSettings | Draw | Redraw) -> ProceduralReply:
    """The reply to a request of the main process."""
    value: object
    try:
        match request:
            case CheckSettings(dataset, params, level):
                value = procedural.config_json(dataset, json.loads(params), level)
            case Draw(spec, split, seed, index):
                value = drawn_task(spec, split, seed, index)
            case Redraw(spec, receipt, most_characters):
                value = redrawn(spec, receipt, most_characters)
    except (TaskError, RecursionError, MemoryError) as error:
        return ProceduralReply(error=str(error) or type(error).__name__, kind=type(error).__name__)
    return ProceduralReply(msgspec.Raw(msgspec.msgpack.encode(value)))


def box() -> None:
    """Bounds the memory and the files of this process from now on."""
    taken_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    most_bytes = taken_bytes + BOXED_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answers requests until the main process closes the socket."""
    connection, arguments = from_parent()
    if "--boxed" in arguments:
        box()
    send_frame(connection, b"")
    requests: Any = CheckSettings | Draw | Redraw
    serve(connection, lambda frame: [wire.encode(reply_to(wire.decode(frame, requests)))])


if __name__ == "__main__":
    main()
