"""Rows found by comparing prompts, and the parents of turns whose whole prompts are known. Slow; only tests use it."""

from collections.abc import Sequence

from shoal.types import Completion, Sample, Turn


def linked(*turns: Turn) -> tuple[Turn, ...]:
    """Turns that have their whole prompts, each with the longest earlier turn that its prompt begins with as parent."""
    ends: list[tuple[int, ...]] = []
    result = []
    for turn in turns:
        prompt = turn.rendered_ids
        begun = [i for i, end in enumerate(ends) if prompt[: len(end)] == end]
        parent = max(begun, key=lambda i: len(ends[i]), default=None)
        known = 0 if parent is None else len(ends[parent])
        result.append(Turn(prompt[known:], turn.completion, turn.reward, parent))
        ends.append(prompt + turn.completion.token_ids)
    return tuple(result)


def rows(
    prompts: Sequence[tuple[int, ...]], sampled: Sequence[Completion], advantages: Sequence[float]
) -> list[Sample]:
    """A turn whose prompt begins with all tokens of an earlier row extends it, the longest; any other opens a row."""
    result: list[Sample] = []
    for prompt, completion, advantage in zip(prompts, sampled, advantages, strict=True):
        n = len(completion.token_ids)
        if not n:
            continue
        begun = [i for i, row in enumerate(result) if prompt[: len(row.tokens)] == row.tokens]
        longest = max(begun, key=lambda i: len(result[i].tokens), default=None)
        row = None if longest is None else result[longest]
        gap = len(prompt) - (0 if row is None else len(row.tokens))
        extended = Sample(
            tokens=prompt + completion.token_ids,
            mask=(() if row is None else row.mask) + (0,) * gap + (1,) * n,
            logprobs=(() if row is None else row.logprobs) + (0.0,) * gap + completion.logprobs,
            versions=(() if row is None else row.versions) + (-1,) * gap + completion.versions,
            advantages=(() if row is None else row.advantages) + (0.0,) * gap + (advantage,) * n,
        )
        if longest is None:
            result.append(extended)
        else:
            result[longest] = extended
    return result
