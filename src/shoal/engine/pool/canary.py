"""Canary: a token row with the trainer's logprobs, which shows whether an engine computes with its new weights.

An engine of another project may accept new weights and still compute with some old ones. For example, vLLM on a CPU
keeps the head of a model with tied embeddings. Checksums do not show this; logprobs do.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec

from shoal.errors import RequestRefused

FILE = "canary.json"


@dataclass(frozen=True, slots=True)
class Canary:
    """Token row and its logprobs, stored as `canary.json` in the folder of a Version."""

    token_ids: tuple[int, ...]  # [L]
    logprobs: tuple[float, ...]  # [L - 1] nats, of tokens 1..L-1 at temperature 1
    bound: float
    """Nats: the largest mean |difference| that rounding explains."""

    def off_nats(self, logprobs: Sequence[float]) -> str:
        """The difference of an engine's logprobs as a text; empty within the bound."""
        if len(logprobs) != len(self.logprobs):
            return f"{len(logprobs)} logprobs on the canary, expected {len(self.logprobs)}"
        off = fmean(abs(a - b) for a, b in zip(self.logprobs, logprobs, strict=True)) if logprobs else 0.0
        if off <= self.bound:
            return ""
        return f"mean |logprob difference| {off:.2e} nats on the canary, expected at most {self.bound:.0e}"


def write(canary: Canary, directory: Path) -> None:
    """Writes the canary into the folder of its Version."""
    (directory / FILE).write_bytes(msgspec.json.encode(canary))


def canary_of(weights: Path) -> Canary | None:
    """Reads the canary of a weights file or its directory; None when the file does not exist."""
    file = weights.with_name(FILE) if weights.suffix == ".safetensors" else weights / FILE
    try:
        return msgspec.json.decode(file.read_bytes(), type=Canary)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise RequestRefused(f"{file} cannot be read: {error}") from error
