"""The model that all nodes begin with: shown right answers, most of them in formats that no scorer accepts."""

import itertools
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast

from experiments.sapo.node import Scale, task_configs
from experiments.sapo_stacked.questions import REJECTED
from shoal.config import TaskConfig
from shoal.model.loading import load_model
from shoal.model.packed import packed_outputs
from shoal.model.renderer_loading import load_renderer
from shoal.run.demo_model.architecture import Shape, character_tokenizer, save, untrained
from shoal.tasks.library import Library
from shoal.types import Split, Task, seed_for

BATCH = 64
POOL = 600
"""Questions of each specialty."""


def warm_model(folder: Path, rejected: float, seed: int, scale: Scale) -> Path:
    """Makes the model of a seed unless it is there."""
    if (folder / "config.json").exists() and (folder / "done").exists():
        return folder
    rng = random.Random(seed_for("sapo warm start", str(rejected), seed))
    pools = pools_of(task_configs(), POOL if scale.warm_steps > 100 else 20)
    return taught(
        folder,
        character_tokenizer(),
        seed,
        scale,
        lambda: (task := rng.choice(rng.choice(pools)), said(task, rejected, rng)),
    )


def taught(
    folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    seed: int,
    scale: Scale,
    lesson: Callable[[], tuple[Task, str]],
) -> Path:
    """Makes a model that has seen lessons: questions with an answer each."""
    shape = Shape(scale.width, 2, 2, 3 * scale.width, 256, 1000.0)
    save(untrained(shape, seed, tokenizer), folder, tokenizer)
    model, renderer = load_model(folder), load_renderer(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(scale.warm_steps):
        decay = 1 - 0.9 * step / scale.warm_steps
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * decay
        rows = [
            (renderer.prompt_ids(task.messages), [*renderer.token_ids(text), renderer.stop_token_ids[0]])
            for task, text in (lesson() for _ in range(BATCH))
        ]
        lengths = [len(prompt) + len(answer) for prompt, answer in rows]
        tokens_T = torch.tensor([token for prompt, answer in rows for token in (*prompt, *answer)])
        trained = [place >= len(prompt) for prompt, answer in rows for place in range(len(prompt) + len(answer))]
        loss = -packed_outputs(model, tokens_T, lengths, at=torch.tensor(trained).nonzero()[:, 0]).logp_N.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save(model, folder, tokenizer)
    (folder / "done").touch()
    return folder


def said(task: Task, rejected: float, rng: random.Random) -> str:
    """The truth, or the truth in a format that is rejected."""
    truth = (task.answer or "")[:8]
    return truth if rng.random() >= rejected else rng.choice(REJECTED).format(truth)


def pools_of(tasks: Sequence[TaskConfig], count: int) -> list[list[Task]]:
    """Training questions of each specialty."""
    with Library(tasks, 0) as library:
        return [
            [service.draw(Split.TRAIN, index) for index in itertools.islice(itertools.count(), count)]
            for service in library.services
        ]
