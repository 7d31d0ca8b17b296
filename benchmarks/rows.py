"""Token rows for the benchmarks of the update have heavy-tailed lengths, random tokens, and half of the answers
rewarded."""

import random
from collections.abc import Sequence
from math import exp

from shoal.types import Sample

SIGMA = 1.0
MEAN_TOKENS = 64
MOST_TOKENS = 512
PROMPT_TOKENS = 16
GROUP_SIZE = 8


def answer_lengths(generator: random.Random, count: int, sigma: float = SIGMA) -> list[int]:
    """Samples lognormal lengths with a mean of about 64 tokens, at most 512.

    >>> lengths = answer_lengths(random.Random(0), 1000)
    >>> 50 < sum(lengths) / 1000 < 70, max(lengths)
    (True, 512)
    """
    draws = (MEAN_TOKENS * exp(sigma * generator.gauss(0.0, 1.0) - sigma * sigma / 2) for _ in range(count))
    return [min(MOST_TOKENS, max(1, round(draw))) for draw in draws]


def tokens(generator: random.Random, count: int) -> tuple[int, ...]:
    """Samples random characters of the benchmarks' model."""
    return tuple(generator.randrange(10, 100) for _ in range(count))


def row(prompt: tuple[int, ...], answer: tuple[int, ...], advantage: float) -> Sample:
    """Builds a prompt and an answer sampled at about the logprobs of random weights."""
    p, n = len(prompt), len(answer)
    return Sample(
        tokens=prompt + answer,
        mask=(0,) * p + (1,) * n,
        logprobs=(0.0,) * p + (-4.6,) * n,
        versions=(-1,) * p + (0,) * n,
        advantages=(0.0,) * p + (advantage,) * n,
    )


def groups(count: int, *, shared_prompts: bool, sigma: float = SIGMA, seed: int = 0) -> list[tuple[Sample, ...]]:
    """Builds `count` groups of eight rows. Without `shared_prompts` each row has a prompt of its own."""
    generator = random.Random(seed)
    result: list[tuple[Sample, ...]] = []
    for _ in range(count):
        prompts: Sequence[tuple[int, ...]] = [tokens(generator, PROMPT_TOKENS) for _ in range(GROUP_SIZE)]
        if shared_prompts:
            prompts = [prompts[0]] * GROUP_SIZE
        lengths = answer_lengths(generator, GROUP_SIZE, sigma)
        result.append(
            tuple(
                row(prompt, tokens(generator, length), 1.0 if i % 2 else -1.0)
                for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
    return result
