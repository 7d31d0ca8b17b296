"""Fingerprints: any changed number changes one, the split over ranks does not."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shoal.trainer import row_files as module
from shoal.trainer.ranks import ALONE
from shoal.trainer.row_files import Rows, fingerprint, part

WEIGHTS = {
    "scale": torch.tensor(1.5),
    "bias": torch.arange(7, dtype=torch.float32),
    "long": torch.linspace(-1, 1, 3 * 50_001).reshape(3, 50_001),
}


def mixed(number: int) -> int:
    """SplitMix64's finaliser on plain integers, made odd."""
    number %= 2**64
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return (number ^ number >> 31) | 1


def named(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2 & ~1


def by_definition(weights: dict[str, Tensor]) -> str:
    """Number by number, with integers of any size."""
    total = 0
    for name, tensor in weights.items():
        for place, bits in enumerate(tensor.numpy().reshape(-1).view(np.uint32).tolist()):
            block, pair = divmod(place // 2, module.BLOCK)
            factor = mixed(2 * block + named(name)) * mixed(2 * pair + named("places"))
            total += (bits << 32 * (place % 2)) * factor
    return f"{total % 2**64:016x}"


def test_a_fingerprint_is_the_sum_of_its_definition() -> None:
    assert fingerprint(WEIGHTS, ALONE) == by_definition(WEIGHTS)


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_changed_bit_one_swap_or_another_name_changes_it(name: str) -> None:
    before = fingerprint(WEIGHTS, ALONE)
    changed = {key: tensor.clone() for key, tensor in WEIGHTS.items()}
    changed[name].view(torch.int32).view(-1)[-1] ^= 1
    assert fingerprint(changed, ALONE) != before
    others = {key: tensor for key, tensor in WEIGHTS.items() if key != name}
    assert fingerprint({**others, f"{name}s": WEIGHTS[name]}, ALONE) != before
    if WEIGHTS[name].numel() > 1:
        assert fingerprint({**others, name: WEIGHTS[name].flip(-1)}, ALONE) != before


@given(at=st.integers(0, 9), width=st.integers(1, 40_000), rows=st.just(9))
def test_rows_of_ranks_add_up_to_the_whole(at: int, width: int, rows: int) -> None:
    whole = torch.arange(rows * width, dtype=torch.float32).reshape(rows, width)
    factors_B = torch.arange(module.BLOCK, dtype=torch.int64) * 2 + 1
    parts = [part(Rows("w", first, whole[first:last]), factors_B) for first, last in ((0, at), (at, rows))]
    assert sum(map(int, parts)) % 2**64 == int(part(Rows("w", 0, whole), factors_B)) % 2**64
