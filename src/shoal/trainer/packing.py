"""Packing of rows into micro-batches under a token budget, and the weight of each token's loss. Pure.

A micro-batch is the input of one forward and backward. The split changes memory and speed, never the gradient. The
weights come from the whole update, all its rows on all ranks, before any filter or mask. Any packing, any split and any
number of ranks therefore add up to the same loss and gradient. Only `micro_batch` loads torch.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

from shoal.config.training import GMPOLoss, GSPOLoss, SoftAdaptiveLoss, TrainConfig
from shoal.model import MOST_LOGITS, UNKNOWN
from shoal.types import Sample

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shoal.model.packed import PackedPass

T = TypeVar("T")
Mean: TypeAlias = Literal["tokens", "rows", "budget", "sums"]
MOST_STREAM = 1 << 22
"""Numbers of the residual stream, over all layers, in a default micro-batch on a CPU, unless it has fewer than 1,024
tokens. A layer keeps about 14 times as many for the backward pass."""


def first_fit(sizes: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of items, in bins of total size at most `budget`: first-fit-decreasing.

    An item larger than the budget is alone in its bin. Within a bin, sizes decrease.

    >>> first_fit([3, 9, 5, 2, 4], budget=10)
    [[1], [2, 4], [0, 3]]
    """
    if budget < 1:
        raise ValueError(f"budget: expected at least 1, got {budget}")
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        size = sizes[index]
        fit = next((b for b, free in enumerate(room) if size <= free), None)
        if fit is None:
            bins.append([index])
            room.append(budget - size)
        else:
            bins[fit].append(index)
            room[fit] -= size
    return bins


def in_order(sizes: Sequence[int], budget: int) -> list[range]:
    """Indices of neighbours whose sizes are at most `budget` together; a larger one is alone.

    >>> in_order([3, 2, 9, 1], 5)
    [range(0, 2), range(2, 3), range(3, 4)]
    """
    parts, first, total = [], 0, 0
    for at, size in enumerate(sizes):
        if at > first and total + size > budget:
            parts.append(range(first, at))
            first, total = at, 0
        total += size
    return [*parts, range(first, len(sizes))] if sizes else []


def even_bins(sizes: Sequence[int], count: int) -> list[list[int]]:
    """Indices of items, in `count` bins of about equal size: from large to small, each goes into the emptiest bin.

    >>> even_bins([3, 9, 5, 2, 4], 2)
    [[1, 0], [2, 4, 3]]
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    filled = [0] * count
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        emptiest = filled.index(min(filled))
        bins[emptiest].append(index)
        filled[emptiest] += sizes[index]
    return bins


def micro_batches(rows: Sequence[Sample], budget_tokens: int, ranks: int = 1) -> list[list[int]]:
    """Indices of rows, in micro-batches of at most `budget_tokens` tokens; every row is in exactly one.

    Rows with equal prompts stay together where the budget allows, because their prompt is computed, and counted, once.
    A row longer than the budget is alone in its micro-batch. With several ranks the micro-batches are of about equal
    size, and their number is a multiple of the ranks; some may be empty.
    """
    # Ranks must not wait for a rank that has a whole family, so families are cut where that evens the shares.
    share = min(budget_tokens, max(1, sum(len(row.tokens) for row in rows) // ranks))
    families = [
        part for family in _families(rows) for part in _parts(rows, family, share if ranks > 1 else budget_tokens)
    ]
    sizes = [_tokens(rows, family) for family in families]
    bins = first_fit(sizes, budget_tokens)
    if ranks > 1:
        count = -(-len(bins) // ranks) * ranks
        bins = even_bins(sizes, count)
        while any(len(bin_) > 1 and sum(sizes[i] for i in bin_) > budget_tokens for bin_ in bins):
            count += ranks
            bins = even_bins(sizes, count)
    return [[row for family in bin_ for row in families[family]] for bin_ in bins]


def even_slices(count: int, parts: int) -> list[range]:
    """`parts` consecutive slices of `count` items; their sizes differ by at most one.

    >>> even_slices(5, 2)
    [range(0, 2), range(2, 5)]
    """
    return [range(count * part // parts, count * (part + 1) // parts) for part in range(parts)]


def mixed(things: Sequence[T], is_other: Callable[[T], bool], parts: int) -> list[T]:
    """Items of two kinds, ordered so that `even_slices` have even shares of both.

    >>> "".join(mixed("abcdXYZ", str.isupper, 2))
    'abXcdYZ'
    """
    first, second = ([thing for thing in things if is_other(thing) is other] for other in (False, True))
    slices = zip(even_slices(len(first), parts), even_slices(len(second), parts), strict=True)
    return [thing for some, others in slices for thing in (*(first[i] for i in some), *(second[i] for i in others))]


def prompt_length(row: Sample) -> int:
    """Tokens before the first trained token; all tokens when none is trained.

    >>> prompt_length(Sample((5, 6, 7), (0, 0, 1), (0.0, 0.0, -1.0), (-1, -1, 0), (0.0, 0.0, 1.0)))
    2
    """
    return row.mask.index(1) if 1 in row.mask else len(row.tokens)


def _families(rows: Sequence[Sample]) -> list[list[int]]:
    """Rows by prompt, in order of first appearance; long rows first within a family."""
    by_prompt: dict[tuple[int, ...], list[int]] = {}
    for index, row in enumerate(rows):
        by_prompt.setdefault(row.tokens[: prompt_length(row)], []).append(index)
    return [sorted(family, key=lambda i: -len(rows[i].tokens)) for family in by_prompt.values()]


def _tokens(rows: Sequence[Sample], family: Sequence[int]) -> int:
    """Tokens of a family's rows, with their common prompt counted once."""
    prompt = prompt_length(rows[family[0]])
    return prompt + sum(len(rows[i].tokens) - prompt for i in family)


def _parts(rows: Sequence[Sample], family: Sequence[int], budget_tokens: int) -> list[list[int]]:
    """Parts of the family, cut wherever it would exceed the budget."""
    prompt = prompt_length(rows[family[0]])
    parts: list[list[int]] = []
    size = 0
    for index in family:
        answer = len(rows[index].tokens) - prompt
        if not parts or size + answer > budget_tokens:
            parts.append([])
            size = prompt
        parts[-1].append(index)
        size += answer
    return parts


def tokens_per_microbatch(vocabulary: int, stream: int, *, on_gpu: bool) -> int:
    """Default packing budget in tokens: on a GPU it fills the GPU, on a CPU it keeps the peak of memory low.

    `stream` is the number of layers times their width. Narrow models get larger micro-batches, which take little
    memory there: with 4 layers of 256 a step takes 0.91 of the time. On a CPU the logits are also one chunk, because
    the head computes several chunks twice.
    """
    if on_gpu:
        return 16384
    of_layers = min(max(1024, MOST_STREAM // stream), 4096)
    return min(of_layers, max(1, MOST_LOGITS // vocabulary))


@dataclass(frozen=True, slots=True)
class RowBatch:
    """Rows of one micro-batch, and the weight of each trained token of each row."""

    rows: tuple[Sample, ...]
    weights: tuple[float, ...]
    idle: bool = False
    """Whether the batch stands for no rows: see `MicroBatch`."""
    places: tuple[int, ...] = ()
    """Index of each row among all rows of its step."""


@dataclass(frozen=True, slots=True)
class Share:
    """Part of one update that one rank computes."""

    batches: tuple[RowBatch, ...]
    informative: bool
    """Whether the update's rows, on all ranks, give a gradient."""
    tokens: int
    """Trained tokens of all rows of the update, computed or not."""
    skipped_tokens: int
    """Trained tokens of the rows that are not computed."""


@dataclass(frozen=True, slots=True)
class Packer:
    """Division of steps into the shares of the ranks, so that a rank gets its own rows only."""

    config: TrainConfig
    tokens_per_microbatch: int
    answer_tokens: int = 0
    """Token limit of one answer, for `loss_mean = "budget"`."""
    skip_uninformative: bool = True
    """Whether rows that give no gradient are left out."""
    ranks: int = 1

    def step(self, groups: Sequence[Sequence[Sample]]) -> list[tuple[Share, ...]]:
        """Shares of each rank, one for each update of a step."""
        slices = even_slices(len(groups), self.config.minibatches)
        firsts = [sum(map(len, groups[: part.start])) for part in slices]
        updates = [
            self.shares([row for i in part for row in groups[i]], first=first)
            for part, first in zip(slices, firsts, strict=True)
        ]
        return list(zip(*updates, strict=True))

    def shares(self, rows: Sequence[Sample], whole: "Size | None" = None, *, first: int = 0) -> list[Share]:
        """Share of each rank in the update with these rows; `whole` is its size when they are a part of it.

        `first` is the index of the first row in its step.
        """
        config = self.config
        # With a regulariser or a critic rows without advantage have a gradient too.
        has_reference = config.kl.coefficient > 0 or config.teacher_model is not None
        regularised = has_reference or config.entropy_bonus > 0 or config.advantage == "gae"
        size, mean = whole or size_of(rows), loss_mean(config)
        trained = [sum(row.mask) for row in rows]
        places = [
            place
            for place, (row, count) in enumerate(zip(rows, trained, strict=True))
            if count and (any(row.advantages) or regularised or not self.skip_uninformative)
        ]
        wanted = [rows[place] for place in places]
        informative = any(regularised or any(row.advantages) for row in wanted)
        skipped = sum(trained) - sum(sum(row.mask) for row in wanted)

        def batch(part: Sequence[int]) -> RowBatch:
            chosen = [wanted[i] for i in part or (0,)]
            weights = [token_weight(mean, size, sum(row.mask), self.answer_tokens) for row in chosen]
            indices = tuple(first + places[i] for i in part)
            return RowBatch(tuple(chosen), tuple(weights) if part else (0.0,), idle=not part, places=indices)

        packed = [batch(part) for part in micro_batches(wanted, self.tokens_per_microbatch, self.ranks)]
        return [
            Share(tuple(packed[rank :: self.ranks]), informative, sum(trained), skipped) for rank in range(self.ranks)
        ]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Packed rows: T tokens, of which N are trained."""

    tokens_T: "Tensor"
    lengths: tuple[int, ...]
    at_N: "Tensor"
    """Positions of the trained tokens in `tokens_T`."""
    behav_N: "Tensor"
    advantage_N: "Tensor"
    version_N: "Tensor"
    row_N: "Tensor"
    """Index of each token's row, from 0."""
    weight_N: "Tensor"
    """Weight of each token's loss: see `token_weight`."""
    made: "PackedPass | None" = None
    """Its forward pass, where a trainer computes it."""
    rows: tuple[int, ...] = ()
    """Index of each row among all rows of its step, where somebody asked for it."""
    routing_TB: "Tensor | None" = None
    """Experts of each token as they were sampled, stored (uint8); None where they are the trainer's own choice."""
    idle: bool = False
    """Whether the batch stands for no rows: its weights are 0 and no statistic counts it. Ranks compute it to keep
    in step."""
    prox_N: "Tensor | None" = None
    """Logprobs before the first update of the step (M2PO: before this one), where they were computed."""
    square_bound: float = math.inf
    """Largest squared log ratio that M2PO keeps in the update; the next two fields are the critic's."""
    value_N: "Tensor | None" = None
    """Values before the first update of the step."""
    return_N: "Tensor | None" = None
    """Returns: the targets of the values."""


@dataclass(frozen=True, slots=True)
class Minibatch:
    """Rows of one optimizer update."""

    batches: tuple[MicroBatch, ...]
    """Computed rows of this rank."""
    informative: bool
    """Whether the update's rows, on all ranks, give a gradient."""
    tokens: int
    """Trained tokens of all rows, computed or not."""
    skipped_tokens: int
    """Trained tokens of the rows that are not computed."""


def micro_batch(
    rows: Sequence[Sample], weights: Sequence[float], device: "torch.device | str", *, idle: bool = False
) -> MicroBatch:
    """Packs rows end to end; each has at least one trained token and a weight of its tokens."""
    import torch

    trained = [sum(row.mask) for row in rows]
    at = [i for i, m in enumerate(m for row in rows for m in row.mask) if m]
    behav = [lp for row in rows for lp in row.logprobs]
    advantage = [a for row in rows for a in row.advantages]
    version = [v for row in rows for v in row.versions]

    def floats(values: Sequence[float]) -> "Tensor":
        return torch.tensor(values, dtype=torch.float32, device=device)

    def longs(values: Sequence[int]) -> "Tensor":
        return torch.tensor(values, dtype=torch.long, device=device)

    return MicroBatch(
        tokens_T=longs([token for row in rows for token in row.tokens]),
        lengths=tuple(len(row.tokens) for row in rows),
        at_N=longs(at),
        behav_N=floats([behav[i] for i in at]),
        advantage_N=floats([advantage[i] for i in at]),
        version_N=longs([version[i] for i in at]),
        row_N=longs([row for row, n in enumerate(trained) for _ in range(n)]),
        weight_N=floats([weight for weight, n in zip(weights, trained, strict=True) for _ in range(n)]),
        routing_TB=_routing(rows).to(device) if any(row.routing for row in rows) else None,
        idle=idle,
    )


def _routing(rows: Sequence[Sample]) -> "Tensor":
    """Experts of the tokens of all rows; unknown for each row's last token and for rows without experts."""
    import torch

    each = max(len(row.routing) // max(1, len(row.tokens) - 1) for row in rows)
    filled = (row.routing + bytes([UNKNOWN]) * (each * len(row.tokens) - len(row.routing)) for row in rows)
    return torch.frombuffer(bytearray(b"".join(filled)), dtype=torch.uint8).view(-1, each)


@dataclass(frozen=True, slots=True)
class Size:
    """Trained tokens and rows of an update."""

    tokens: int
    """Trained tokens."""
    rows: int
    """Rows with at least one trained token."""


def size_of(rows: Sequence[Sample]) -> Size:
    """Size of some rows.

    >>> size_of([Sample((5, 6, 7), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, 1.0, 1.0))])
    Size(tokens=2, rows=1)
    """
    trained = [sum(row.mask) for row in rows]
    return Size(sum(trained), sum(count > 0 for count in trained))


def loss_mean(config: TrainConfig) -> Mean:
    """Mean of the config, or the mean with which its loss was published."""
    if config.loss_mean is not None:
        return config.loss_mean
    return "rows" if isinstance(config.loss, GMPOLoss | GSPOLoss | SoftAdaptiveLoss) else "tokens"


def token_weight(mean: Mean, size: Size, row_tokens: int, budget_tokens: int) -> float:
    """Weight of each trained token of a row with `row_tokens` trained tokens, in an update of a `size`.

    tokens  1 / tokens                  every token counts the same (DAPO, arXiv 2503.14476)
    rows    1 / (rows * row_tokens)     every row counts the same (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071)
    budget  1 / (rows * budget_tokens)  a constant: a row's length changes nothing (Dr.GRPO's code)
    sums    1 / rows                    likelihoods of whole rows (RLOO, arXiv 2402.14740; Dr.GRPO, arXiv 2503.20783)

    >>> [token_weight(mean, Size(tokens=10, rows=2), 4, 8) for mean in ("tokens", "rows", "budget", "sums")]
    [0.1, 0.125, 0.0625, 0.5]
    """
    match mean:
        case "tokens":
            return 1 / size.tokens
        case "rows":
            return 1 / (size.rows * row_tokens)
        case "budget":
            return 1 / (size.rows * budget_tokens)
        case "sums":
            return 1 / size.rows
