"""One rank of the trainer, `python -m shoal.trainer.worker --fd N`, and the trainer as the main process sees it.

The main process asks all ranks one request at a time, and gives each its own rows of a step. A rank is a process of
this machine, or of another one that joined the run. It serves the requests of `shoal.trainer.messages` one after the
other from an inherited socket, and ends when the socket closes or its parent is gone. A failed request is answered with
`TrainerFailed`. `StartTrainer` makes a rank meet the others over TCP. Only ranks load torch.
"""

import argparse
import asyncio
import os
import socket
import sys
import time
import traceback
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from shoal import wire
from shoal.config import Config, ModelConfig
from shoal.config.training import TrainConfig
from shoal.errors import ChildDied, ShoalError, TrainerError, WorkerLost
from shoal.interfaces import Worker
from shoal.net.collection import UNUSED_BY_MODELS, loading
from shoal.net.listening import free_port
from shoal.net.process import Child, Exit, die_with_parent, serve, torch_environment
from shoal.trainer.heap import Heap
from shoal.trainer.messages import (
    ANSWER_TIMEOUT_S,
    DUMP,
    OTHER_RANK,
    RUN,
    Accumulate,
    Accumulated,
    Answer,
    Close,
    ComputeLogprobs,
    Done,
    FindRows,
    FinishSave,
    FoundRows,
    LoadCheckpoint,
    Logprobs,
    Open,
    OptimStep,
    Request,
    SaveCheckpoint,
    StartTrainer,
    Step,
    StepStats,
    TokensFile,
    TrainerFailed,
    WeighGroups,
    WriteVersion,
    answer_from,
    flight_recorder,
    request_from,
)
from shoal.trainer.packing import Packer
from shoal.types import Sample

if TYPE_CHECKING:
    from shoal.trainer.models import TrainedModels
    from shoal.trainer.ranks import Ranks
    from shoal.trainer.trainer import Trainer

V = TypeVar("V", StepStats, Logprobs, float)


@asynccontextmanager
async def local_ranks(
    log: Path, threads: int, count: int = 1, gpus: Sequence[str] = ()
) -> AsyncIterator[Sequence[Child]]:
    """Starts the ranks of a trainer on this machine; each has its share of the threads, and its GPU where there are
    some."""
    master = f"127.0.0.1:{free_port()}"
    async with AsyncExitStack() as stack:
        ranks = []
        for index in range(count):
            of_several = [f"--rank={index}", f"--ranks={count}", f"--master={master}", "--shared-disk"]
            where = of_several if count > 1 else []
            name, file = (f"trainer rank {index}", log.with_stem(f"{log.stem}-{index}")) if index else ("trainer", log)
            environment = torch_environment(max(1, threads // count), gpus[index : index + 1], gathers=count > 1)
            kind = GroupedRank if count > 1 else Child
            env = environment | flight_recorder(log.parent)
            child = kind(name, "shoal.trainer.worker", where, file, env)
            ranks.append(await stack.enter_async_context(child))
        yield ranks


class StepTrainer(Protocol):
    """Trainer of one policy, as its loop sees it. Methods raise `TrainerError` or `ChildDied`."""

    @property
    def ranks(self) -> Sequence[Worker]:
        """Ranks, whose end ends the run."""

    async def step(
        self,
        groups: Sequence[tuple[Sample, ...]],
        version: int | None = None,
        since_push: int = 0,
        *,
        tokens_file: TokensFile | None = None,
    ) -> StepStats:
        """Takes one training step, `since_push` steps after `version` was written."""

    async def logprobs(self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Logprobs:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""

    async def write_version(self, path: Path | None, *, push: bool = True, later: bool = False) -> float:
        """Writes the weights to a file, if `path` is given, or copies them; `push` counts the write as a push."""

    async def save(self, directory: Path, *, later: bool = False) -> float:
        """Writes a checkpoint into an existing directory, or copies it for later; returns its seconds."""

    async def finish_save(self, directory: Path) -> None:
        """Waits for the files that are written into a directory later."""

    async def load(self, directory: Path) -> float:
        """Loads what `save` wrote; returns its seconds."""


class GroupedRank(Child):
    """Rank of a group on this machine. With its end the group is dissolved, and a run goes on from its log."""

    async def died(self) -> Exit:
        """Raises `WorkerLost` at the end."""
        raise WorkerLost(str(await super().died()))


class TrainerProcess:
    """Client that sends all ranks of the trainer one request at a time.

    Methods raise `TrainerError`, or `ChildDied` when a rank is gone.
    """

    def __init__(self, ranks: Sequence[Worker], *, timeout_s: float = ANSWER_TIMEOUT_S) -> None:
        """`timeout_s` bounds each answer; after it the trainer counts as gone."""
        self.ranks, self._timeout_s = ranks, timeout_s
        self._packer, self._per_layer = Packer(TrainConfig(), 1), 1

    async def start(self, model_dir: Path, config: Config, threads: int) -> None:
        """Loads the model; the ranks share the threads."""
        sections = (config.model.model_dump_json(), config.train.model_dump_json())
        rollout, count = config.rollout, len(self.ranks)
        share = max(1, threads // count)
        request = StartTrainer(str(model_dir), *sections, rollout.temperature, share, rollout.max_tokens)
        budget = await self._ask(float, request)
        self._per_layer = config.train.ranks_per_layer
        self._packer = Packer(config.train, int(budget), rollout.max_tokens or 0, ranks=count // self._per_layer)

    async def step(
        self,
        groups: Sequence[tuple[Sample, ...]],
        version: int | None = None,
        since_push: int = 0,
        *,
        tokens_file: TokensFile | None = None,
    ) -> StepStats:
        """Takes one training step, `since_push` steps after `version` was written."""
        shares, sizes = await asyncio.to_thread(self._packer.step, groups), tuple(map(len, groups))
        steps = [Step(share, version, since_push, tokens_file, sizes) for share in shares]
        return await self._ask(StepStats, *(step for step in steps for _ in range(self._per_layer)))

    async def influences(
        self, groups: Sequence[tuple[Sample, ...]], version: int, since_push: int
    ) -> list[tuple[float, float]]:
        """Takes a step as `step` does; gives each group's influence on it and its part along the update."""
        packer = replace(self._packer, skip_uninformative=False)  # rows without advantage have a part of the mean, too
        (share,) = await asyncio.to_thread(packer.step, groups)
        found = await self._ask(tuple, WeighGroups(Step(share, version, since_push, None, tuple(map(len, groups)))))
        return [(influence, along) for influence, along in found]

    async def logprobs(self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0) -> Logprobs:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""
        return await self._ask(tuple, ComputeLogprobs(tuple(map(tuple, rows)), temperature))

    async def write_version(self, path: Path | None, *, push: bool = True, later: bool = False) -> float:
        """Writes the weights to a safetensors file, if `path` is given, or copies them for later; returns its seconds.

        `push` counts the write as a push.
        """
        return await self._ask(float, WriteVersion(None if path is None else str(path), push, later=later))

    async def save(self, directory: Path, *, later: bool = False) -> float:
        """Writes weights, optimizer and counters into an existing directory, or copies them for later; returns its
        seconds."""
        return await self._ask(float, SaveCheckpoint(str(directory), later))

    async def finish_save(self, directory: Path) -> None:
        """Waits for the files that are written into a directory later; the trainer serves others meanwhile."""
        await self._ask(float, FinishSave(str(directory)))

    async def load(self, directory: Path) -> float:
        """Loads weights, optimizer and counters that `save` wrote; returns its seconds."""
        return await self._ask(float, LoadCheckpoint(str(directory)))

    async def _ask(self, kind: type[V], *requests: Request) -> V:
        """Value of the answer. Raises `TrainerError` for a request that failed."""
        answer = await self.ask(*requests)
        if isinstance(answer, TrainerFailed):
            raise TrainerError(f"the trainer refused {type(requests[0]).__name__}: {answer.reason}")
        assert isinstance(answer, Done)
        assert isinstance(answer.value, kind)
        return answer.value

    async def ask(self, *requests: Request) -> Answer:
        """The first rank's answer to its request or to the shared one, once all ranks have answered.

        A failure of any rank is the answer.
        """
        given = requests if len(requests) > 1 else requests * len(self.ranks)
        asking = [
            asyncio.create_task(self._asked(rank, one), name=f"{type(one).__name__} of rank {index}")
            for index, (rank, one) in enumerate(zip(self.ranks, given, strict=True))
        ]
        for task in asking:  # the first error is raised; the others would be reported as never retrieved
            task.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            done, _ = await asyncio.wait(asking, return_when=asyncio.FIRST_EXCEPTION)
            for task in asking:
                if task in done and (error := task.exception()):
                    raise error
            answers = [task.result() for task in asking]
        finally:
            for task in asking:
                task.cancel()
        failed = [one for one in answers if isinstance(one, TrainerFailed)]
        return next((one for one in failed if one.reason != OTHER_RANK), (failed or answers)[0])

    async def _asked(self, rank: Worker, request: Request) -> Answer:
        request, folders = _placed(request, rank)
        has_rows = isinstance(request, Step | WeighGroups | ComputeLogprobs | Accumulate)  # long ones take long
        frame = await asyncio.to_thread(wire.encode, request) if has_rows else wire.encode(request)
        try:
            concurrent = isinstance(request, FinishSave)
            return answer_from(await rank.call(frame, self._timeout_s, concurrent=concurrent, **folders))
        except TimeoutError:
            name = type(request).__name__
            raise ChildDied(f"the trainer process has not answered {name} for {self._timeout_s:g} s") from None


def _placed(request: Request, rank: Worker) -> tuple[Request, dict[str, Path]]:
    """Request with the rank's own paths, and the folder that it reads or fills."""
    changed = msgspec.structs.replace
    match request:
        case StartTrainer() | Open():
            return changed(request, model_path=rank.place(Path(request.model_path))), {}
        case WriteVersion(str(path)):
            folder = Path(path).parent
            return changed(request, path=f"{rank.place(folder)}/{Path(path).name}"), {"filled": folder}
        case SaveCheckpoint() | FinishSave() | LoadCheckpoint():
            folder = Path(request.directory)
            role = "fetched" if isinstance(request, LoadCheckpoint) else "filled"
            return changed(request, directory=rank.place(folder)), {role: folder}
    return request, {}


def main(arguments: Sequence[str]) -> None:
    """Serves until the socket closes."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="shoal.trainer.worker")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--ranks-per-copy", type=int, help="ranks that share one copy of the weights; all if unset")
    parser.add_argument("--master", help="HOST:PORT of the first rank")
    parser.add_argument("--shared-disk", action="store_true", help="all ranks reach the run directory")
    options = parser.parse_args(arguments)
    with loading(hidden=UNUSED_BY_MODELS):
        from shoal.trainer.models import TrainedModels
        from shoal.trainer.ranks import Ranks

    ranks = Ranks(options.rank, options.ranks, options.ranks_per_copy, options.shared_disk)
    server = Server(ranks, TrainedModels(), options.master)
    with socket.socket(fileno=options.fd) as connection:
        serve(connection, lambda frame: [server.reply(frame)])


class Server:
    """One rank of the trainer; `master` is the address at which ranks meet, if there are several."""

    def __init__(self, ranks: "Ranks", models: "TrainedModels", master: str | None) -> None:
        self._ranks, self._models, self._master = ranks, models, master
        self._heap = Heap()

    def reply(self, frame: bytes) -> "bytes | Future[bytes]":
        """Encoded answer to a request; that to `FinishSave` comes with the last byte of the files."""
        answer, coming = self.answer(frame), Future[bytes]()
        if not isinstance(answer, Future):
            return wire.encode(answer)

        def come(written: "Future[None]") -> None:
            coming.set_result(wire.encode(_failed(error) if (error := written.exception()) else Done(0.0)))

        answer.add_done_callback(come)
        return coming

    def answer(self, frame: bytes) -> "Answer | Future[None]":
        """Answers a request, at once but for `FinishSave`."""
        started = time.perf_counter()
        try:
            request = request_from(frame)
            if isinstance(request, StartTrainer):
                if self._master is not None:
                    self._ranks.meet(self._master, ModelConfig.model_validate_json(request.model_json).device)
                with loading():
                    trainer = start(request, self._ranks)
                self._models.add(RUN, trainer)
                return Done(float(trainer.tokens_per_microbatch))
            if isinstance(request, FinishSave):
                return self._models[RUN].written(Path(request.directory))
            if isinstance(value := answer_to(request, self._models), Accumulated | FoundRows):
                return value
            if isinstance(request, Step):
                self._heap.settle()
            name = getattr(request, "name", RUN)
            updates = 0 if isinstance(request, Close) else self._models[name].updates
            return Done(time.perf_counter() - started if value is None else value, updates)
        except Exception as error:  # any error of torch, disk or memory, or a bug: the other models continue
            if self._ranks.count > 1 and not isinstance(error, ShoalError):
                self._ranks.dump_collectives(os.environ.get(DUMP))
            return _failed(error)


def _failed(error: BaseException) -> TrainerFailed:
    if isinstance(error, ShoalError):
        return TrainerFailed(str(error), refused=True)
    traceback.print_exception(error, file=sys.stderr)
    return TrainerFailed(f"{type(error).__name__}: {error}")


def start(request: StartTrainer, ranks: "Ranks") -> "Trainer":
    """Creates the trainer that a `StartTrainer` describes."""
    import torch

    from shoal.trainer.trainer import Trainer

    torch.set_num_threads(request.threads)
    model = ModelConfig.model_validate_json(request.model_json)
    train = TrainConfig.model_validate_json(request.train_json)
    rollout = (request.temperature, request.max_tokens)
    return Trainer(request.model_path, model, train, *rollout, ranks=ranks)


def answer_to(
    request: Request, models: "TrainedModels"
) -> StepStats | Logprobs | float | Accumulated | FoundRows | None:
    """Carries out a request; returns its result if it has one. Raises `TrainerError` for a model that is not there."""
    match request:
        case Step():
            return _of_run(models).carry_out(request)
        case WeighGroups(step):
            from shoal.trainer.influence import influences

            return influences(_of_run(models), step)
        case ComputeLogprobs(rows, temperature):
            return tuple(map(tuple, _of_run(models).logprobs(rows, temperature)))
        case Open():
            models.open(request)
        case Close(name):
            models.close(name)
        case Accumulate(jobs):
            return Accumulated(tuple(models.accumulate(jobs)))
        case OptimStep(name, adam):
            return models[name].update(adam)
        case WriteVersion(path, push, name, later):
            if path is not None:
                models.write_weights(name, Path(path), later=later)
            if push:
                models[name].count_push()
        case SaveCheckpoint(directory, later, name):
            models[name].save(Path(directory), later=later)
        case FindRows(directory, name, optimizer):
            return FoundRows(models[name].ranges(Path(directory), optimizer=optimizer))
        case LoadCheckpoint(directory, name, optimizer):
            models[name].load(Path(directory), optimizer=optimizer)
    return None


def _of_run(models: "TrainedModels") -> "Trainer":
    from shoal.trainer.trainer import Trainer

    trainer = models[RUN]
    assert isinstance(trainer, Trainer)
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stderr.flush()
    # Interpreter shutdown would free the weights one by one; everything that matters is on the disk.
    os._exit(0)
