"""The tokens of one rollout with their numbers: the streams and texts that `shoal export` writes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.config import Config
from shoal.experience.export import Extras, streams
from shoal.experience.raw import RawGroup, RawRollout

SHADES = 9
GIVEN, TRAINED, LATE, UNUSED = "given", "trained", "masked: too old", "not trained"


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the page shows it."""

    at: int
    text: str
    fate: str
    """Whether it was given (a prompt's), trained, masked as too old, or not trained."""
    logprob: float | None
    version: int | None
    advantage: float | None
    """None where it is not known."""

    @property
    def probability(self) -> float:
        """As it was sampled with."""
        return math.exp(self.logprob or 0.0)


def tokens_of(
    group: RawGroup, position: int, rollout: RawRollout, extras: Extras, config: Config | None
) -> list[Token]:
    """All tokens of the rollout at a position of a group."""
    ids, mask, logprobs, versions = streams(rollout.turns)
    known = extras.advantages(group)
    values = None if known is None else known[position]
    advantages = iter(values or ())
    oldest = 0
    if config is not None and config.asynchrony.late == "mask_tokens" and group.version is not None:
        oldest = group.version - config.asynchrony.max_staleness
    tokens = []
    for at, (token, sampled, logprob, version) in enumerate(zip(ids, mask, logprobs, versions, strict=True)):
        text = extras.text(token) if extras.text else f"[{token}]"
        if not sampled:
            tokens.append(Token(at, text, GIVEN, None, None, None))
            continue
        fate = UNUSED if group.version is None or rollout.status == "failed" else LATE if version < oldest else TRAINED
        tokens.append(Token(at, text, fate, logprob, version, None if values is None else next(advantages, 0.0)))
    return tokens


def shades(tokens: Sequence[Token], by: str) -> list[str]:
    """A CSS class for each token: n is no number, 0 the least to 8 the most; of advantages, 4 is zero."""
    if by == "fate":
        return [{GIVEN: "n", TRAINED: "8", LATE: "0", UNUSED: "2"}[token.fate] for token in tokens]
    values = [getattr(token, by) for token in tokens]
    known = [value for value in values if value is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    if by == "advantage":
        most = max(abs(least), abs(most))
        least = -most
    elif by == "logprob":
        least, most = max(least, -8.0), 0.0  # below, one token in 3000, is all the same to the eye
    span = (most - least) or 1.0
    last = SHADES - 1
    return ["n" if v is None else str(min(last, max(0, round((v - least) / span * last)))) for v in values]
