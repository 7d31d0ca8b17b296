"""The values that flow through Shoal; standard library only.

    Task -> Completion -> Turn -> Rollout -> Group -> Sample

Every value is frozen and checked once, on construction. `Rollout`s are portable (text and rewards suit any
tokenizer), `Sample`s are not (token ids and logprobs belong to one tokenizer).
"""

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


def seed_for(*names: str | int) -> int:
    """A 63-bit seed: the hash of a path of names, such as `seed_for("train", "chain_sum", 7)`.

    Neighbouring integer seeds are never used: reasoning-gym draws item i from seed + i, so that seeds 42 and 43
    share nearly all questions.

    >>> seed_for("train", 1) == seed_for("train", 1) != seed_for("eval", 1)
    True
    """
    path = "\x1f".join(str(name) for name in names)
    return int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big") >> 1


class Role(StrEnum):
    """The speaker of a message."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool that an assistant's message calls."""

    id: str
    name: str
    arguments: str  # JSON object


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation."""

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant's tools, in order."""
    tool_call_id: str = ""
    """Id of the call that a tool's message answers."""
    reasoning: str = ""
    """An assistant's thought before its answer, where the template separates it."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The origin of a procedural task: equal receipts give equal questions and truths."""

    dataset: str
    dataset_version: str
    config: str  # JSON object, keys sorted
    seed: int
    index: int


class Split(StrEnum):
    """Disjoint halves of a task's questions."""

    TRAIN = "train"
    EVAL = "eval"


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, drawn from the task service `service`, with the data to score its answers."""

    id: str
    service: str
    messages: tuple[Message, ...]
    answer: str | None = None
    info: str = "{}"  # JSON object: further data for the scorer
    receipt: Receipt | None = None


class FinishReason(StrEnum):
    """The reason why an engine stopped sampling tokens."""

    STOP = "stop"
    """A stop token or a stop text was sampled; it ends the completion."""
    LENGTH = "length"
    """The token budget or the context ran out."""
    ABORT = "abort"
    """A caller stopped the engine; the tokens sampled so far are kept."""


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 1e-5, 1e5
"""Bounds within which logits / temperature are finite in float32; below the lower one vLLM samples greedily."""
MOST_KEPT = 512  # largest `top_k` with which the tokens that may be sampled are recorded
MOST_TOP_K = 2**31 - 1  # the largest 32-bit integer: engines take no larger one


@dataclass(frozen=True, slots=True)
class Sampling:
    """Settings of sampling. `temperature=0` is greedy; `top_k=0`, `top_p=1` and `min_p=0` are off."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    grammar: str = ""  # in llguidance's Lark syntax; the answer satisfies it
    begun: int = 0  # the last tokens of the prompt that belong to the answer under the grammar

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: expected at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature <= HIGHEST_TEMPERATURE:
            expected = f"0 (greedy) or a number from {LOWEST_TEMPERATURE:g} to {HIGHEST_TEMPERATURE:g}"
            raise ValueError(f"temperature: expected {expected}, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: expected a number in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k <= MOST_TOP_K:
            raise ValueError(f"top_k: expected 0 (off) to {MOST_TOP_K}, got {self.top_k}")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p: expected a number in [0, 1), got {self.min_p}")

    @property
    def is_plain(self) -> bool:
        """Whether a token's logprob is that of the whole distribution at the temperature."""
        return self.temperature > 0 and self.top_p == 1 and not (self.top_k or self.min_p or self.grammar)

    @property
    def records_kept(self) -> bool:
        """Whether `Completion.kept` is recorded: the number of tokens that may be sampled has a small bound."""
        return self.temperature > 0 and 0 < self.top_k <= MOST_KEPT

    def rest(self, sampled: int, index: int = 0) -> "Sampling | None":
        """Sampling that continues completion `index` after `sampled` tokens; None when no tokens are left.

        The seed is derived from the number of tokens, because the old seed would repeat its random numbers.
        """
        if sampled >= self.max_tokens:
            return None
        seed = None if self.seed is None else seed_for("rest", self.seed, index, sampled)
        return replace(self, max_tokens=self.max_tokens - sampled, seed=seed, begun=self.begun + sampled)


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer of an engine.

    The logprob (nats) of a token is the one it was sampled with: after temperature, top-p, top-k and min-p.
    Versions never decrease: an interrupted answer goes on under newer weights.
    """

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L] nats, <= 0
    versions: tuple[int, ...]  # [L] the Version that sampled each token
    finish_reason: FinishReason
    routing: bytes = b""
    """Experts of all tokens of prompt and completion but the last, if recorded for a mixture of experts.

    Each token has equally many bytes (`shoal.model.routing`); bytes 255 stand for an expert that was not recorded.
    """
    forced: tuple[int, ...] = ()
    """Indices of untrained tokens: the grammar allowed less than half of the model's probability there."""
    kept: tuple[bytes, ...] = ()
    """Tokens that could be sampled at each place, as uint32; empty unless `Sampling.records_kept`."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            raise ValueError(
                f"completion streams differ in length: {len(self.token_ids)} token ids, "
                f"{len(self.logprobs)} logprobs, {len(self.versions)} versions"
            )
        if not all(map(math.isfinite, self.logprobs)) or max(self.logprobs, default=0.0) > 0:
            raise ValueError("completion logprobs must be finite and <= 0")
        if list(self.versions) != sorted(self.versions):
            raise ValueError("completion versions must not decrease")

    def then(self, more: "Completion") -> "Completion":
        """This completion continued by that of a later call."""
        return Completion(
            self.token_ids + more.token_ids,
            self.logprobs + more.logprobs,
            self.versions + more.versions,
            more.finish_reason,
            self.routing + more.routing[len(self.routing) :],
            self.forced + tuple(len(self.token_ids) + index for index in more.forced),
            self.kept + more.kept,
        )


def check_parents(parents: Iterable[int | None]) -> None:
    """Checks that the parents of turns, in order, are earlier turns. Raises `ValueError`."""
    for index, parent in enumerate(parents):
        if parent is not None and not 0 <= parent < index:
            raise ValueError(f"turn {index} has turn {parent} as its parent, expected an earlier one")


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion of a rollout, with the tokens that were rendered between its parent turn and it."""

    rendered_ids: tuple[int, ...]  # [P] the whole prompt of a turn without a parent
    completion: Completion
    reward: float = 0.0
    """Reward of this answer by itself, in addition to the rollout's reward."""
    parent: int | None = None
    """Index of the earlier turn whose prompt and completion come before `rendered_ids`.

    None for a new root: a first or single turn, an edited or compacted history, a sub-agent, a peer's answer.
    """

    def __post_init__(self) -> None:
        if not math.isfinite(self.reward):
            raise ValueError(f"turn reward: expected a finite number, got {self.reward}")


class RewardStatus(StrEnum):
    """The end of scoring. Only `SCORED` says anything about the policy."""

    SCORED = "scored"
    TIMED_OUT = "timed_out"
    FAILED = "failed"


EXHAUSTED = "exhausted"  # name of the reward part of a checker that used up its processor time
UNREAD = "the scorer could not read it: "
"""Prefix of the evidence when the scorer cannot parse an answer."""


@dataclass(frozen=True, slots=True)
class Reward:
    """The scorer's reward of an answer. `value` is 0 and means nothing unless `status` is `SCORED`."""

    value: float
    status: RewardStatus = RewardStatus.SCORED
    parts: tuple[tuple[str, float], ...] = ()
    evidence: str = ""
    is_repeatable: bool = field(default=True, repr=False, compare=False)
    """False for a score that a busy machine may have caused, such as a program's timeout; it is not cached."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"reward value: expected a finite number, got {self.value}")

    @property
    def exhausted(self) -> bool:
        """True if a checker used up its processor time on the answer; its part is then 0."""
        return any(name.rpartition("/")[2] == EXHAUSTED for name, _ in self.parts)

    @property
    def unread(self) -> str:
        """Why a scorer could not parse the answer, by its evidence; empty otherwise."""
        return self.evidence.partition(UNREAD)[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    """An agent's result at the end of a task."""

    reward: float | None = None
    """None leaves it to the task's scorer."""
    answer: str | None = None
    """The answer to score; None stands for the newest sampled answer."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of the sampled answers by themselves, in the order of the requests; unnamed answers earned 0."""
    evidence: str = ""  # the reason of the reward, for people

    def __post_init__(self) -> None:
        if not all(map(math.isfinite, given := (*self.turn_rewards, self.reward or 0.0))):
            raise ValueError(f"outcome rewards: expected finite numbers, got {given}")


class RolloutStatus(StrEnum):
    """The end of a rollout. A `FAILED` rollout enters neither baselines nor gradients."""

    FINISHED = "finished"
    TRUNCATED = "truncated"
    """The policy used up its context, turns or tokens; its result so far counts."""
    FAILED = "failed"
    """The cause of the failure was not the policy."""


@dataclass(frozen=True, slots=True)
class Rollout:
    """One generator's whole work on one task. `reason` says why unless the status is `FINISHED`.

    Turns are in the order in which they were begun, and form a tree (`shoal.turn_tree`): a rollout with branches gives
    several token rows.
    """

    id: str
    messages: tuple[Message, ...]
    turns: tuple[Turn, ...]
    reward: Reward
    status: RolloutStatus = RolloutStatus.FINISHED
    reason: str = ""
    """Figures of a peer's answer; None for an own rollout."""

    def __post_init__(self) -> None:
        check_parents(turn.parent for turn in self.turns)

    @property
    def oldest_version(self) -> int | None:
        """The Version of the rollout's oldest token; None without sampled tokens."""
        oldest = [turn.completion.versions[0] for turn in self.turns if turn.completion.versions]
        return min(oldest, default=None)

    @property
    def sampled_tokens(self) -> int:
        """Number of tokens that the engine sampled for this rollout."""
        return sum(len(turn.completion.token_ids) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class Origin:
    """The peer's signed message from which a group was made."""

    peer_id: str
    message_id: str


@dataclass(frozen=True, slots=True)
class Group:
    """The rollouts of one task: the unit of advantage, of the buffer and of exchange."""

    id: str
    task: Task
    rollouts: tuple[Rollout, ...]
    admitted_version: int
    origin: Origin | None = None
    """None for a group that this node sampled itself."""

    @property
    def external(self) -> bool:
        """True if a peer sampled the group."""
        return self.origin is not None

    @property
    def finished(self) -> tuple[Rollout, ...]:
        """The rollouts that may enter a baseline."""
        return tuple(rollout for rollout in self.rollouts if rollout.status is not RolloutStatus.FAILED)

    @property
    def usable(self) -> bool:
        """True if more than half of the rollouts finished, so that the group may be trained."""
        return 2 * len(self.finished) > len(self.rollouts)

    @property
    def oldest_version(self) -> int:
        """The Version of the group's oldest sampled token; the admitted version without sampled tokens."""
        oldest = [rollout.oldest_version for rollout in self.rollouts]
        return min((version for version in oldest if version is not None), default=self.admitted_version)


@dataclass(frozen=True, slots=True)
class Sample:
    """One token row for the trainer, with streams of one length L.

    Position i describes token i: `mask[i] == 1` says that it was sampled and is trained, `logprobs[i]` is its behaviour
    logprob, `versions[i]` the Version of the weights that sampled it, `advantages[i]` its advantage.
    Tokens with mask 0 (prompts, tool output) carry 0.0, -1 and 0.0. The first token is never trained: nothing
    precedes it that could predict it.
    """

    tokens: tuple[int, ...]  # [L]
    mask: tuple[int, ...]  # [L] 0 or 1
    logprobs: tuple[float, ...]  # [L] nats
    versions: tuple[int, ...]  # [L] -1 where mask is 0
    advantages: tuple[float, ...]  # [L]
    routing: bytes = b""
    """Experts of each token but the last, as in the row's newest completion; empty where they were not recorded."""
    kept: tuple[bytes, ...] = ()
    """Tokens that could be sampled at each place [L], as uint32; all at a place without any, and if it is empty."""

    def __post_init__(self) -> None:
        streams = [name for name in self.__slots__ if name != "routing" and (name != "kept" or self.kept)]
        lengths = {name: len(getattr(self, name)) for name in streams}
        if len(set(lengths.values())) != 1 or not self.tokens:
            raise ValueError(f"sample streams must have one length > 0, got {lengths}")
        if self.mask[0]:
            raise ValueError("the first token of a sample cannot be trained: nothing precedes it")
        if len(self.routing) % max(1, len(self.tokens) - 1):
            raise ValueError(f"sample routing: expected a multiple of L - 1 bytes, got {len(self.routing)}")
        for m, lp in zip(self.mask, self.logprobs, strict=True):
            if m and not (math.isfinite(lp) and lp <= 0):
                raise ValueError(f"sample logprobs must be finite and <= 0 where mask is 1, got {lp}")
