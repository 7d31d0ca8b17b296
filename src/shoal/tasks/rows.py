"""Draws rows of any data set as tasks, each epoch in its own order; a share of the rows, by text, is held out."""

import json
from collections.abc import Mapping, Sequence
from typing import cast

from shoal.errors import TaskError
from shoal.tasks.holdout import halves_of, order_of
from shoal.types import Json, Message, Role, Split, Task, seed_for


class Rows:
    """Rows with a `prompt`: a text, or messages with role and content. Implements `interfaces.TaskService`."""

    def __init__(self, name: str, rows: Sequence[Mapping[str, Json]], eval_share: float = 0.2) -> None:
        """Raises `TaskError` for a row without a prompt, or when a split has none."""
        self.name = name
        self._rows = [dict(row) for row in rows]
        self._numbers: dict[Split, list[int]] = {split: [] for split in Split}
        texts = ["\x1f".join(one.content for one in self._messages(number)) for number in range(len(self._rows))]
        for number, half in enumerate(halves_of(texts, eval_share)):
            self._numbers[half].append(number)
        if not all(self._numbers.values()):
            raise TaskError(f"{name}: expected two different prompts at least, one is held out; got {len(texts)} rows")

    def draw(self, split: Split, index: int) -> Task:
        """The task at an index; each epoch goes through all rows of the split once."""
        numbers = self._numbers[split]
        epoch, position = divmod(index, len(numbers))
        number = numbers[order_of(seed_for(split, self.name, epoch), len(numbers))[position]]
        answer = self._rows[number].get("answer")
        return Task(
            f"{self.name}/{split}/{index}",
            self.name,
            self._messages(number),
            answer if isinstance(answer, str) else None,
            json.dumps({"row": number}),
        )

    def row_of(self, task: Task) -> dict[str, Json]:
        """The row of a task."""
        number: int = json.loads(task.info)["row"]
        return self._rows[number]

    def _messages(self, number: int) -> tuple[Message, ...]:
        prompt = self._rows[number].get("prompt")
        if isinstance(prompt, str):
            return (Message(Role.USER, prompt),)
        if isinstance(prompt, list) and prompt:
            try:
                return tuple(
                    Message(Role(one["role"]), str(one["content"])) for one in cast(list[dict[str, str]], prompt)
                )
            except (KeyError, TypeError, ValueError) as error:
                raise TaskError(f"{self.name}: row {number}: prompt: expected role and content, got {error}") from error
        raise TaskError(f"{self.name}: row {number}: expected a prompt, a text or messages, got {prompt!r}")
