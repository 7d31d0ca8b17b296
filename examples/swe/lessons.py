"""Conversations in which a careless teacher mends small programs: the first lessons of `small.toml`.

    python examples/swe/lessons.py examples/swe/lessons.jsonl

The teacher reads the program, replaces a line and says that it is done. Most of its lines are wrong, so the model
learns how to work here, and little about which line is right. Faults of the held-out split are never shown.
"""

import json
import random
import sys
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from shoal.environments.programs import PROGRAMS
from shoal.environments.workspace import WorkspaceGame
from shoal.types import Role, Split

CONVERSATIONS = 400
CARELESS_SHARE = 0.7


def replaced_line(number: int, line: str) -> str:
    """Command that replaces a line of the program."""
    return f"```bash\nsed -i '{number}c\\{line}' program.py\n```"


def conversations(seed: int) -> Iterator[dict[str, object]]:
    """Conversations without end, as rows of a supervised stage."""
    rng, game = random.Random(seed), WorkspaceGame()
    for index in count():
        task = game.draw(Split.TRAIN, index)
        wrong = game.task_of(task).sources["program.py"]
        program = next(one for one in PROGRAMS if one.what in task.messages[-1].content)
        lines, right = wrong.splitlines(), program.source.splitlines()
        number, line = next((i, new) for i, (old, new) in enumerate(zip(lines, right, strict=True), 1) if old != new)
        if rng.random() < CARELESS_SHARE:
            number = rng.randint(1, len(lines))
            line = right[number - 1].replace(*rng.choice(program.slips))
        shown = "".join(f"{n:6}\t{text}\n" for n, text in enumerate(lines, 1))
        said = [
            (Role.ASSISTANT, "```bash\ncat -n program.py\n```"),
            (Role.USER, shown),
            (Role.ASSISTANT, replaced_line(number, line)),
            (Role.USER, "(it printed nothing)"),
            (Role.ASSISTANT, "DONE"),
        ]
        asked = [{"role": one.role.value, "content": one.content} for one in task.messages]
        yield {"messages": [*asked, *({"role": role.value, "content": text} for role, text in said)]}


if __name__ == "__main__":
    rows = islice(conversations(seed=0), CONVERSATIONS)
    Path(sys.argv[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
