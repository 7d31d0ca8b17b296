"""Influence of each group of a step on the step's updates, to first order.

Without group i the gradient G of an update would lose the group's part g_i, and Adam would make another change u:

    u(G) - du/dG c_i,   c_i = clipped (g_i - b_i G)

b_i is what the other groups gain: the group's share of the denominator of the loss's mean or, if the gradient is
clipped, <g_i, G> / |G|^2. The derivative du/dG is diagonal (`Optimizer.sensitivity`). The influence of a group is
|du/dG c_i| / |u|, and its part along the update is <du/dG c_i, u> / |u|^2.
Source: influence by leaving out and its derivative (Cook 1977; Koh and Liang, arXiv 1703.04730), on one update.
"""

import math
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor, nn

from shoal.errors import TrainerError
from shoal.trainer.messages import Step
from shoal.trainer.packing import Minibatch, even_slices
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer

Gradients = dict[nn.Parameter, Tensor]


def influences(trainer: Trainer, step: Step) -> tuple[tuple[float, float], ...]:
    """Influence of each group of a step, in order, and its part along the update; takes the step as well.

    With several updates each group counts in its own. Raises `TrainerError` for a trainer of several ranks.
    """
    if trainer.rank_count > 1:
        raise TrainerError(f"influence: expected a trainer of one rank, got {trainer.rank_count}; set train.ranks to 1")
    first_of = [0, *accumulate(step.group_sizes)]
    found = [(0.0, 0.0)] * len(step.group_sizes)
    totals, by_tokens = StepTotals(trainer.device), trainer.loss_mean == "tokens"
    minibatches, fresh = trainer.ready(step, totals)
    updates = zip(minibatches, even_slices(len(found), len(step.shares)), strict=True)
    for k, (each, own) in enumerate(updates):
        if not each.informative:
            continue
        at, minibatch = Moment(step.version, step.since_push, taken=k), trainer.bounded(each)
        trained = [row for batch in minibatch.batches for row in batch.rows]
        trainer.accumulate(minibatch, totals, at, fresh=k == 0 or fresh)
        whole = trainer.optimizer.gradients()
        clip, sensitivity = trainer.optimizer.sensitivity(whole)
        for group in own:
            rows = range(first_of[group], first_of[group + 1])
            if (part := _part(minibatch, rows)) is not None:
                trainer.accumulate(part, StepTotals(trainer.device), at, fresh=k == 0 or fresh)
                share = sum(row in rows for row in trained) / len(trained)
                if by_tokens:
                    share = sum(float(batch.weight_N.sum()) for batch in part.batches)
                found[group] = _influence(trainer.optimizer.gradients(), whole, share, clip, sensitivity)
        for parameter, gradient in whole.items():
            parameter.grad = gradient
        trainer.take_update()
    return tuple(found)


def _part(minibatch: Minibatch, rows: range) -> Minibatch | None:
    """Minibatch in which only some of the step's rows have a loss; None without such rows."""
    parts = []
    for batch in minibatch.batches:
        mine_R = torch.tensor([row in rows for row in batch.rows], device=batch.weight_N.device)
        if not batch.idle and mine_R.any():
            parts.append(replace(batch, weight_N=batch.weight_N * mine_R[batch.row_N]))
    return replace(minibatch, batches=tuple(parts)) if parts else None


def _influence(
    part: Gradients, whole: Gradients, share: float, clip: float, sensitivity: dict[nn.Parameter, tuple[Tensor, Tensor]]
) -> tuple[float, float]:
    """Norm of the change of the update, and its part along the update, both relative to it."""
    inner = sum(float((part[p] * whole[p]).sum()) for p in part)
    squared = sum(float(gradient.square().sum()) for gradient in whole.values())
    back = inner / squared if clip < 1 else share
    changes = along = size = 0.0
    for parameter, (update, slope) in sensitivity.items():
        gradient = part.get(parameter)
        change = slope * clip * ((0.0 if gradient is None else gradient) - back * whole[parameter])
        changes += float(change.square().sum())
        along += float((change * update).sum())
        size += float(update.square().sum())
    return (math.sqrt(changes / size), along / size) if size else (0.0, 0.0)
