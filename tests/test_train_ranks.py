"""Two real processes under gloo: each trains a part of an update's rows, and their gradients add up to that of one."""

from pathlib import Path

import pytest
import torch
from torch import distributed, multiprocessing

from shoal.train.reduction import Size, size_of
from test_train_objective import LOSSES, batch, gradient, trainer

RANKS = 2
CONFIGS = [{"loss": loss, "kl": {"coefficient": 0.1}} for loss in LOSSES] + [{"loss_mean": "budget"}]
ROWS = batch(8, (1, 5, 9, 4, 12, 2, 7))


def part(rank: int, model_dir: Path, out: Path) -> None:
    """What one rank computes; rank 0 writes the sums."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{out / 'meet'}", rank=rank, world_size=RANKS)
    rows = ROWS[:2] if rank == 0 else ROWS[2:]
    own = size_of(rows)
    size = torch.tensor([own.tokens, own.rows])
    distributed.all_reduce(size)
    whole = Size(*size.tolist())
    assert whole == size_of(ROWS)
    for i, config in enumerate(CONFIGS):
        found, loss = gradient(trainer(model_dir, **config), rows, whole=whole)
        both = torch.cat([found, torch.tensor([loss])])
        distributed.all_reduce(both)
        if rank == 0:
            torch.save(both, out / f"{i}.pt")
    distributed.destroy_process_group()


@pytest.fixture(scope="module")
def sums(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[torch.Tensor]:
    out = tmp_path_factory.mktemp("ranks")
    multiprocessing.spawn(part, (tiny_model_dir, out), nprocs=RANKS)
    return [torch.load(out / f"{i}.pt") for i in range(len(CONFIGS))]


@pytest.mark.parametrize("index", range(len(CONFIGS)))
def test_the_gradients_of_two_ranks_add_up_to_that_of_one(
    tiny_model_dir: Path, sums: list[torch.Tensor], index: int
) -> None:
    wanted, loss = gradient(trainer(tiny_model_dir, **CONFIGS[index]), ROWS)
    torch.testing.assert_close(sums[index], torch.cat([wanted, torch.tensor([loss])]), rtol=1e-3, atol=2e-5)
