"""The trainer process, `python -m shoal.trainer.worker --fd N`, and its client in the main process.

The process serves the requests of `shoal.trainer.messages` one after the other from an inherited socket. It ends when
the socket closes, when `StopTrainer` comes, or when its parent is gone. A failed request is answered with
`TrainerFailed`. With `train.ranks` the process is the first rank: it starts the others and passes all requests on to
them. Only the process loads torch, not its client.
"""

import argparse
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shoal import wire
from shoal.config import ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ChildDied, ShoalError, TrainerError
from shoal.net.process import Child, die_with_parent, receive_frame, send_frame, torch_environment
from shoal.trainer.messages import (
    ANSWER_TIMEOUT_S,
    Answer,
    ComputedLogprobs,
    ComputeLogprobs,
    Done,
    LoadCheckpoint,
    Request,
    SaveCheckpoint,
    Started,
    StartTrainer,
    Step,
    Stepped,
    StepStats,
    StopTrainer,
    TrainerFailed,
    WriteVersion,
    answer_from,
    request_from,
)
from shoal.types import Sample

if TYPE_CHECKING:
    from shoal.trainer.ranks import Followers, Ranks
    from shoal.trainer.trainer import Trainer

A = TypeVar("A", bound=Answer)
ADVICE = "go on with --resume"


class TrainerProcess:
    """Client that sends the trainer one request at a time.

    Methods raise `TrainerError`, or `ChildDied` when it is gone.
    """

    def __init__(self, child: Child, *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """`timeout_s` bounds each answer; after it the trainer counts as gone."""
        self._child = child
        self._timeout_s = timeout_s

    @staticmethod
    def child(log: Path, threads: int, gpus: Sequence[str] = ()) -> Child:
        """Trainer process, not yet started; `gpus` names a GPU for each rank."""
        return Child("trainer", "shoal.trainer.worker", [], log, torch_environment(threads, gpus), advice=ADVICE)

    async def start(
        self,
        model_dir: Path,
        model: ModelConfig,
        train: TrainConfig,
        *,
        temperature: float,
        threads: int,
        max_tokens: int | None = None,
    ) -> Started:
        """Loads the model. `train.loss_mean = "budget"` needs the `max_tokens` of one answer."""
        sections = (model.model_dump_json(), train.model_dump_json())
        request = StartTrainer(str(model_dir), *sections, temperature, threads, max_tokens)
        return await self._ask(request, Started)

    async def step(
        self, groups: Sequence[tuple[Sample, ...]], version: int | None = None, since_push: int = 0
    ) -> StepStats:
        """Takes one training step, `since_push` steps after `version` was written."""
        return (await self._ask(Step(tuple(groups), version, since_push), Stepped)).stats

    async def logprobs(
        self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> tuple[tuple[float, ...], ...]:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""
        request = ComputeLogprobs(tuple(tuple(row) for row in rows), temperature)
        return (await self._ask(request, ComputedLogprobs)).logprobs

    async def write_version(self, path: Path | None, *, push: bool = True) -> float:
        """Writes the weights to a safetensors file, if `path` is given; returns its seconds.

        `push` counts the write as a push.
        """
        return (await self._ask(WriteVersion(None if path is None else str(path), push), Done)).seconds

    async def save(self, directory: Path) -> float:
        """Writes weights, optimizer and counters into an existing directory; returns its seconds."""
        return (await self._ask(SaveCheckpoint(str(directory)), Done)).seconds

    async def load(self, directory: Path) -> float:
        """Loads weights, optimizer and counters that `save` wrote; returns its seconds."""
        return (await self._ask(LoadCheckpoint(str(directory)), Done)).seconds

    async def _ask(self, request: Request, expected: type[A]) -> A:
        try:
            frame = await self._child.ask(wire.encode(request), self._timeout_s)
        except TimeoutError:
            raise ChildDied(
                f"the trainer process has not answered {type(request).__name__} for {self._timeout_s:g} s; {ADVICE}"
            ) from None
        answer = answer_from(frame)
        if isinstance(answer, TrainerFailed):
            raise TrainerError(f"the trainer refused {type(request).__name__}: {answer.reason}")
        if not isinstance(answer, expected):
            raise TrainerError(f"the trainer answered {type(request).__name__} with {type(answer).__name__}")
        return answer


def main(arguments: Sequence[str]) -> None:
    """Serves until the socket closes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.trainer.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--meeting", type=Path)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args(arguments)
    from shoal.trainer.ranks import ALONE, join

    ranks = join(options.rank, options.ranks, options.meeting, options.device) if options.rank else ALONE
    with socket.socket(fileno=options.fd) as connection:
        Server(ranks).serve(connection)


class Server:
    """One rank of the trainer. The first rank starts the others when `StartTrainer` says how many."""

    def __init__(self, ranks: "Ranks") -> None:
        self._ranks = ranks
        self._followers: Followers | None = None
        self._trainer: Trainer | None = None

    def serve(self, connection: socket.socket) -> None:
        """Answers each request until `StopTrainer` or the end of the stream."""
        while (received := receive_frame(connection)) is not None:
            number, frame = received
            answer, last = self._answer(frame)
            send_frame(connection, wire.encode(answer), number)
            if last:
                break
        if self._followers is not None:
            self._followers.end()

    def _answer(self, frame: bytes) -> tuple[Answer, bool]:
        """Answer to a request, on which all ranks agree, and whether it is the last."""
        try:
            request = request_from(frame)
            if isinstance(request, StopTrainer):  # the other ranks end when their sockets close
                return Done(0.0), True
            if isinstance(request, StartTrainer) and self._ranks.first:
                self._gather(request)
            if self._followers is not None:
                self._followers.send(frame)
        except (ShoalError, RuntimeError, OSError) as error:
            return _failed(error), False
        answer = self._own_answer(request)
        if self._followers is not None:
            answer = self._followers.agreed(answer)
        return answer, False

    def _own_answer(self, request: Request) -> Answer:
        try:
            if isinstance(request, StartTrainer):
                self._trainer, started = start(request, self._ranks)
                return started
            return answer_to(request, self._trainer)
        except (ShoalError, RuntimeError, ValueError, OSError, MemoryError) as error:
            return _failed(error)

    def _gather(self, request: StartTrainer) -> None:
        """Starts the other ranks and joins their process group."""
        from shoal.model.loading import resolve_device
        from shoal.trainer.ranks import ALONE, Followers, join, leave

        if self._followers is not None:  # left from a `StartTrainer` that failed
            self._followers.end()
            leave()
        self._followers, self._ranks = None, ALONE
        count = TrainConfig.model_validate_json(request.train_json).ranks
        if count > 1:
            device = resolve_device(ModelConfig.model_validate_json(request.model_json).device)
            self._followers = Followers(count, device)
            self._ranks = join(0, count, self._followers.meeting, device)


def _failed(error: Exception) -> TrainerFailed:
    if isinstance(error, ShoalError):
        return TrainerFailed(str(error))
    # Errors of torch, the disk or the memory; the log keeps the traceback for our own bugs.
    traceback.print_exception(error, file=sys.stderr)
    return TrainerFailed(f"{type(error).__name__}: {error}")


def start(request: StartTrainer, ranks: "Ranks") -> "tuple[Trainer, Started]":
    """Creates the trainer that a `StartTrainer` describes; ranks share the threads."""
    import torch

    from shoal.trainer.trainer import Trainer

    torch.set_num_threads(max(1, request.threads // ranks.count))
    trainer = Trainer(
        request.model_path,
        ModelConfig.model_validate_json(request.model_json),
        TrainConfig.model_validate_json(request.train_json),
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        ranks=ranks,
    )
    return trainer, Started(trainer.parameters, trainer.device, trainer.tokens_per_microbatch)


def answer_to(request: Request, trainer: "Trainer | None") -> Answer:
    """Carries out a request. Raises `TrainerError` before `StartTrainer`."""
    if trainer is None:
        raise TrainerError(f"expected Start as the first request, got {type(request).__name__}")
    started = time.perf_counter()
    match request:
        case Step(groups, version, since_push):
            return Stepped(trainer.step(groups, version, since_push))
        case ComputeLogprobs(rows, temperature):
            return ComputedLogprobs(tuple(tuple(row) for row in trainer.logprobs(rows, temperature)))
        case WriteVersion(path, push):
            if path is not None:
                trainer.write_weights(Path(path))
            if push:
                trainer.count_push()
        case SaveCheckpoint(directory):
            trainer.save(Path(directory))
        case LoadCheckpoint(directory):
            trainer.load(Path(directory))
    return Done(time.perf_counter() - started)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Interpreter shutdown would free the weights one by one; everything that matters is on the disk.
    os._exit(0)
