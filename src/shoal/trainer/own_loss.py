"""Loss of the user's own, imported by name and checked on a small example before the first step."""

from collections.abc import Callable
from dataclasses import replace
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

    The function reads 0 where the mask is false, and its values there do not count. Raises `ConfigError` for a function
    that cannot be imported. A small example also refuses wrong shapes, numbers that are not finite, and a missing
    gradient.
    """
    function = cast(Callable[[Streams], object], own_code("train.loss", name))

    def loss(streams: Streams) -> TokenLoss:
        given = function(_clean(streams))
        if isinstance(given, Tensor):
            ratio_T = torch.where(streams.mask_T, (streams.logp_T - streams.behav_T).detach().exp(), 0.0)
            none_T = torch.zeros_like(streams.mask_T)
            given = TokenLoss(given, ratio_T, none_T, none_T, none_T)
        if not isinstance(given, TokenLoss):
            raise ConfigError(f"train.loss: {name!r}: expected a tensor or a TokenLoss, got {type(given).__name__}")
        if given.loss_T.shape != streams.logp_T.shape:
            raise ConfigError(
                f"train.loss: {name!r}: expected one number per token, shape {list(streams.logp_T.shape)}, "
                f"got shape {list(given.loss_T.shape)}"
            )
        return replace(given, loss_T=torch.where(streams.mask_T, given.loss_T, 0.0))

    _check(name, loss)
    return loss


def _clean(streams: Streams) -> Streams:
    """Streams with 0 where the mask is false."""
    m = streams.mask_T
    return replace(
        streams,
        logp_T=torch.where(m, streams.logp_T, 0.0),
        prox_T=torch.where(m, streams.prox_T, 0.0),
        behav_T=torch.where(m, streams.behav_T, 0.0),
        advantage_T=torch.where(m, streams.advantage_T, 0.0),
    )


def _check(name: str, loss: LossFunction) -> None:
    """Raises `ConfigError` unless the loss of two rows of three tokens is finite and has a finite gradient."""
    logp_T = torch.tensor([-0.5, -1.0, -2.0, -0.1, -3.0, -1.5], requires_grad=True)
    behav_T = torch.tensor([-0.6, -0.9, -2.5, -0.1, -2.0, -1.4])
    advantage_T = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])
    mask_T = torch.tensor([True, True, True, True, True, False])
    row_T = torch.tensor([0, 0, 0, 1, 1, 1])
    streams = Streams(logp_T, logp_T.detach() - 0.05, behav_T, advantage_T, mask_T, row_T, 2)
    try:
        with torch.enable_grad():
            loss_T = loss(streams).loss_T
            gradient_T = (
                torch.autograd.grad(loss_T.sum(), logp_T, allow_unused=True)[0] if loss_T.requires_grad else None
            )
    except ConfigError:
        raise
    except Exception as error:  # the user's function raises what it will
        raise ConfigError(f"train.loss: {name!r} failed: {type(error).__name__}: {error}") from error
    if not bool(loss_T.isfinite().all()):
        raise ConfigError(f"train.loss: {name!r}: expected finite numbers, got {loss_T.tolist()}")
    if gradient_T is None or not bool(gradient_T.any()):
        raise ConfigError(f"train.loss: {name!r}: expected a gradient with respect to logp_T, got none")
    if not bool(gradient_T.isfinite().all()):
        raise ConfigError(f"train.loss: {name!r}: expected a finite gradient, got {gradient_T.tolist()}")
