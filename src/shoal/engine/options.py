"""What a local engine may take on, what it does at pauses and updates, and what it counts."""

from dataclasses import dataclass
from enum import StrEnum


class OnUpdate(StrEnum):
    """What running sequences do when new weights come."""

    RECOMPUTE = "recompute"
    """Their KV is dropped and computed again under the new weights."""
    KEEP = "keep"
    """They go on with the KV of the old weights; counted as stale."""
    DRAIN = "drain"
    """They finish under the old weights first; nothing is admitted meanwhile."""


class PauseMode(StrEnum):
    """What happens to requests while the engine is paused."""

    ABORT = "abort"
    """Those it has end now with what was drawn; new ones are refused."""
    WAIT = "wait"
    """Those it has finish; new ones are refused."""
    KEEP = "keep"
    """Those it has stand still; new ones are queued."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """How much the engine takes on."""

    max_model_len: int
    """Tokens of one sequence, prompt and answer together."""
    max_running: int = 128
    """Sequences decoded at once."""
    max_waiting: int = 8192
    """Sequences queued."""
    chunk_tokens: int = 1024
    """Known tokens prefilled per step, beside one token of each decoding sequence."""
    kv_tokens: int | None = None
    """Tokens of KV storage. None: room for `max_running` sequences of full length, and as much again for slots that
    are allocated and not in use."""
    prefix_cache_bytes: int = 256 * 2**20
    """KV of ended sequences that is kept for those that begin alike; 0 keeps none."""

    @property
    def room_tokens(self) -> int:
        """What `max_running` sequences of full length are."""
        return self.max_running * self.max_model_len

    @property
    def storage_tokens(self) -> int:
        """The most tokens that slots are allocated for."""
        return self.kv_tokens or 2 * self.room_tokens


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Numbers of an engine: since it started, but for version, running and waiting, which are now."""

    version: int
    tokens_drawn: int
    tokens_prefilled: int
    interruptions: int
    preemptions: int
    stale_sequences: int
    stale_tokens: int
    prefix_tokens_reused: int
    prefix_cache_bytes: int
    busy_s: float
    load_s: float
    running: int
    waiting: int
