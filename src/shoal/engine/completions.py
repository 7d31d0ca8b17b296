"""`POST /v1/completions` in OpenAI's shape: text or token ids in, text and token ids out."""

import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from shoal.engine import protocol
from shoal.engine.answers import drawn_spans, usage
from shoal.engine.request import Draft, Request
from shoal.engine.watch import Part
from shoal.errors import RequestRefused
from shoal.types import FinishReason, Sampling


class Tokenizer(Protocol):
    """The part of transformers' tokenizers that is needed here."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str: ...


class StreamOptions(msgspec.Struct):
    """Options of a streamed completion."""

    include_usage: bool = False


class CompletionRequest(msgspec.Struct, forbid_unknown_fields=True):
    """What OpenAI's clients send, and vLLM's additions to it. Penalties, biases and suffixes are not supported."""

    prompt: str | list[int | str | list[int]]
    model: str = ""
    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = 0
    return_token_ids: bool = False
    user: str = ""
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    suffix: None = None
    logit_bias: None = None

    @property
    def stops(self) -> list[str]:
        """Texts that end a completion."""
        return [self.stop] if isinstance(self.stop, str) else [stop for stop in self.stop or () if stop]


class TextLogprobs(msgspec.Struct):
    """Parallel lists over the tokens; the first of an echoed prompt has no logprob."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(msgspec.Struct):
    """One completion, or a part of one."""

    index: int
    text: str
    finish_reason: str | None
    logprobs: TextLogprobs | None
    weight_versions: list[protocol.VersionSpan]
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class CompletionResponse(msgspec.Struct):
    """The answer, or one event of a stream."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    usage: protocol.Usage | None = None
    object: str = "text_completion"


def requests_of(body: CompletionRequest, tokenizer: Tokenizer | None, longest: int) -> list[Request]:
    """One request per prompt. Raises `RequestRefused`."""
    if body.best_of not in (None, body.n):
        raise RequestRefused(f"best_of: expected n = {body.n} or nothing, got {body.best_of}")
    if body.presence_penalty or body.frequency_penalty:
        raise RequestRefused("presence_penalty, frequency_penalty: expected 0, others are not supported")
    if body.stream and body.echo:
        raise RequestRefused("echo: expected false with stream")
    if tokenizer is None:
        raise RequestRefused("this model's directory has no tokenizer: use /inference/v1/generate with token ids")
    stops = list(body.stop_token_ids or ())
    if tokenizer.eos_token_id is not None and not body.ignore_eos:
        stops.append(tokenizer.eos_token_id)
    try:
        sampling = Sampling(
            max_tokens=longest if body.max_tokens is None else body.max_tokens,
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=max(body.top_k, 0),
            min_p=body.min_p,
            stop_token_ids=tuple(stops),
            seed=body.seed,
        )
    except ValueError as error:
        raise RequestRefused(str(error)) from error
    return [
        Request(
            prompt_ids,
            sampling,
            n=body.n,
            priority=body.priority,
            alternatives=body.logprobs or 0,
            score_alternatives=body.logprobs if body.echo else None,
        )
        for prompt_ids in _prompts(body.prompt, tokenizer)
    ]


def _prompts(prompt: str | list[int | str | list[int]], tokenizer: Tokenizer) -> list[list[int]]:
    """Token ids of one prompt (text, or a list of ids) or of several (a list of texts, or of lists of ids)."""
    if isinstance(prompt, str):
        return [tokenizer.encode(prompt)]
    if not prompt:
        raise RequestRefused("prompt: expected text or token ids, got an empty list")
    if len({type(part) for part in prompt}) > 1:
        raise RequestRefused("prompt: expected a list of token ids, of texts or of lists of ids, got a mixture")
    ids = [part for part in prompt if isinstance(part, int)]
    if ids:
        return [ids]
    return [tokenizer.encode(part) if isinstance(part, str) else part for part in prompt if not isinstance(part, int)]


class Text:
    """The text of one completion as it grows. Ends at a stop text, which is left out."""

    def __init__(self, draft: Draft, index: int, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.ended = False
        self._draft = draft
        self._body = body
        self._tokenizer = tokenizer
        self._told = 0  # characters
        self._tokens_told = 0
        self._held = max((len(stop) for stop in body.stops), default=1) - 1  # might begin a stop text

    def grown(self, part: Part) -> TextChoice | None:
        """What there is to tell after a part; None when that is nothing. `ended` is set with the last."""
        end, reason = part.end, part.reason
        text = self._decoded(end)
        cut = min((at for stop in self._body.stops if (at := text.find(stop)) >= 0), default=None)
        if cut is not None:
            text, reason = text[:cut], FinishReason.STOP
        self.ended = reason is not None
        if not self.ended:
            text = text[: len(text) - self._held].rstrip("\ufffd")  # a character may lack its last bytes
        start, told = self._tokens_told, self._told
        if not self.ended and len(text) <= told:
            return None
        self._tokens_told, self._told = end, max(told, len(text))
        return TextChoice(
            index=self.index,
            text=text[told:],
            finish_reason=reason,
            logprobs=self._logprobs(start, end) if self._body.logprobs is not None else None,
            weight_versions=drawn_spans(self._draft, start, end, part.version),
            token_ids=self._draft.drawn[start:end] if self._body.return_token_ids else None,
        )

    def _decoded(self, end: int) -> str:
        return self._tokenizer.decode(self._draft.drawn[:end], skip_special_tokens=True)

    def _logprobs(self, start: int, end: int) -> TextLogprobs:
        draft = self._draft
        others = draft.others[start:end] or [[]] * (end - start)
        offset = len(self._tokenizer.decode(draft.drawn[:start]))
        rows = list(zip(draft.drawn[start:end], draft.logprobs[start:end], others, strict=True))
        return text_logprobs([(token, logp, tops) for token, logp, tops in rows], self._tokenizer, offset)


def text_logprobs(
    rows: Sequence[tuple[int, float | None, Sequence[tuple[int, float]]]], tokenizer: Tokenizer, offset: int
) -> TextLogprobs:
    """Tokens with their logprobs and the most likely ones, as text that begins at a character offset."""
    result = TextLogprobs([], [], [], [])
    for token, logp, tops in rows:
        text = tokenizer.decode([token])
        result.tokens.append(text)
        result.token_logprobs.append(logp)
        result.top_logprobs.append(None if logp is None else {tokenizer.decode([id_]): lp for id_, lp in tops})
        result.text_offset.append(offset)
        offset += len(text)
    return result


def texts(requests: Sequence[Request], body: CompletionRequest, tokenizer: Tokenizer) -> dict[Draft, Text]:
    """The completions of submitted requests, numbered through."""
    drafts = [draft for request in requests for draft in request.drafts]
    return {draft: Text(draft, index, body, tokenizer) for index, draft in enumerate(drafts)}


def whole_choices(
    told: Sequence[Sequence[TextChoice]], body: CompletionRequest, requests: Sequence[Request], tokenizer: Tokenizer
) -> list[TextChoice]:
    """The parts of each completion as one."""
    choices = []
    for index, parts in enumerate(told):
        request = requests[index // body.n]
        joined = _joined(parts)
        joined.prompt_token_ids = list(request.prompt_ids) if body.return_token_ids else None
        choices.append(_echoed(joined, request, tokenizer) if body.echo else joined)
    return choices


def _joined(parts: Sequence[TextChoice]) -> TextChoice:
    whole = parts[0]
    for part in parts[1:]:
        whole.text += part.text
        whole.finish_reason = part.finish_reason
        for span in part.weight_versions:
            last = whole.weight_versions[-1] if whole.weight_versions else None
            if last is not None and last.version == span.version:
                last.end = span.end
            else:
                whole.weight_versions.append(span)
        if whole.token_ids is not None:
            whole.token_ids += part.token_ids or []
        if whole.logprobs is not None and part.logprobs is not None:
            whole.logprobs.tokens += part.logprobs.tokens
            whole.logprobs.token_logprobs += part.logprobs.token_logprobs
            whole.logprobs.top_logprobs += part.logprobs.top_logprobs
            whole.logprobs.text_offset += part.logprobs.text_offset
    return whole


def _echoed(choice: TextChoice, request: Request, tokenizer: Tokenizer) -> TextChoice:
    """A whole completion with its prompt, and the prompt's logprobs, before it."""
    prompt = tokenizer.decode(request.prompt_ids)
    if choice.logprobs is not None:
        draft = request.drafts[0]
        others = draft.score_others or [[]] * len(draft.scores)
        rows = [(request.prompt_ids[0], None, []), *zip(draft.targets, draft.scores, others, strict=False)]
        before = text_logprobs(rows, tokenizer, 0)
        choice.logprobs.tokens[:0] = before.tokens
        choice.logprobs.token_logprobs[:0] = before.token_logprobs
        choice.logprobs.top_logprobs[:0] = before.top_logprobs
        choice.logprobs.text_offset[:] = before.text_offset + [at + len(prompt) for at in choice.logprobs.text_offset]
    choice.text = prompt + choice.text
    return choice


def answer(
    body: CompletionRequest, name: str, choices: list[TextChoice], requests: Sequence[Request] | None
) -> CompletionResponse:
    """The whole answer, or an event; with usage where `requests` are given."""
    tokens = None if requests is None else usage(requests)
    return CompletionResponse(name, int(time.time()), body.model, choices, tokens)
