"""The split of a question, decided by its words alone.

No seed, order, instruction, rewrite or source can move a question, and a larger share only adds held-out ones.
"""

import hashlib
import itertools
import random
import re
import unicodedata
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

from shoal.errors import TaskError
from shoal.types import Message, Role, Split, Task, seed_for

MOST_ATTEMPTS = 512
RULE = b"shoal-split/2"
"""Name of the rule that splits questions; another rule has another name."""
EVAL_SHARE = 0.2
"""Share of held-out questions of tasks that draw without end, unless they name another."""
T = TypeVar("T")


def split_of(question: str, eval_share: float) -> Split:
    """The split of a question: about `eval_share` of all texts are held out.

    >>> split_of("What is 1 + 1?", 0.2) is split_of("What is 1 + 1?", 0.2)
    True
    """
    return Split.EVAL if _place_of(question) < eval_share else Split.TRAIN


def normalised(question: str) -> str:
    """The words of a question, which spacing, case, Unicode's forms and invisible characters do not change.

    >>> normalised(" What is 1  + 1? ") == normalised("what is 1+1?")
    True
    """
    folded = unicodedata.normalize("NFKC", question).casefold()
    return "".join(one for one in folded if not one.isspace() and unicodedata.category(one) not in ("Cc", "Cf"))


def question_of(messages: Iterable[Message]) -> str:
    """The question of a prompt: all its messages, of which those that are not the user's have their roles."""
    return "\n".join(one.content if one.role is Role.USER else f"{one.role.value}: {one.content}" for one in messages)


def _place_of(question: str) -> float:
    """A number between 0 and 1 that depends on the normalised text alone."""
    text = normalised(question).encode(errors="replace")
    digest = hashlib.blake2b(text, digest_size=8, person=RULE).digest()
    return int.from_bytes(digest, "big") / 2**64


def first_of(split: Split, eval_share: float, drawn: Iterable[tuple[str, T]], name: str) -> T:
    """The first value whose text belongs to the split, so that the splits share no question, however few there are.

    Raises `TaskError` when none of `MOST_ATTEMPTS` does.

    >>> first_of(Split.EVAL, 0.5, ((str(n), n) for n in range(9)), "digits")
    1
    """
    found = (value for text, value in itertools.islice(drawn, MOST_ATTEMPTS) if split_of(text, eval_share) is split)
    for value in found:
        return value
    raise TaskError(f"{name}: none of {MOST_ATTEMPTS} questions drawn belongs to the {split} split")


def halves_of(questions: Sequence[str], eval_share: float) -> list[Split]:
    """The split of each question of a set: with two different texts, each split has a question.

    >>> [half.value for half in halves_of(["What is 1 + 1?", "What is 1 + 2?", "What is 1 + 1?"], 1e-9)]
    ['train', 'eval', 'train']
    """
    words = [normalised(question) for question in questions]
    halves = {one: split_of(one, eval_share) for one in words}
    if len(halves) > 1 and len(set(halves.values())) == 1:
        in_order = sorted(halves, key=_place_of)
        halves[in_order[0]], halves[in_order[-1]] = Split.EVAL, Split.TRAIN
    return [halves[one] for one in words]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The questions of files that a run may not train on; those of generators are not listed."""

    files: Collection[str]
    """Normalised held-out questions."""

    def has(self, messages: Sequence[Message]) -> bool:
        """True if a user's message is a held-out question, alone or with the messages before it."""
        for end, message in enumerate(messages, 1):
            if message.role is Role.USER:
                before = messages[:end]
                plain = [one for one in before if one.role is not Role.SYSTEM]
                if any(normalised(question_of(asked)) in self.files for asked in (before, plain, [message])):
                    return True
        return False


class Epochs:
    """Draws a list of tasks, each epoch in its own order; a share of them, chosen by text, is held out.

    A training task has another id in each epoch, so its answers are sampled with other random numbers.
    """

    def __init__(
        self, name: str, tasks: Sequence[Task], questions: Sequence[str], eval_share: float, seed: int = 0
    ) -> None:
        """`questions` has each task's question as its source has it, before any rewrite.

        The seed moves the order of the training tasks only. Raises `TaskError` when a split has no task.
        """
        self._name, self._seed = name, seed
        halves = list(zip(tasks, halves_of(questions, eval_share), strict=True))
        self.of = {split: [task for task, half in halves if half is split] for split in Split}
        self._questions = {task.id: normalised(question) for task, question in zip(tasks, questions, strict=True)}
        if not all(self.of.values()):
            raise TaskError(f"{name}: expected two different questions at least, one is held out; got {len(tasks)}")

    @property
    def held_out(self) -> set[str]:
        """The normalised questions of the held-out tasks."""
        return {self._questions[task.id] for task in self.of[Split.EVAL]}

    def leave_out(self, questions: Collection[str]) -> int:
        """Takes these normalised questions out of the training tasks; returns their number. Raises `TaskError`."""
        left = [task for task in self.of[Split.TRAIN] if self._questions[task.id] not in questions]
        dropped, self.of[Split.TRAIN] = len(self.of[Split.TRAIN]) - len(left), left
        if not left:
            raise TaskError(f"{self._name}: expected a question that no other task holds out, got none to train on")
        return dropped

    def draw(self, split: Split, index: int) -> Task:
        """The task at `index`; each epoch goes through all tasks of the split once."""
        tasks, trains = self.of[split], split is Split.TRAIN
        epoch, position = divmod(index, len(tasks))
        run = (self._seed,) if trains else ()
        task = tasks[order_of(seed_for(split, self._name, *run, epoch), len(tasks))[position]]
        return replace(task, id=f"{task.id}/{epoch}") if trains else task


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
