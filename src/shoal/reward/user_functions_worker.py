"""The process of one of the user's reward functions: `python -m shoal.reward.user_functions_worker --fd N`."""

import json
from collections.abc import Callable
from typing import cast

from shoal import checker, wire
from shoal.net.process import from_parent, send_frame, serve
from shoal.plugins import described, numbers_of, own_code
from shoal.reward.messages import Batch
from shoal.reward.user_functions import Values


def values_of(call: Batch) -> Values | str:
    """Calls the function for a group and checks its rewards; returns a text that describes an error."""
    assert isinstance(call.spec, checker.Function)
    path, task, count = call.spec.path, call.task, len(call.answers)
    prompt = [{"role": message.role.value, "content": message.content} for message in task.messages]
    columns = {**json.loads(task.info), "answer": task.answer}
    columns.pop("scorer", None)
    try:
        values = cast(Callable[..., object], own_code("reward", path))(
            prompts=[list(prompt) for _ in call.answers],  # conversations, as in TRL's conversational data sets
            completions=[[{"role": "assistant", "content": answer}] for answer in call.answers],
            **{name: [value] * count for name, value in columns.items()},
        )
    except Exception as error:  # the user's function may raise any error
        return f"{path}: {described(error)}"
    try:
        return numbers_of(values, count)
    except ValueError as error:
        return f"{path}: {error}"


def main() -> None:
    """Answers calls until the main process closes the socket."""
    connection, _ = from_parent()
    send_frame(connection, b"")
    serve(connection, lambda frame: [wire.encode(values_of(wire.decode(frame, Batch)))])


if __name__ == "__main__":
    main()
