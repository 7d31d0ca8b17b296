"""Messages between the main process, or a Tinker server, and the trainer process; imports no torch.

Each frame of `shoal.net.process` holds the `shoal.wire` bytes of one message. Each request has exactly one answer, and
`TrainerFailed` may answer any request. The trainer serves requests in order, one at a time.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias, cast, get_type_hints

import msgspec
from msgspec import Meta

from shoal import wire
from shoal.net.process import MAX_FRAME_BYTES
from shoal.trainer.packing import Share

ANSWER_TIMEOUT_S = 6 * 3600.0
"""Seconds, longer than any step: a trainer that hangs must not block a run."""
OTHER_RANK = "another rank refused its rows"
"""Reason of a rank that fails because another one does."""
DUMP = "TORCH_FR_DUMP_TEMP_FILE"
"""Variable with the path of a dump of collectives, without the rank, with which NCCL and `_failed` end it."""
RANGES = ".ranges"
"""Suffix of a sidecar file with [offset, size] of each range that a rank has written."""
RATIO_BOUNDS = (0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 5.0)
"""Ratios pi_theta / pi_behav that bound the bins of the distribution; symmetric around 1 in the logarithm, but for
the last."""
CLIPPED, MASKED, CAPPED = 1, 2, 4
"""Bits of a token's fate: gradient removed by the clip, removed by a bound on the importance weight, or this weight
lowered to its bound."""
MOST_RATE = 1e3
"""Learning rate and weight decay at most of one update: a greater one leaves no finite weights."""

Rate = Annotated[float, Meta(ge=0, le=MOST_RATE)]
Decay = Annotated[float, Meta(ge=0, lt=1)]


@dataclass(frozen=True, slots=True)
class StepStats:
    """Statistics of one training step, by default of one that computed nothing.

    Shares and means are over the trained tokens that were computed. An annotation is the meaning of a metric of that
    name.
    """

    loss: Annotated[float, "Loss, mean over the updates of the step."] = 0.0
    grad_norm: Annotated[float, "Global gradient norm before clipping, mean over the updates."] = 0.0
    update_norm: Annotated[float, "Norm of the change of the weights, mean over the updates."] = 0.0
    lr: Annotated[float, "Learning rate of the last update."] = 0.0
    entropy: Annotated[float, "Nats per token, of the distribution at the rollout temperature."] = 0.0
    ratio_mean: Annotated[float, "Mean of pi_theta / pi_behav."] = 0.0
    ratio_max: Annotated[float, "Largest pi_theta / pi_behav."] = 0.0
    ratio_shares: tuple[float, ...] = (0.0,) * (len(RATIO_BOUNDS) + 1)
    """Share of the tokens with a pi_theta / pi_behav between neighbours of 0, `RATIO_BOUNDS`, infinity."""
    clipped_share: Annotated[float, "Share of tokens whose gradient the clip removed."] = 0.0
    masked_share: Annotated[float, "Share of tokens whose gradient a bound on the importance weight removed."] = 0.0
    capped_share: Annotated[float, "Share of tokens whose importance weight was lowered to its bound."] = 0.0
    ess: Annotated[float, "Effective sample size of pi_theta / pi_behav over the number of tokens."] = 0.0
    mismatch: Annotated[float, "Mean |log pi_prox - log pi_behav|, in nats."] = 0.0
    mismatch_fresh: Annotated[
        float | None,
        "`mismatch` over tokens sampled by the weights being trained: the difference of the engine's and the "
        "trainer's arithmetic; missing without such tokens.",
    ] = None
    kl: Annotated[float, "Estimated distance to the reference model, in nats; 0 without one."] = 0.0
    value_loss: Annotated[float, "Half the squared error of the critic's values, in the mean; 0 without a critic."] = (
        0.0
    )
    explained_variance: Annotated[
        float | None, "Share of the returns' variance that the critic's values explain; missing without a critic."
    ] = None
    tokens: int = 0
    """Trained tokens of the batch: the sum of the denominators."""
    skipped_tokens: int = 0
    """Trained tokens of rows without any advantage, which were not computed."""
    computed_tokens: int = 0
    """Tokens of the computed rows; a prompt counts in each of its rows, though it is computed once."""
    updates: int = 0
    """Optimizer updates taken."""
    refused_updates: Annotated[int, "Updates not taken because the gradient was not finite."] = 0
    seconds: float = 0.0
    weights: str = ""
    """Fingerprint of the trained weights after the step (`trainer.fingerprint`)."""


Logprobs: TypeAlias = tuple[tuple[float, ...], ...]
"""Logprobs (nats) of tokens 1..L-1 for each row of L tokens."""

STATS_MEANINGS: Mapping[str, str] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepStats, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""Statistics that are metrics of a step, by name."""


RUN = ""
"""Name of a run's model. Other models have the names that `Open` gave them."""


class StartTrainer(msgspec.Struct, frozen=True, tag=True):
    """First request. The config sections travel as JSON because pydantic models are not msgpack."""

    model_path: str
    model_json: str
    """Section `config.ModelConfig`; its `path` is not used."""
    train_json: str
    """Section `config.TrainConfig`."""
    temperature: float = 1.0
    threads: int = 1
    max_tokens: int | None = None
    """Token limit of one answer."""


class TokensFile(msgspec.Struct, frozen=True):
    """Wish for a file with the numbers of each token that a step trains (`trainer.token_numbers`)."""

    path: str
    group_ids: tuple[str, ...]
    """Names of the step's groups, in order."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """One training step; a rank gets its own rows only."""

    shares: tuple[Share, ...]
    """Part of the rank in each update."""
    version: int | None = None
    """Newest Version written."""
    since_push: int = 0
    """Steps taken since this Version was written."""
    tokens_file: TokensFile | None = None
    group_sizes: tuple[int, ...] = ()
    """Rows of each group, for `tokens_file`."""


class WeighGroups(msgspec.Struct, frozen=True, tag=True):
    """Request to take a step, and to tell each group's influence on it (`trainer.influence`)."""

    step: Step


class ComputeLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Request for the logprobs of whole rows; at temperature 1 they equal those of an engine's `/score`."""

    rows: tuple[tuple[int, ...], ...]
    temperature: float = 1.0


class WriteVersion(msgspec.Struct, frozen=True, tag=True):
    """Request to write the weights to a safetensors file that the engines will load."""

    path: str | None
    """Path of the file; None writes nothing, for a replayed push whose weights no engine will serve."""
    push: bool = True
    """Whether the write counts as a push; false when a resumed run rewrites its last Version."""
    name: str = RUN
    later: bool = False
    """Whether the answer comes once the weights are copied; `FinishSave` waits for the file."""


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Request to write weights, optimizer and counters into an existing directory."""

    directory: str
    later: bool = False
    """Whether the answer comes once they are copied; `FinishSave` waits for the files."""
    name: str = RUN


class FinishSave(msgspec.Struct, frozen=True, tag=True):
    """Request to wait for the files that a `SaveCheckpoint` or `WriteVersion` for later writes into a directory.

    It is answered while the trainer serves other requests.
    """

    directory: str


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Request to continue from the files of `SaveCheckpoint`; without `optimizer` only its weights are read."""

    directory: str
    name: str = RUN
    optimizer: bool = True


class FindRows(msgspec.Struct, frozen=True, tag=True):
    """Request for the ranges of the files of `LoadCheckpoint` that a rank reads; the directory has their headers."""

    directory: str
    name: str = RUN
    optimizer: bool = True


class Adapter(msgspec.Struct, frozen=True):
    """Low-rank adapter of a model, on its attention, on its other linear layers, or on both."""

    rank: Annotated[int, Meta(ge=1)]
    seed: int = 0
    attention: bool = True
    mlp: bool = True
    alpha: float = 32.0
    """Scale of the adapter times its rank; the default is that of the Tinker documentation."""


class Adam(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings of one AdamW update, under the names and with the defaults of the Tinker API."""

    learning_rate: Rate = 1e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Decay = 1e-12
    weight_decay: Rate = 0.0
    grad_clip_norm: Annotated[float, Meta(ge=0)] = 0.0
    """Largest norm of the gradient; 0 for any."""

    def __post_init__(self) -> None:
        """Raises `ValueError` for a decay that would let weights grow: an update scales them by 1 - rate * decay."""
        if (decay := self.learning_rate * self.weight_decay) >= 2:
            raise ValueError(f"weight_decay: expected a product with learning_rate below 2, got {decay:g}")


class Open(msgspec.Struct, frozen=True, tag=True):
    """Request to train an adapter of a model under a name."""

    name: str
    model_path: str
    model_json: str
    """Section `config.ModelConfig`; its `path` is not used."""
    adapter: Adapter


class Close(msgspec.Struct, frozen=True, tag=True):
    """Request to forget a model."""

    name: str


class Datum(msgspec.Struct, frozen=True):
    """Row of N tokens with N or N * K target tokens, and what the loss takes at each target."""

    tokens: bytes
    """int32 [N]"""
    targets: bytes
    """int32, in the shape"""
    shape: tuple[int, ...]
    """[N] or [N, K]"""
    inputs: dict[str, bytes]
    """float32, each in the shape"""

    @property
    def token_ids(self) -> list[int]:
        """The tokens."""
        return array("i", self.tokens).tolist()


class Gradient(msgspec.Struct, frozen=True):
    """Data of one model with a loss of `datum_loss.LOSSES`: for a forward pass, and a backward one if `backward`."""

    name: str
    data: tuple[Datum, ...]
    loss: str
    settings: dict[str, float]
    backward: bool = True


class Accumulate(msgspec.Struct, frozen=True, tag=True):
    """Request to compute gradients of several models together, each of which adds to those of its model."""

    jobs: tuple[Gradient, ...]


class OptimStep(msgspec.Struct, frozen=True, tag=True):
    """Request for one optimizer update with the gradients so far; the answer has the gradient's norm."""

    name: str
    adam: Adam


class Done(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request that was carried out."""

    value: StepStats | Logprobs | float
    """Statistics of a `Step`, logprobs of `ComputeLogprobs`, tokens of a micro-batch for `StartTrainer`, norm of the
    gradient for `OptimStep`; otherwise seconds. `WeighGroups` gets two numbers for each group."""
    updates: int = 0
    """Updates that the model of the request has taken."""


class FoundRows(msgspec.Struct, frozen=True, tag=True):
    """Answer to `FindRows`: offset and size of each range, by the file's name."""

    ranges: dict[str, tuple[tuple[int, int], ...]]


class TrainerFailed(msgspec.Struct, frozen=True, tag=True):
    """Answer to a request that failed; the process keeps serving."""

    reason: str
    refused: bool = False
    """Whether the request itself is wrong, and changed nothing."""


class GradientDone(msgspec.Struct, frozen=True, tag=True):
    """Logprobs of each datum's targets, float32 in its shape, and the sum of the losses."""

    logprobs: tuple[bytes, ...]
    loss: float
    updates: int
    """Updates that the model has taken."""


class Accumulated(msgspec.Struct, frozen=True, tag=True):
    """Answer to `Accumulate`, job by job."""

    parts: tuple[GradientDone | TrainerFailed, ...]


OfRun: TypeAlias = StartTrainer | Step | WeighGroups | ComputeLogprobs | FinishSave | FindRows
OfModel: TypeAlias = Open | Close | OptimStep | WriteVersion | SaveCheckpoint | LoadCheckpoint
Request: TypeAlias = OfRun | OfModel | Accumulate
Answer: TypeAlias = Done | Accumulated | FoundRows | TrainerFailed


def request_from(data: bytes) -> Request:
    """Request in a frame's bytes. Raises `WireError`."""
    return wire.decode(data, cast("type[Request]", Request), MAX_FRAME_BYTES)  # type[T] cannot say a union


def answer_from(data: bytes) -> Answer:
    """Answer in a frame's bytes. Raises `WireError`."""
    return wire.decode(data, cast("type[Answer]", Answer), MAX_FRAME_BYTES)


class FakeQuestion(msgspec.Struct, frozen=True):
    """Input of `trainer.fake_run`: a trainer, and sizes of its micro-batches."""

    model_path: str
    """Directory with the model's config.json."""
    model_json: str
    train_json: str
    ranks: int
    shard: int | None
    """Ranks that share one copy of the weights; None for all."""
    row_tokens: int
    """Tokens of the longest row."""
    tokens: tuple[int, ...]
    """Sizes of a micro-batch, in tokens."""
    gpu_bytes: int
    """Memory of a rank's GPU."""


class FakeTaken(msgspec.Struct, frozen=True):
    """Memory of one fake rank, in bytes."""

    tokens: int
    weights: int
    gradient: int
    moments: int
    passing: int
    """Most that a forward and a backward pass add to the weights: activations, gathered layers, gradients."""

    @property
    def peak(self) -> int:
        """Most memory of a step."""
        return self.weights + self.passing + self.moments


def flight_recorder(folder: Path) -> dict[str, str]:
    """Variables under which torch records the collectives of a rank; a file in `folder` has them once one hangs."""
    return {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1", DUMP: f"{folder}/collectives-"}
