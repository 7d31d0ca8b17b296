"""Continuation of aborted answers: the tokens left to sample, and the joining of the parts. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from shoal.types import Completion, FinishReason, Sampling, seed_for


def rest(
    prompt_ids: Sequence[int], sampling: Sampling, sampled: Completion, index: int
) -> tuple[list[int], Sampling] | None:
    """Prompt and sampling that continue `sampled`, completion `index` of its request; None when it has all its tokens.

    A seed is replaced by one derived from the tokens sampled so far, because the old seed would repeat its random
    numbers.
    """
    left = sampling.max_tokens - len(sampled.token_ids)
    if left <= 0:
        return None
    seed = sampling.seed
    if seed is not None:
        seed = seed_for("rest", seed, index, len(sampled.token_ids))
    return [*prompt_ids, *sampled.token_ids], replace(sampling, max_tokens=left, seed=seed)


def joined(sampled: Completion, more: Completion) -> Completion:
    """Joins two parts into one completion, with the finish reason of the second."""
    return Completion(
        sampled.token_ids + more.token_ids,
        sampled.logprobs + more.logprobs,
        sampled.versions + more.versions,
        more.finish_reason,
    )


def full(sampled: Completion) -> Completion:
    """Marks an aborted completion that has all its tokens as ended by length."""
    return replace(sampled, finish_reason=FinishReason.LENGTH)
