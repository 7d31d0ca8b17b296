"""Limits of the local engine, and its modes at pauses and updates."""

from dataclasses import dataclass
from enum import StrEnum


class OnUpdate(StrEnum):
    """Modes of a weight update: the fate of the running sequences."""

    RECOMPUTE = "recompute"
    """Running sequences drop their KV and compute it again under the new weights."""
    KEEP = "keep"
    """Running sequences continue with the KV of the old weights and count as stale."""
    DRAIN = "drain"
    """Running sequences finish under the old weights first; no other is admitted meanwhile."""


class PauseMode(StrEnum):
    """Modes of a pause: the fate of the requests."""

    ABORT = "abort"
    """Running requests end now with their sampled tokens; new requests are refused."""
    WAIT = "wait"
    """Running requests finish; new requests are refused."""
    KEEP = "keep"
    """Running requests stand still; new requests are queued."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of the engine's work."""

    max_model_len: int
    """Tokens of one sequence, prompt and answer together."""
    max_running: int = 128
    """Sequences that decode at once."""
    max_waiting: int = 8192
    """Sequences queued."""
    chunk_tokens: int = 1024
    """Prompt tokens per step, in addition to one token of each decoding sequence."""
    kv_tokens: int | None = None
    """Tokens of KV storage. None: room for `max_running` sequences of full length, and the same again for slots that
    are allocated but unused."""
    max_adapters: int = 64
    """Adapters that are loaded by name at once."""
    prefix_cache_bytes: int = 256 * 2**20
    """Bytes of KV kept of ended sequences, for later sequences with the same beginning; 0 keeps none."""
