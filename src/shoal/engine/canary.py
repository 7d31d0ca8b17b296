"""Whether an engine really serves the weights it was given: a row of tokens whose logprobs the trainer computed.

An engine of another project may take new weights without an error and still compute with some of the old ones (vLLM on
a CPU keeps the head of a model with tied embeddings). Checksums do not show it; what the engine computes does.
"""

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from shoal.errors import RequestRefused

FILE = "canary.json"


@dataclass(frozen=True, slots=True)
class Canary:
    """Lies beside the weights of a Version as `canary.json`."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L - 1] nats, of tokens 1..L-1 at temperature 1
    bound: float
    """The largest mean |difference| in nats that is rounding."""


def write(canary: Canary, directory: Path) -> None:
    """Puts the canary beside the weights."""
    (directory / FILE).write_bytes(msgspec.json.encode(canary))


def canary_of(weights: Path) -> Canary | None:
    """The canary of a weights file or its directory; None when nobody made one."""
    file = weights.with_name(FILE) if weights.suffix == ".safetensors" else weights / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Canary)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestRefused(f"{file} cannot be read: {error}") from error


def mismatch(canary: Canary, logprobs: list[float]) -> float:
    """Mean |difference| in nats between what the engine and what the trainer compute."""
    return fmean(abs(a - b) for a, b in zip(canary.logprobs, logprobs, strict=True))
