"""Check of the answers of engines: whole, before anything of them is kept.

An engine may run on another host, with other software. An answer that is wrong in any field counts as a failure of that
engine (`WrongAnswer`), and another engine is asked.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shoal.errors import WrongAnswer
from shoal.interfaces import EngineInfo
from shoal.types import Completion, FinishReason, Sampling

MOST_INTEGER = 2**63 - 1
"""The largest integer that the log and the metrics hold."""
LOWEST_LOGPROB = -3.4e38
"""Lower bound of float32, in which engines and trainers compute logprobs."""
MOST_TOKENS = 2**31 - 1
"""Vocabulary of a model that does not report its size."""
KEPT_BYTES = 4
MOST_TIED = 16
"""Tokens beyond `top_k` that may be sampled because they are as likely as the last of the `top_k`: vLLM on a CPU."""
ROOM_LEFT = 8
"""Tokens of its context that an engine may leave unused where it ends an answer."""


@dataclass(slots=True)
class AnswerRules:
    """Rules of a run for the answers of all its engines."""

    vocab_size: int = MOST_TOKENS
    routing: bool = True
    """Whether answers may carry the experts of their tokens."""
    kept: bool = False
    """Whether answers must have the tokens that could be sampled, where these are few."""
    newest: int = MOST_INTEGER
    """Newest Version that may sample a token."""
    experts: tuple[int, ...] = ()
    """Number of experts of each router, in order; empty where it is unknown."""
    chosen: int | None = None
    """Experts that a router chooses for a token; None where it is unknown."""


@dataclass(frozen=True, slots=True)
class AskedTokens:
    """A request as its answer is checked against it."""

    prompt_len: int
    sampling: Sampling
    n: int
    oldest: int
    """Oldest Version that may sample a token."""
    max_model_len: int
    foreign: bool = False
    """`EngineInfo.foreign`: its own end tokens stop answers too, and its memory may be smaller than its context."""


def check_completions(answer: Sequence[Completion], asked: AskedTokens, rules: AnswerRules) -> None:
    """Raises `WrongAnswer`, which names the field, the expected and the received value."""
    if len(answer) != asked.n:
        raise _wrong("choices", f"{asked.n} completions", len(answer))
    for one in answer:
        _check_tokens(one, asked, rules)
        _check_end(one, asked)
        if one.routing and not rules.routing:
            raise _wrong("routing", "none, the run replays no routing", f"{len(one.routing)} bytes")
        if one.routing:
            _check_routing(one.routing, asked.prompt_len + len(one.token_ids) - 1, rules)
        if rules.kept or one.kept:
            _check_kept(one, asked.sampling, rules)


def _check_tokens(one: Completion, asked: AskedTokens, rules: AnswerRules) -> None:
    outside = [token for token in one.token_ids if not 0 <= token < rules.vocab_size]
    if outside:
        raise _wrong("token_ids", f"numbers from 0 to {rules.vocab_size - 1}", outside[0])
    unknown = [version for version in one.versions if not asked.oldest <= version <= rules.newest]
    if unknown:
        raise _wrong("weight_versions", f"Versions from {asked.oldest} to {rules.newest}", unknown[0])
    if min(one.logprobs, default=0.0) < LOWEST_LOGPROB:
        raise _wrong("logprobs", f"at least {LOWEST_LOGPROB:g} nats", min(one.logprobs))


def _check_routing(routing: bytes, positions: int, rules: AnswerRules) -> None:
    """Checks the experts of each token but the last: the trainer would use others, or have none to use."""
    stored = np.min_scalar_type(max(rules.experts, default=1))
    each = max(1, len(rules.experts)) * (rules.chosen or 1) * stored.itemsize
    width = len(routing) / max(1, positions)
    if positions < 1 or width % each or (width != each and rules.chosen and rules.experts):
        raise _wrong("routing", f"{each} bytes for each of {positions} tokens", len(routing))
    if rules.experts:
        numbers_TRk = np.frombuffer(routing, stored).reshape(positions, len(rules.experts), -1)
        is_outside_TRk = numbers_TRk >= np.array(rules.experts)[:, None]
        if (outside := numbers_TRk[is_outside_TRk & (numbers_TRk != np.iinfo(stored).max)]).size:
            raise _wrong("routing", f"experts below {max(rules.experts)}", outside[0])


def _check_kept(one: Completion, sampling: Sampling, rules: AnswerRules) -> None:
    """Checks the tokens that could be sampled: with other ones, training would have other probabilities."""
    places = len(one.token_ids) if sampling.records_kept else 0
    if len(one.kept) != places:
        raise _wrong("kept", f"the tokens that could be sampled at {places} places", len(one.kept))
    for token, kept in zip(one.token_ids, one.kept, strict=False):
        most = sampling.top_k + MOST_TIED
        if len(kept) % KEPT_BYTES or not KEPT_BYTES <= len(kept) <= KEPT_BYTES * most:
            raise _wrong("kept", f"1 to {most} numbers of {KEPT_BYTES} bytes", f"{len(kept)} bytes")
        ids = set(array("I", kept))
        if token not in ids or len(ids) < len(kept) // KEPT_BYTES or max(ids) >= rules.vocab_size:
            raise _wrong("kept", f"different tokens below {rules.vocab_size} with {token} among them", sorted(ids)[:8])


def _check_end(one: Completion, asked: AskedTokens) -> None:
    count, stops = len(one.token_ids), asked.sampling.stop_token_ids
    if count > asked.sampling.max_tokens:
        raise _wrong("token_ids", f"at most {asked.sampling.max_tokens} tokens", count)
    stopped = [index for index, token in enumerate(one.token_ids) if token in stops]
    match one.finish_reason:
        case FinishReason.STOP if stopped != [count - 1] and (stopped or not count or not asked.foreign):
            raise _wrong("finish_reason", "stop only at the first stop token", f"stop after {count} tokens")
        case FinishReason.LENGTH if stopped:
            raise _wrong("finish_reason", "stop at a stop token", f"{count - 1 - stopped[0]} tokens more")
        case FinishReason.LENGTH:
            room = asked.max_model_len - asked.prompt_len - ROOM_LEFT
            if count < (1 if asked.foreign else min(asked.sampling.max_tokens, max(room, 1))):
                raise _wrong("finish_reason", "length only where the tokens or the context end", f"{count} tokens")
        case FinishReason.ABORT if stopped:
            raise _wrong("finish_reason", "stop at a stop token", "abort")


def check_scores(logprobs: Sequence[float], tokens: int) -> None:
    """Checks the logprobs of a row of tokens. Raises `WrongAnswer`."""
    if len(logprobs) != tokens - 1:
        raise _wrong("logprobs", f"{tokens - 1} numbers", len(logprobs))
    outside = [one for one in logprobs if not (math.isfinite(one) and one <= 0)]
    if outside:
        raise _wrong("logprobs", "finite numbers <= 0", outside[0])


def check_info(info: EngineInfo, newest: int = MOST_INTEGER) -> None:
    """Checks the figures that an engine reports of itself; `newest` bounds its Version. Raises `WrongAnswer`."""
    names = ("tokens_drawn", "tokens_prefilled", "interruptions", "running", "waiting")
    least = dict.fromkeys(names, 0) | {"version": -1, "max_model_len": 1}
    for name, lowest in least.items():
        if not lowest <= getattr(info, name) <= MOST_INTEGER:
            raise _wrong(name, f"an integer from {lowest} to {MOST_INTEGER}", getattr(info, name))
    if info.version > newest:
        raise _wrong("version", f"at most {newest}", info.version)
    if not 0 <= info.busy_share <= 1:
        raise _wrong("busy_share", "a number from 0 to 1", info.busy_share)


def _wrong(field: str, expected: str, came: object) -> WrongAnswer:
    return WrongAnswer(f"{field}: expected {expected}, got {came}")
