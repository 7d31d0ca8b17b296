"""Mesh of the trainer's ranks: copies of the weights, each sharded over some ranks. Pure.

A copy for few ranks keeps its traffic inside a host; a copy for many leaves room for a larger model.
"""

from dataclasses import dataclass

STATE_BYTES = 16
"""Bytes of a trained number: weight, gradient and Adam's two moments, in float32."""
SHARE = 0.4
"""Share of a GPU's memory that weights and moments may take; the rest is for a pass."""


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks, of which `shard` share one copy of the weights.

    >>> print(Mesh(64, 8, 131e9))
    64 ranks: 8 copies of the weights, each over 8 ranks, 16.4 GB of weights, gradients and moments on each
    >>> print(Mesh(8, 8, 131e9))
    8 ranks: 1 copy of the weights over 8 ranks, 16.4 GB of weights, gradients and moments on each
    """

    ranks: int
    shard: int
    state_bytes: float
    """Bytes of one copy: weights, gradients and moments."""

    @property
    def per_copy(self) -> int | None:
        """Ranks of one copy; None for all."""
        return None if self.shard == self.ranks else self.shard

    def __str__(self) -> str:
        copies = self.ranks // self.shard
        how = f"{copies} copies of the weights, each" if copies > 1 else "1 copy of the weights"
        each = f"{self.state_bytes / self.shard / 1e9:.1f} GB of weights, gradients and moments on each"
        return f"{self.ranks} ranks: {how} over {self.shard} ranks, {each}"


def mesh_of(state_bytes: float, ranks: int, per_host: int, gpu_bytes: int, asked: int = 1) -> Mesh:
    """Mesh with the smallest copies, of whole hosts, that leave a pass its share of the memory; else one copy.

    `asked` is the number of ranks of a copy that the settings want; 1 leaves it open. Without GPUs, or with one to a
    host, all ranks share one copy: nothing is won by copies whose traffic crosses hosts anyway.

    >>> [mesh_of(size, 64, 8, 80 << 30).shard for size in (131e9, 525e9, 1130e9, 3760e9)]
    [8, 16, 64, 64]
    >>> mesh_of(131e9, 64, 8, 80 << 30, asked=32).shard, mesh_of(131e9, 4, 1, 0).shard
    (32, 4)
    """
    if asked > 1 or per_host < 2 or not gpu_bytes:
        return Mesh(ranks, asked if asked > 1 else ranks, state_bytes)
    sizes = (size for size in range(per_host, ranks, per_host) if ranks % size == 0)
    fits = (size for size in sizes if state_bytes / size <= SHARE * gpu_bytes)
    return Mesh(ranks, next(fits, ranks), state_bytes)
