"""Loss of the user's own, imported by name and checked on a small example before the first step."""

from collections.abc import Callable
from functools import cache
from typing import TypeAlias, cast

import torch
from torch import Tensor

from shoal.errors import ConfigError
from shoal.plugins import own_code
from shoal.trainer.streams import Streams, TokenLoss

LossFunction: TypeAlias = Callable[[Streams], TokenLoss]


@cache
def own_loss(name: str) -> LossFunction:
    """User's function over `Streams`, which returns a `TokenLoss` or the loss of each token, a tensor [T].

    Raises `ConfigError` for a function that cannot be imported. A small example also refuses wrong shapes, numbers that
    are not finite, and a missing gradient.
    """
    function = cast(Callable[[Streams], object], own_code("train.loss", name))

    def loss(streams: Streams) -> TokenLoss:
        given = function(streams)
        if isinstance(given, Tensor):
            given = TokenLoss(given, streams.behaviour_ratio())
        if not isinstance(given, TokenLoss):
            raise ConfigError(f"train.loss: {name!r}: expected a tensor or a TokenLoss, got {type(given).__name__}")
        if given.loss_T.shape != streams.logp_T.shape:
            raise ConfigError(
                f"train.loss: {name!r}: expected one number per token, shape {list(streams.logp_T.shape)}, "
                f"got shape {list(given.loss_T.shape)}"
            )
        return given

    _check(name, loss)
    return loss


def _check(name: str, loss: LossFunction) -> None:
    """Raises `ConfigError` unless the loss of two rows of three tokens is finite and has a finite gradient."""
    logp_T = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5], requires_grad=True)
    behav_T = torch.tensor([-0.6, -0.9, -2.5, -0.1, -2.0, -1.4])
    advantage_T = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    row_T = torch.tensor([0, 0, 0, 1, 1, 1])
    streams = Streams(logp_T, logp_T.detach() - 0.05, behav_T, advantage_T, row_T, 2)
    gradient_T = None
    try:
        with torch.enable_grad():
            loss_T = loss(streams).loss_T
            if loss_T.requires_grad:
                (gradient_T,) = torch.autograd.grad(loss_T.sum(), logp_T, allow_unused=True)
    except ConfigError:
        raise
    except Exception as error:  # the user's function raises what it will
        raise ConfigError(f"train.loss: {name!r} failed: {type(error).__name__}: {error}") from error
    if not loss_T.isfinite().all():
        raise ConfigError(f"train.loss: {name!r}: expected finite numbers, got {loss_T.tolist()}")
    if gradient_T is None or not gradient_T.any():
        raise ConfigError(f"train.loss: {name!r}: expected a gradient with respect to logp_T, got none")
    if not gradient_T.isfinite().all():
        raise ConfigError(f"train.loss: {name!r}: expected a finite gradient, got {gradient_T.tolist()}")
