"""The tokens of one rollout with their numbers: the streams of the log, and what the trainer made of each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from shoal.config import Config
from shoal.experience.export import Extras, streams
from shoal.experience.raw import RawGroup, decode_rollout
from shoal.observe.token_files import TrainedToken

SHADES = 9
MOST_LOG_RATIO = 50.0
AROUND_ZERO = {"advantage": 0.0, "gradient": 0.0, "ratio": math.log(1.1)}
"""Numbers with colours symmetric around zero; each value is the smallest range of its scale."""
GIVEN, TRAINED, LATE, UNUSED = "given", "trained", "masked: too old", "not trained"
USELESS = "no gradient: every advantage of its row is 0"
By: TypeAlias = Literal["logprob", "version", "ratio", "advantage", "entropy", "gradient", "fate"]


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the page shows it."""

    at: int
    text: str
    fate: str
    """Whether it was given (a prompt's), trained, clipped, masked, capped, or not trained."""
    logprob: float | None
    version: int | None
    advantage: float | None
    """None where it is not known."""
    ratio: float | None = None
    """pi_theta / pi_behav when it was trained."""
    entropy: float | None = None
    weight: float | None = None
    gradient: float | None = None

    @property
    def sum(self) -> str:
        """Sum that became the gradient: weight in the mean times advantage times what the loss made of the ratio.

        It is empty where the trainer's numbers are not known.
        """
        if self.gradient is None or self.weight is None or self.advantage is None:
            return ""
        way = "more likely" if self.gradient > 0 else "less likely" if self.gradient < 0 else "left alone"
        product = self.weight * self.advantage
        terms = f"gradient {self.gradient:+.3g} ({way}) = weight {self.weight:.3g} x advantage {self.advantage:.4g}"
        if product:
            return f"{terms} x {self.gradient / product:.4g} (what the loss makes of ratio {self.ratio:.4g})"
        return terms if not self.gradient else f"{terms}, and the rest is of the distance to the reference"

    @property
    def probability(self) -> float:
        """As it was sampled with."""
        return math.exp(self.logprob or 0.0)


def tokens_of(
    group: RawGroup,
    position: int,
    extras: Extras,
    config: Config | None,
    numbers: Sequence[TrainedToken | None] | None = None,
) -> list[Token]:
    """All tokens of the rollout at a position of a group. `numbers` are the trainer's, of the sampled tokens.

    Raises `WireError`.
    """
    rollout = decode_rollout(group.bodies[position])
    ids, mask, logprobs, versions = streams(rollout.turns)
    known = extras.advantages(group)
    values = None if known is None else known[position]
    advantages = iter(values or ())
    oldest = 0 if config is None or group.version is None else config.asynchrony.staleness.masked_below(group.version)
    trainer = iter(numbers or ())
    tokens = []
    for at, (token, sampled, logprob, version) in enumerate(zip(ids, mask, logprobs, versions, strict=True)):
        text = extras.text(token) if extras.text else f"[{token}]"
        if not sampled:
            tokens.append(Token(at, text, GIVEN, None, None, None))
            continue
        fate = UNUSED if group.version is None or rollout.status == "failed" else LATE if version < oldest else TRAINED
        advantage = None if values is None else next(advantages, 0.0)
        own = next(trainer, None)
        if own is None:
            tokens.append(
                Token(at, text, USELESS if numbers and fate == TRAINED else fate, logprob, version, advantage)
            )
            continue
        ratio = math.exp(min(own.logp - logprob, MOST_LOG_RATIO))
        fate = fate if fate == LATE else own.fate or TRAINED
        trained = (own.advantage, ratio, own.entropy, own.weight, own.gradient)
        tokens.append(Token(at, text, fate, logprob, version, *trained))
    return tokens


def shades(tokens: Sequence[Token], by: By) -> list[str]:
    """A CSS class for each token: n is no number, 0 the least to 8 the most.

    For advantages and gradients 4 is zero; for ratios it is 1.
    """
    if by == "fate":
        shade = {GIVEN: "n", TRAINED: "8", UNUSED: "4", USELESS: "4", "capped": "6"}
        return [shade.get(token.fate, "0") for token in tokens]
    values = [getattr(token, by) for token in tokens]
    if by == "ratio":
        values = [None if value is None else math.log(max(value, 1e-9)) for value in values]
    known = [value for value in values if value is not None]
    least, most = min(known, default=0.0), max(known, default=0.0)
    if by in AROUND_ZERO:
        most = max(abs(least), abs(most), AROUND_ZERO[by])
        least = -most
    elif by == "logprob":
        least, most = max(least, -8.0), 0.0  # e^-8, one in 3000: lower probabilities share one shade
    span = (most - least) or 1.0
    last = SHADES - 1
    return ["n" if v is None else str(min(last, max(0, round((v - least) / span * last)))) for v in values]
