"""What the main process and the trainer process say to one another; imports no torch.

Each frame of `shoal.net.process` holds the `shoal.wire` bytes of one message. Each request has exactly one answer;
`TrainerFailed` is an answer to any of them. Requests are served in order, one at a time.

    Start -> Started    Step -> Stepped    Logprobs -> Scored    Publish, Save, Load, Stop -> Done
"""

from dataclasses import dataclass
from typing import TypeAlias, cast

import msgspec

from shoal import wire
from shoal.net.process import MAX_FRAME_BYTES
from shoal.types import Sample

ANSWER_TIMEOUT_S = 6 * 3600.0
"""Longer than any step: a trainer that hangs must not hold up a run for ever."""
RATIO_BOUNDS = (0.5, 0.8, 0.9, 1.1, 1.25, 2.0, 5.0)
"""Where the distribution of pi_theta / pi_behav is cut; symmetric around 1 in the logarithm, but for the last."""


@dataclass(frozen=True, slots=True)
class StepStats:
    """What one training step did. Shares and means are over the trained tokens that were computed."""

    loss: float
    """Mean over the updates of sum(loss_T) / denominator."""
    grad_norm: float
    """Mean over the updates, before clipping."""
    update_norm: float
    """Norm of the change of the weights, mean over the updates."""
    lr: float
    """Of the last update."""
    entropy: float
    """Nats per trained token, of the distribution at the rollout temperature."""
    ratio_mean: float
    """Of pi_theta / pi_behav."""
    ratio_max: float
    ratio_shares: tuple[float, ...]
    """Share of the tokens with a pi_theta / pi_behav between neighbours of 0, `RATIO_BOUNDS`, infinity."""
    clipped_share: float
    """Tokens whose gradient the clip removed."""
    masked_share: float
    """Tokens whose gradient a bound on the importance weight removed."""
    capped_share: float
    """Tokens whose importance weight was clamped to its bound."""
    ess: float
    """Effective sample size of pi_theta / pi_behav as a share of the tokens, 0..1."""
    mismatch: float
    """Mean |logp_prox - logp_behav| in nats."""
    mismatch_fresh: float | None
    """The same over the tokens that the weights being trained drew: what engine and trainer compute differently, and
    nothing else. None without such tokens, or when the version is not known."""
    kl: float
    """Mean estimate of the distance to the reference model in nats; 0 without one."""
    value_loss: float
    """Of the critic, mean over the tokens; 0 without one."""
    explained_variance: float | None
    """Of the returns by the critic's values before the step; None without a critic."""
    tokens: int
    """Trained tokens of the batch: the sum of the denominators."""
    skipped_tokens: int
    """Trained tokens of rows without any advantage, which were not computed."""
    computed_tokens: int
    """Tokens of the rows that were computed; a prompt counts in each of its rows, though it is computed once."""
    updates: int
    """Optimizer updates taken."""
    refused_updates: int
    """Updates not taken because the gradient was not finite."""
    seconds: float


class StartTrainer(msgspec.Struct, frozen=True, tag=True):
    """The first request. The sections travel as JSON because pydantic models are not msgpack."""

    model_path: str
    model_json: str
    """Of `config.ModelConfig`; its `path` is not used."""
    train_json: str
    """Of `config.TrainConfig`."""
    temperature: float = 1.0
    threads: int = 1
    max_tokens: int | None = None
    """Of one answer."""


class Step(msgspec.Struct, frozen=True, tag=True):
    """One training step over the rows of each group."""

    groups: tuple[tuple[Sample, ...], ...]
    version: int | None = None
    """The newest that was published."""
    since_push: int = 0
    """Steps that were taken since it was."""


class ComputeLogprobs(msgspec.Struct, frozen=True, tag=True):
    """Asks for the logprobs of whole rows; at temperature 1 they are what `Engine.score` gives."""

    rows: tuple[tuple[int, ...], ...]
    temperature: float = 1.0


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Writes the weights to a safetensors file that the engines will serve."""

    path: str | None
    """None writes nothing: a replayed push whose weights nobody will serve."""
    push: bool = True
    """Whether it counts as a push; not when a resumed run serves again what was pushed before it ended."""


class SaveCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Writes weights, optimizer and counters into an existing directory."""

    directory: str


class LoadCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """Goes on from what `SaveCheckpoint` wrote."""

    directory: str


class StopTrainer(msgspec.Struct, frozen=True, tag=True):
    """Ends the process after the answer."""


class Started(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    parameters: int
    device: str
    tokens_per_microbatch: int


class Stepped(msgspec.Struct, frozen=True, tag=True):
    """The step was taken."""

    stats: StepStats


class ComputedLogprobs(msgspec.Struct, frozen=True, tag=True):
    """For each row of L tokens the L - 1 logprobs (nats) of tokens 1..L-1."""

    logprobs: tuple[tuple[float, ...], ...]


class Done(msgspec.Struct, frozen=True, tag=True):
    """It was done."""

    seconds: float


class TrainerFailed(msgspec.Struct, frozen=True, tag=True):
    """It was not done; the process goes on serving."""

    reason: str


Request: TypeAlias = StartTrainer | Step | ComputeLogprobs | Publish | SaveCheckpoint | LoadCheckpoint | StopTrainer
Answer: TypeAlias = Started | Stepped | ComputedLogprobs | Done | TrainerFailed

# The decoder takes unions, which `type[T]` cannot say.
_REQUEST = cast("type[Request]", Request)
_ANSWER = cast("type[Answer]", Answer)


def request_from(data: bytes) -> Request:
    """The request in a frame's bytes. Raises `WireError`."""
    return wire.decode(data, _REQUEST, MAX_FRAME_BYTES)


def answer_from(data: bytes) -> Answer:
    """The answer in a frame's bytes. Raises `WireError`."""
    return wire.decode(data, _ANSWER, MAX_FRAME_BYTES)
