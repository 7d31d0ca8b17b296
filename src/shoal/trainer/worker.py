"""The trainer process, `python -m shoal.trainer.worker --fd N`, and its client in the main process.

The process serves the requests of `shoal.trainer.messages` one after the other from an inherited socket. It ends when
the socket closes or its parent is gone. A failed request is answered with `TrainerFailed`. With `train.ranks` the
process is the first rank: it starts the others and passes all requests on to them. Only the process loads torch, not
its client.
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
from shoal.config import Config, ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ChildDied, ShoalError, TrainerError
from shoal.net.process import Child, die_with_parent, serve, torch_environment
from shoal.trainer.messages import (
    ANSWER_TIMEOUT_S,
    Answer,
    ComputeLogprobs,
    Done,
    LoadCheckpoint,
    Logprobs,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    StepStats,
    TokensFile,
    TrainerFailed,
    WriteVersion,
    answer_from,
    request_from,
)
from shoal.types import Sample

if TYPE_CHECKING:
    from shoal.trainer.ranks import Followers
    from shoal.trainer.trainer import Trainer

V = TypeVar("V", StepStats, Logprobs, float)
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

    async def start(self, model_dir: Path, config: Config, threads: int) -> None:
        """Loads the model."""
        sections = (config.model.model_dump_json(), config.train.model_dump_json())
        rollout = config.rollout
        await self._ask(
            StartTrainer(str(model_dir), *sections, rollout.temperature, threads, rollout.max_tokens), float
        )

    async def step(
        self,
        groups: Sequence[tuple[Sample, ...]],
        version: int | None = None,
        since_push: int = 0,
        *,
        tokens_file: TokensFile | None = None,
    ) -> StepStats:
        """Takes one training step, `since_push` steps after `version` was written."""
        return await self._ask(Step(tuple(groups), version, since_push, tokens_file), StepStats)

    async def logprobs(self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Logprobs:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""
        return await self._ask(ComputeLogprobs(tuple(map(tuple, rows)), temperature), tuple)

    async def write_version(self, path: Path | None, *, push: bool = True) -> float:
        """Writes the weights to a safetensors file, if `path` is given; returns its seconds.

        `push` counts the write as a push.
        """
        return await self._ask(WriteVersion(None if path is None else str(path), push), float)

    async def save(self, directory: Path) -> float:
        """Writes weights, optimizer and counters into an existing directory; returns its seconds."""
        return await self._ask(SaveCheckpoint(str(directory)), float)

    async def load(self, directory: Path) -> float:
        """Loads weights, optimizer and counters that `save` wrote; returns its seconds."""
        return await self._ask(LoadCheckpoint(str(directory)), float)

    async def _ask(self, request: Request, kind: type[V]) -> V:
        try:
            frame = await self._child.ask(wire.encode(request), self._timeout_s)
        except TimeoutError:
            raise ChildDied(
                f"the trainer process has not answered {type(request).__name__} for {self._timeout_s:g} s; {ADVICE}"
            ) from None
        answer = answer_from(frame)
        if isinstance(answer, TrainerFailed):
            raise TrainerError(f"the trainer refused {type(request).__name__}: {answer.reason}")
        assert isinstance(answer.value, kind)
        return answer.value


def main(arguments: Sequence[str]) -> None:
    """Serves until the socket closes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.trainer.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--meeting", type=Path)
    options = parser.parse_args(arguments)
    server = Server(options.rank, options.meeting)
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, lambda frame: [wire.encode(server.answer(frame))])
    server.end()


class Server:
    """One rank of the trainer. The first rank starts the others when `StartTrainer` says how many."""

    def __init__(self, rank: int, meeting: Path | None) -> None:
        """`meeting` is the file through which other ranks than the first find each other."""
        self._rank, self._meeting = rank, meeting
        self._followers: Followers | None = None
        self._trainer: Trainer | None = None

    def answer(self, frame: bytes) -> Answer:
        """Answers a request as all ranks agree."""
        try:
            request = request_from(frame)
            if isinstance(request, StartTrainer) and not self._rank:
                self._start_followers(request)
            if self._followers is not None:
                self._followers.send(frame)
        except (ShoalError, RuntimeError, OSError) as error:
            return _failed(error)
        own = self._own_answer(request)
        return own if self._followers is None else self._followers.agreed(own)

    def _own_answer(self, request: Request) -> Answer:
        started = time.perf_counter()
        try:
            if isinstance(request, StartTrainer):
                self._trainer = start(request, self._rank, self._meeting)
            elif (value := answer_to(request, self._trainer)) is not None:
                return Done(value)
            return Done(time.perf_counter() - started)
        except (ShoalError, RuntimeError, ValueError, OSError, MemoryError) as error:
            return _failed(error)

    def _start_followers(self, request: StartTrainer) -> None:
        from shoal.trainer.ranks import Followers, leave

        self.end()  # of a `StartTrainer` that failed
        leave()
        count = TrainConfig.model_validate_json(request.train_json).ranks
        if count > 1:
            self._followers = Followers(count)
            self._meeting = self._followers.meeting

    def end(self) -> None:
        """Ends the other ranks."""
        if self._followers is not None:
            self._followers.end()
            self._followers = None


def _failed(error: Exception) -> TrainerFailed:
    if isinstance(error, ShoalError):
        return TrainerFailed(str(error))
    # Errors of torch, the disk or the memory; the log keeps the traceback for our own bugs.
    traceback.print_exception(error, file=sys.stderr)
    return TrainerFailed(f"{type(error).__name__}: {error}")


def start(request: StartTrainer, rank: int, meeting: Path | None) -> "Trainer":
    """Creates the trainer that a `StartTrainer` describes, once all ranks are there; they share the threads."""
    import torch

    from shoal.model.loading import resolve_device
    from shoal.trainer.ranks import ALONE, join
    from shoal.trainer.trainer import Trainer

    model = ModelConfig.model_validate_json(request.model_json)
    train = TrainConfig.model_validate_json(request.train_json)
    ranks = join(rank, train.ranks, meeting, resolve_device(model.device)) if meeting else ALONE
    torch.set_num_threads(max(1, request.threads // ranks.count))
    rollout = (request.temperature, request.max_tokens)
    return Trainer(request.model_path, model, train, *rollout, ranks=ranks)


def answer_to(request: Request, trainer: "Trainer | None") -> StepStats | Logprobs | None:
    """Carries out a request; returns its result if it has one. Raises `TrainerError` before `StartTrainer`."""
    if trainer is None:
        raise TrainerError(f"expected Start as the first request, got {type(request).__name__}")
    match request:
        case Step(groups, version, since_push, tokens_file):
            return trainer.step(groups, version, since_push, tokens_file=tokens_file)
        case ComputeLogprobs(rows, temperature):
            return tuple(map(tuple, trainer.logprobs(rows, temperature)))
        case WriteVersion(path, push):
            if path is not None:
                trainer.write_weights(Path(path))
            if push:
                trainer.count_push()
        case SaveCheckpoint(directory):
            trainer.save(Path(directory))
        case LoadCheckpoint(directory):
            trainer.load(Path(directory))
    return None


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Interpreter shutdown would free the weights one by one; everything that matters is on the disk.
    os._exit(0)
