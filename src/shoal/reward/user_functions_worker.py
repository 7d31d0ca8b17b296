"""The process of one of the user's reward functions: `python -m shoal.reward.user_functions_worker --fd N`."""

import argparse
import json
import math
import socket
from collections.abc import Callable, Sequence
from typing import cast

from shoal import wire
from shoal.net.process import die_with_parent, send_frame, serve
from shoal.plugins import described, own_code
from shoal.reward.user_functions import FunctionRequest, FunctionResult


def result_of(call: FunctionRequest) -> FunctionResult:
    """Calls the function for a group and checks its rewards."""
    count = len(call.answers)
    try:
        values = cast(Callable[..., object], own_code("reward", call.path))(
            prompts=_prompts(call),
            completions=_completions(call),
            **{name: [value] * count for name, value in _columns(call).items()},
        )
    except Exception as error:  # the user's function raises what it will
        return FunctionResult(error=f"{call.path}: {described(error)}")
    if not isinstance(values, Sequence) or len(values) != count:
        return FunctionResult(error=f"{call.path}: expected a list of {count} rewards, got {str(values)[:80]}")
    wrong = [value for value in values if not _is_reward(value)]
    if wrong:
        return FunctionResult(error=f"{call.path}: expected finite numbers or None, got {wrong[0]!r}"[:500])
    return FunctionResult([None if value is None else float(value) for value in values])


def _is_reward(value: object) -> bool:
    if value is None:
        return True
    try:
        return math.isfinite(float(value))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _prompts(call: FunctionRequest) -> list[object]:
    """Conversations, in TRL's form of conversational data sets."""
    return [list(call.messages) for _ in call.answers]


def _completions(call: FunctionRequest) -> list[object]:
    return [[{"role": "assistant", "content": answer}] for answer in call.answers]


def _columns(call: FunctionRequest) -> dict[str, object]:
    """The task's info and its answer."""
    info = json.loads(call.info)
    return {**{name: value for name, value in info.items() if name != "scorer"}, "answer": call.truth}


def main() -> None:
    """Answers calls until the main process closes the socket."""
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    connection = socket.socket(fileno=parser.parse_args().fd)
    send_frame(connection, b"")
    serve(connection, lambda frame: [wire.encode(result_of(wire.decode(frame, FunctionRequest)))])


if __name__ == "__main__":
    main()
