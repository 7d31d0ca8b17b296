"""The split of a question, decided by its text alone: no seed, task or order can move it."""

import hashlib
import random
import re
from collections.abc import Sequence
from functools import lru_cache

from shoal.errors import TaskError
from shoal.types import Message, Role, Split


def split_of(question: str, eval_share: float) -> Split:
    """The split of a question: about `eval_share` of all texts are held out.

    >>> split_of("What is 1 + 1?", 0.2) is split_of("What is 1 + 1?", 0.2)
    True
    """
    return Split.EVAL if _place_of(question) < eval_share else Split.TRAIN


def _place_of(question: str) -> float:
    """A number between 0 and 1 that depends on the text alone."""
    digest = hashlib.blake2b(question.encode(), digest_size=8, person=b"shoal-split").digest()
    return int.from_bytes(digest, "big") / 2**64


def halves_of(questions: Sequence[str], eval_share: float) -> list[Split]:
    """The split of each question of a set: with two different texts, each split has a question.

    >>> [half.value for half in halves_of(["What is 1 + 1?", "What is 1 + 2?", "What is 1 + 1?"], 1e-9)]
    ['train', 'eval', 'train']
    """
    halves = {question: split_of(question, eval_share) for question in questions}
    if len(halves) > 1 and len(set(halves.values())) == 1:
        in_order = sorted(halves, key=_place_of)
        halves[in_order[0]], halves[in_order[-1]] = Split.EVAL, Split.TRAIN
    return [halves[question] for question in questions]


@lru_cache(maxsize=16)
def order_of(seed: int, count: int) -> tuple[int, ...]:
    """A permutation of range(count), cached because an epoch reads it once per question."""
    order = list(range(count))
    random.Random(seed).shuffle(order)
    return tuple(order)


def rewritten(text: str, rewrite: Sequence[tuple[str, str]]) -> str:
    """The text after each (regular expression, replacement) in order.

    >>> rewritten("Please add 1 and 2.", [("Please add ", ""), (r" and ", "+")])
    '1+2.'
    """
    for pattern, replacement in rewrite:
        text = re.sub(pattern, replacement, text)
    return text


def check_rewrite(name: str, rewrite: Sequence[tuple[str, str]]) -> None:
    """Raises `TaskError` for a pair that is no regular expression and replacement."""
    for position, (pattern, replacement) in enumerate(rewrite):
        try:
            compiled = re.compile(pattern)
            group_names = {number: f"?P<{group}>" for group, number in compiled.groupindex.items()}
            # The same groups, all empty: matches anywhere, so that a wrong reference in the replacement shows.
            groups = "".join(f"({group_names.get(number, '')})" for number in range(1, compiled.groups + 1))
            re.sub(groups, replacement, "")
        except (re.error, IndexError) as error:
            raise TaskError(f"{name}: rewrite.{position}: {pattern!r} -> {replacement!r}: {error}") from None


def prompt(system_prompt: str, question: str) -> tuple[Message, ...]:
    """The messages that ask one question."""
    system = (Message(Role.SYSTEM, system_prompt),) if system_prompt else ()
    return (*system, Message(Role.USER, question))
