"""Rules of the logits: penalties, biases and the most likely tokens in plain requests, and grammars everywhere.

A row with rules that is not trained reports the logprobs of the model itself, at temperature 1 and before any rule,
as vLLM does. Its token is sampled from the logits that the rules leave. A trained row has a grammar alone, and reports
the logprobs after its mask.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from shoal.errors import RequestRefused
from shoal.interfaces import LogitRules
from shoal.model.token_bytes import TokenBytes

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MOST_TOP = 20
"""Most likely tokens that a client may ask for, as with OpenAI."""
MOST_BIASES = 1024
LEAST_SHARE = 0.5
"""Share of the model's probability that a grammar must leave, lest its token count as forced.

The behaviour's logprob is exact for every share. Below one half most losses would clip the ratio of trained and sampled
probability, and the trainer's comparison with the engine would see the mask.
"""
TOKENIZERS_KEPT = 4
MOST_GRAMMAR = 1 << 15
"""Characters of a grammar: twice as many take 17 s to compile, and then 1.7 s of every other answer."""
STACK_BYTES = 1 << 28
"""Stack for a grammar of that length; memory that is not used is not taken."""
FIELDS = "response_format, tool_choice"
"""Names of the fields that make a grammar."""
Top: TypeAlias = tuple[tuple[int, float], ...]
"""Most likely tokens and their logprobs, most likely first."""


class RuledLogits:
    """Rules of one answer, with its tokens so far."""

    def __init__(self, rules: LogitRules, matcher: "LLMatcher | None" = None, *, is_trained: bool = False) -> None:
        self.top = rules.top
        self.is_trained = is_trained
        self.share = 1.0
        """Share of the model's probability that the grammar left for the newest token."""
        self._rules = rules
        self._matcher = matcher
        self._counted: Counter[int] = Counter()
        self.failed = ""
        """Reason why the grammar failed; empty while it works."""
        self._changes = bool(rules.bias or rules.presence_penalty or rules.frequency_penalty or matcher)

    def copy(self) -> "RuledLogits":
        """Copies the rules for another answer, which has no token yet."""
        matcher = self._matcher.deep_copy() if self._matcher is not None else None
        return RuledLogits(self._rules, matcher, is_trained=self.is_trained)

    def note(self, token: int) -> None:
        """Adds a sampled token to the answer."""
        self._counted[token] += 1
        if self._matcher is not None and not self._matcher.consume_token(token):
            self.failed = self._matcher.get_error() or "the grammar does not know the token"

    def changed(self, logits_V: Tensor, temperature: float) -> Tensor:
        """Logits after the rules, [V]; float32. `temperature` is the sampling's."""
        if not self._changes:
            return logits_V
        left_V = logits_V.float().clone()
        rules = self._rules
        if rules.bias:
            _add(left_V, dict(rules.bias))
        if self._counted and (rules.presence_penalty or rules.frequency_penalty):
            weights = self._counted.items()
            _add(left_V, {token: -rules.presence_penalty - rules.frequency_penalty * n for token, n in weights})
        if self._matcher is not None:
            allowed_V = _allowed(self._matcher, left_V)
            self.share = float((left_V / (temperature or 1.0)).softmax(-1)[allowed_V].sum())
            left_V.masked_fill_(~allowed_V, -torch.inf)
        return left_V


def _add(logits_V: Tensor, values: dict[int, float]) -> None:
    tokens = torch.tensor(list(values), device=logits_V.device)
    logits_V.index_add_(0, tokens, torch.tensor(list(values.values()), device=logits_V.device))


def _allowed(matcher: "LLMatcher", logits_V: Tensor) -> Tensor:
    """Tokens [V] that may follow; all of them when the grammar has given up, which `note` then finds."""
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
    allowed_V = torch.zeros(len(logits_V), dtype=torch.bool)
    allowed_V[: len(bits)] = torch.from_numpy(bits[: len(logits_V)].astype(bool))
    if not bool(allowed_V.any()):
        allowed_V[:] = True
    return allowed_V.to(logits_V.device)


def reported(logits_NV: Tensor, tokens: Sequence[int], top: int) -> tuple[list[float], list[Top]]:
    """Logprobs (nats, temperature 1) of N tokens, and the `top` most likely tokens of each row."""
    logits_NV = logits_NV.float()
    logp_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
    logp_N = logp_NV.gather(-1, torch.tensor(tokens, device=logp_NV.device)[:, None])[:, 0]
    best_NC, id_NC = logp_NV.topk(min(top, logp_NV.shape[-1]), dim=-1)
    rows = zip(id_NC.tolist(), best_NC.clamp_(max=0.0).tolist(), strict=True)
    return logp_N.clamp_(max=0.0).tolist(), [tuple(zip(ids, best, strict=True)) for ids, best in rows]


def check_rules(rules: LogitRules, vocabulary: int) -> None:
    """Raises `RequestRefused` for rules out of range."""
    if not 0 <= rules.top <= MOST_TOP:
        raise RequestRefused(f"top_logprobs: expected 0 to {MOST_TOP}, got {rules.top}")
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := getattr(rules, name)) <= 2:
            raise RequestRefused(f"{name}: expected a number from -2 to 2, got {value}")
    if len(rules.bias) > MOST_BIASES:
        raise RequestRefused(f"logit_bias: expected at most {MOST_BIASES} tokens, got {len(rules.bias)}")
    for token, value in rules.bias:
        if not 0 <= token < vocabulary or not -100 <= value <= 100:
            raise RequestRefused(
                f"logit_bias: expected tokens from 0 to {vocabulary - 1} with numbers from -100 to 100, "
                f"got {token}: {value}"
            )


def compiling_thread() -> ThreadPoolExecutor:
    """Thread that compiles grammars. Their parts refer to each other, and llguidance descends by recursion.

    On the usual stack of 8 MiB, a chain of 700 parts ended the process.
    """
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        executor.submit(int)  # starts the thread
    finally:
        threading.stack_size(usual)
    return executor


class Grammars:
    """Grammars over the tokens of one model."""

    def __init__(self, model_dir: Path, vocabulary: int) -> None:
        self._file = model_dir / "tokenizer.json"
        self._vocabulary = vocabulary
        self._tokenizer: Callable[[tuple[int, ...]], LLTokenizer] = lru_cache(TOKENIZERS_KEPT)(self._read)

    def matcher(self, grammar: str, stop_token_ids: Sequence[int], begun: Sequence[int] = ()) -> "LLMatcher":
        """Matcher of answers that satisfy a grammar and end in a stop token, after their first tokens `begun`.

        The first takes up to a second; call it in a `compiling_thread`. Raises `RequestRefused` for a grammar that
        cannot be served, and without the library or a tokenizer.
        """
        if len(grammar) > MOST_GRAMMAR:
            raise RequestRefused(f"{FIELDS}: expected schemas of at most {MOST_GRAMMAR} characters, got {len(grammar)}")
        try:
            from llguidance import LLMatcher
        except ModuleNotFoundError as error:
            raise RequestRefused(
                f"{FIELDS}: expected the package llguidance, which is not installed; "
                "pip install 'shoal[serve]' brings it"
            ) from error
        if not self._file.is_file() or not stop_token_ids:
            raise RequestRefused(f"{FIELDS}: expected a model with a tokenizer.json and an end token")
        parsed = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._tokenizer(tuple(stop_token_ids)), parsed, log_level=0)
        if begun and not matcher.is_error():
            matcher.consume_tokens(list(begun))
        if matcher.is_error():
            raise RequestRefused(f"{FIELDS}: {matcher.get_error().strip().splitlines()[0]}")
        return matcher

    def _read(self, stop_token_ids: tuple[int, ...]) -> "LLTokenizer":
        from llguidance import LLTokenizer, TokenizerWrapper

        tokens = _Tokens(Tokenizer.from_file(str(self._file)), self._vocabulary, stop_token_ids[0])
        return LLTokenizer(TokenizerWrapper(tokens), n_vocab=self._vocabulary, eos_token=list(stop_token_ids))


class _Tokens:
    """Vocabulary in llguidance's form, for every kind of tokenizer: it reads few kinds by itself."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos_token_id: int) -> None:
        spelt = TokenBytes(tokenizer)
        self.eos_token_id = eos_token_id
        self.tokens = [spelt(token) for token in range(vocabulary)]
        self.special_token_ids = [token for token in spelt.special if token < vocabulary]
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids
