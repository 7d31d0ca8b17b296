"""Reads or edits a file of a workspace, as a JSON object on standard input says, and prints the result.

It runs inside of the sandbox: a link of the agent leads nowhere else.
"""

import json
import os
import stat
import sys

MOST_BYTES = 10 << 20


def main(request: dict[str, str | int]) -> str:
    """Lines of a file, names in a folder, or a word about an edit. Raises `OSError` and `ValueError`."""
    path = str(request["path"])
    if "old" in request:
        return edited(path, str(request["old"]), str(request["new"]))
    if os.path.isdir(path):
        return "\n".join(sorted(name + "/" * os.path.isdir(os.path.join(path, name)) for name in os.listdir(path)))
    first = max(1, int(request["first"]))
    lines = text_of(path).split("\n")
    chosen = lines[first - 1 : first - 1 + int(request["lines"])]
    return "\n".join(f"{number:6}\t{line}" for number, line in enumerate(chosen, first))


def text_of(path: str) -> str:
    """Text of a regular file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_BYTES:
            raise ValueError(f"{path}: expected a file of at most {MOST_BYTES} bytes")
        return file.read().decode(errors="surrogateescape")


def edited(path: str, old: str, new: str) -> str:
    """Replaces the only occurrence of `old`, or writes a new file."""
    if not old:
        if os.path.exists(path):
            raise ValueError(f"{path} exists: give the text to replace as old_text")
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        text = new
    else:
        text = text_of(path)
        count = text.count(old)
        if count != 1:
            raise ValueError(f"{path}: expected old_text once, found it {count} times")
        text = text.replace(old, new)
    with open(path, "wb") as file:
        file.write(text.encode(errors="surrogateescape"))
    return f"{path} was written"


if __name__ == "__main__":
    try:
        print(main(json.load(sys.stdin)))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
