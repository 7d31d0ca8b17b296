"""Answers that were cut off and go on elsewhere, or later: what is left to draw, and how the parts are joined. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.types import Completion, FinishReason, Sampling, seed_for


def rest(
    prompt_ids: Sequence[int], sampling: Sampling, drawn: Completion, index: int
) -> tuple[list[int], Sampling] | None:
    """The prompt and the sampling that go on with `drawn`, the completion `index` of its request; None when it is full.

    A seed is replaced by one for what was drawn so far: the same one would repeat its random numbers from the start.
    """
    left = sampling.max_tokens - len(drawn.token_ids)
    if left <= 0:
        return None
    seed = sampling.seed
    if seed is not None:
        seed = seed_for("rest", seed, index, len(drawn.token_ids))
    return [*prompt_ids, *drawn.token_ids], replace(sampling, max_tokens=left, seed=seed)


def joined(drawn: Completion, more: Completion) -> Completion:
    """One completion of two parts, the second of which was drawn after the first; it ended as the second did."""
    return Completion(
        drawn.token_ids + more.token_ids,
        drawn.logprobs + more.logprobs,
        drawn.versions + more.versions,
        more.finish_reason,
    )


def full(drawn: Completion) -> Completion:
    """A cut-off answer that has all the tokens it may have."""
    return replace(drawn, finish_reason=FinishReason.LENGTH)
