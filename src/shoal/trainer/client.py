"""Client of the trainer process in the main process; imports no torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from shoal import wire
from shoal.config import ModelConfig, TrainConfig
from shoal.errors import ChildDied, TrainerError
from shoal.net.process import Child, torch_environment
from shoal.trainer import messages as m
from shoal.trainer.messages import ANSWER_TIMEOUT_S
from shoal.types import Sample

A = TypeVar("A", bound=m.Answer)
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
    ) -> m.Started:
        """Loads the model. `train.loss_mean = "budget"` needs the `max_tokens` of one answer."""
        sections = (model.model_dump_json(), train.model_dump_json())
        request = m.StartTrainer(str(model_dir), *sections, temperature, threads, max_tokens)
        return await self._ask(request, m.Started)

    async def step(
        self, groups: Sequence[tuple[Sample, ...]], version: int | None = None, since_push: int = 0
    ) -> m.StepStats:
        """Takes one training step, `since_push` steps after `version` was written."""
        return (await self._ask(m.Step(tuple(groups), version, since_push), m.Stepped)).stats

    async def logprobs(
        self, rows: Sequence[Sequence[int]], *, temperature: float = 1.0
    ) -> tuple[tuple[float, ...], ...]:
        """Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""
        request = m.ComputeLogprobs(tuple(tuple(row) for row in rows), temperature)
        return (await self._ask(request, m.ComputedLogprobs)).logprobs

    async def write_version(self, path: Path | None, *, push: bool = True) -> float:
        """Writes the weights to a safetensors file, if `path` is given; returns its seconds.

        `push` counts the write as a push.
        """
        return (await self._ask(m.WriteVersion(None if path is None else str(path), push), m.Done)).seconds

    async def save(self, directory: Path) -> float:
        """Writes weights, optimizer and counters into an existing directory; returns its seconds."""
        return (await self._ask(m.SaveCheckpoint(str(directory)), m.Done)).seconds

    async def load(self, directory: Path) -> float:
        """Loads weights, optimizer and counters that `save` wrote; returns its seconds."""
        return (await self._ask(m.LoadCheckpoint(str(directory)), m.Done)).seconds

    async def _ask(self, request: m.Request, expected: type[A]) -> A:
        try:
            frame = await self._child.ask(wire.encode(request), self._timeout_s)
        except TimeoutError:
            raise ChildDied(
                f"the trainer process has not answered {type(request).__name__} for {self._timeout_s:g} s; {ADVICE}"
            ) from None
        answer = m.answer_from(frame)
        if isinstance(answer, m.TrainerFailed):
            raise TrainerError(f"the trainer refused {type(request).__name__}: {answer.reason}")
        if not isinstance(answer, expected):
            raise TrainerError(f"the trainer answered {type(request).__name__} with {type(answer).__name__}")
        return answer
