"""The trainer process: `python -m shoal.train.worker --fd N`.

Serves the requests of `shoal.train.messages` one after the other from an inherited socket, and ends when that socket
closes, when it is told to, or when its parent is gone. What goes wrong with one request is answered with `Failed`.
"""

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch

from shoal import wire
from shoal.config import ModelConfig, TrainConfig
from shoal.errors import ShoalError, TrainerError
from shoal.process import die_with_parent, receive_frame, send_frame
from shoal.train.messages import (
    Answer,
    Done,
    Failed,
    Load,
    Logprobs,
    Publish,
    Request,
    Save,
    Scored,
    Start,
    Started,
    Step,
    Stepped,
    Stop,
    request_from,
)
from shoal.train.trainer import Trainer


def main(arguments: Sequence[str]) -> None:
    """Serves until the socket closes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.train.worker")
    parser.add_argument("--fd", type=int, required=True)
    with socket.socket(fileno=parser.parse_args(arguments).fd) as connection:
        serve(connection)


def serve(connection: socket.socket) -> None:
    """Answers each request until `Stop` or the end of the stream."""
    trainer: Trainer | None = None
    while (frame := receive_frame(connection)) is not None:
        request: Request | None = None
        answer: Answer
        try:
            request = request_from(frame)
            if isinstance(request, Start):
                trainer, answer = start(request)
            else:
                answer = answer_to(request, trainer)
        except ShoalError as error:
            answer = Failed(str(error))
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            # What torch, the disk or the memory refuse; the log keeps the traceback for our own bugs.
            traceback.print_exc(file=sys.stderr)
            answer = Failed(f"{type(error).__name__}: {error}")
        send_frame(connection, wire.encode(answer))
        if isinstance(request, Stop):
            return


def start(request: Start) -> tuple[Trainer, Started]:
    """The trainer that a `Start` asks for."""
    torch.set_num_threads(request.threads)
    trainer = Trainer(
        request.model_path,
        ModelConfig.model_validate_json(request.model_json),
        TrainConfig.model_validate_json(request.train_json),
        temperature=request.temperature,
        max_tokens=request.max_tokens,
    )
    return trainer, Started(trainer.parameters, trainer.device, trainer.tokens_per_microbatch)


def answer_to(request: Request, trainer: Trainer | None) -> Answer:
    """Does what a request asks. Raises `TrainerError` before `Start`."""
    if isinstance(request, Stop):
        return Done(0.0)
    if trainer is None:
        raise TrainerError(f"expected Start as the first request, got {type(request).__name__}")
    started = time.perf_counter()
    match request:
        case Step(groups, version):
            return Stepped(trainer.step(groups, version))
        case Logprobs(rows, temperature):
            return Scored(tuple(tuple(row) for row in trainer.logprobs(rows, temperature)))
        case Publish(path, push):
            trainer.write_weights(Path(path))
            if push:
                trainer.pushed()
        case Save(directory):
            trainer.save(Path(directory))
        case Load(directory):
            trainer.load(Path(directory))
    return Done(time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Interpreter shutdown would free the weights one by one; everything that matters is on the disk.
    os._exit(0)
