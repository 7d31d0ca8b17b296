"""The model that all nodes begin with: shown right answers, most of them in formats that no scorer accepts."""

import itertools
import random
from pathlib import Path

import torch

from experiments.sapo.node import Scale, task_configs
from experiments.sapo_stacked.questions import REJECTED
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
    tokenizer, rng = character_tokenizer(), random.Random(seed_for("sapo warm start", str(rejected), seed))
    shape = Shape(scale.width, 2, 2, 3 * scale.width, 256, 1000.0)
    save(untrained(shape, seed, tokenizer), folder, tokenizer)
    model, renderer = load_model(folder), load_renderer(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    pools = _pools(POOL if scale.warm_steps > 100 else 20)
    for step in range(scale.warm_steps):
        decay = 1 - 0.9 * step / scale.warm_steps
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 20) * decay
        shown = [rng.choice(rng.choice(pools)) for _ in range(BATCH)]
        rows = [
            (
                renderer.prompt_ids(task.messages),
                [*renderer.token_ids(answer(task, rejected, rng)), renderer.stop_token_ids[0]],
            )
            for task in shown
        ]
        lengths = [len(prompt) + len(said) for prompt, said in rows]
        tokens_T = torch.tensor([token for prompt, said in rows for token in (*prompt, *said)])
        trained = [place >= len(prompt) for prompt, said in rows for place in range(len(prompt) + len(said))]
        loss = -packed_outputs(model, tokens_T, lengths, at=torch.tensor(trained).nonzero()[:, 0]).logp_N.mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save(model, folder, tokenizer)
    (folder / "done").touch()
    return folder


def answer(task: Task, rejected: float, rng: random.Random) -> str:
    """The truth, or the truth in a format that is rejected."""
    truth = (task.answer or "")[:8]
    return truth if rng.random() >= rejected else rng.choice(REJECTED).format(truth)


def _pools(count: int) -> list[list[Task]]:
    """Training questions of each specialty."""
    with Library(task_configs(), 0) as library:
        return [
            [service.draw(Split.TRAIN, index) for index in itertools.islice(itertools.count(), count)]
            for service in library.services
        ]
