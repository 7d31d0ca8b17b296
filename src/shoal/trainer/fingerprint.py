"""Fingerprint of weights: equal for equal bits however many ranks hold them, and cheap enough for every step.

    sum over all pairs of numbers of   64 bits * factor of the pair in its block * factor of the block   modulo 2**64

The factors are odd and pseudo-random (multilinear hashing, Carter and Wegman 1979). One changed number always changes
the sum; other changes go unseen with a probability of about 2**-30. Sums of integers do not depend on their order, so a
device computes its part without moving a weight. It is no protection against somebody who chooses weights.
"""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from shoal.trainer.ranks import Ranks
from shoal.trainer.row_files import Rows, rows_of

BLOCK = 1 << 16
"""Pairs of numbers in one pass: a few passes stay in a core's cache."""


def fingerprint(tensors: Mapping[str, Tensor], ranks: Ranks) -> str:
    """Sixteen hexadecimal digits of the bits of float32 tensors by name. All ranks call it."""
    device = next(iter(tensors.values())).device
    factors_B = _odd(torch.arange(BLOCK, dtype=torch.int64) * 2 + _number("places")).to(device)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for rows in rows_of(tensors, ranks):
        total += part(rows, factors_B)
    ranks.add_up(total)
    return f"{int(total) % 2**64:016x}"


def part(rows: Rows, factors_B: Tensor) -> Tensor:
    """Sum of some rows of a tensor, int64, modulo 2**64; `factors_B` are those of a block's pairs."""
    values = rows.values.detach()
    bits_N = values.contiguous().reshape(-1).view(torch.int32)
    first = rows.first * (len(bits_N) // max(1, len(values)) if values.ndim else 1)
    odd = first % 2, (first + len(bits_N)) % 2  # halves of pairs; a view needs even offsets
    if any(odd) or bits_N.storage_offset() % 2:
        bits_N = torch.cat([bits_N.new_zeros(odd[0]), bits_N, bits_N.new_zeros(odd[1])])
    pairs_N, at, total = bits_N.view(torch.int64), 0, torch.zeros_like(factors_B[0])
    blocks = range(first // 2 // BLOCK, (first // 2 + len(pairs_N)) // BLOCK + 1)
    factor_of = dict(zip(blocks, _odd(torch.tensor(blocks) * 2 + _number(rows.name)).tolist(), strict=True))
    while at < len(pairs_N):
        block, place = divmod(first // 2 + at, len(factors_B))
        some_N = pairs_N[at : at + BLOCK - place]
        total += (some_N * factors_B[place : place + len(some_N)]).sum() * factor_of[block]
        at += len(some_N)
    return total


def _number(name: str) -> int:
    """Even number of 62 bits that belongs to a name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 2 & ~1


def _signed(number: int) -> int:
    """The int64 with the same lowest 64 bits."""
    return (number + 2**63) % 2**64 - 2**63


def _odd(number: Tensor) -> Tensor:
    """Pseudo-random odd int64 for each int64: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        number = (number ^ ((number >> shift) & (2 ** (64 - shift) - 1))) * _signed(factor)
    return (number ^ ((number >> 31) & (2**33 - 1))) | 1
