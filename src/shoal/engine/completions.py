"""`POST /v1/completions` in OpenAI's shape: text or token ids in, text and token ids out."""

import time
from collections.abc import Sequence

import msgspec

from shoal.engine import protocol
from shoal.engine.detokenizer import Detokenizer, Tokenizer
from shoal.engine.request import Draft, Request
from shoal.engine.response_bodies import drawn_spans, usage
from shoal.engine.token_stream import Part
from shoal.errors import RequestRefused
from shoal.types import FinishReason, Sampling


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
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in given if stop]


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
    """The text of one completion as it grows. Ends at a stop text, which is left out.

    Of several stop texts it is the one that is complete first, and of those the one that begins first: the same one in
    whatever pieces the text comes. What might still begin one is held back.
    """

    def __init__(self, draft: Draft, index: int, body: CompletionRequest, tokenizer: Tokenizer) -> None:
        self.index = index
        self.ended = False
        self._draft = draft
        self._body = body
        self._tokenizer = tokenizer
        self._stops = body.stops
        self._detokenizer = Detokenizer(tokenizer, draft.drawn)
        self._tokens_read = self._tokens_told = 0
        self._characters = 0  # of the tokens read
        self._offsets: list[int] = []  # where logprobs are asked for: how many characters come before each token
        self._cleared: list[str] = []  # pieces that no stop text can begin in, to be told
        self._held = ""
        self._most_held = max(map(len, self._stops), default=1) - 1

    def grown(self, part: Part) -> TextChoice | None:
        """What there is to tell after a part; None when that is nothing. `ended` is set with the last.

        All is told at once at the end unless it is streamed.
        """
        if part.reason is None and not (self._body.stream or self._stops):
            return None
        reason = FinishReason.STOP if self._read(part) else part.reason
        self.ended = reason is not None
        if not self.ended and not (self._body.stream and self._cleared):
            return None
        text, start, end = "".join(self._cleared), self._tokens_told, self._tokens_read
        self._cleared, self._tokens_told = [], end
        return TextChoice(
            index=self.index,
            text=text,
            finish_reason=reason,
            logprobs=self._logprobs(start, end) if self._body.logprobs is not None else None,
            weight_versions=drawn_spans(self._draft, start, end, part.version),
            token_ids=self._draft.drawn[start:end] if self._body.return_token_ids else None,
        )

    def _read(self, part: Part) -> bool:
        """Takes in the text of a part; whether a stop text ends it, after whose last token none is read."""
        each = bool(self._stops) or self._body.logprobs is not None
        ends = range(self._tokens_read + 1, part.end + 1)
        if not each:  # one piece, and at the end the rest alone
            ends = ends[-1:] if part.reason is None else ends[:0]
        for end in ends:
            self._tokens_read = end
            self._offsets.append(self._characters)
            piece = self._detokenizer.more(end)
            self._characters += len(piece)
            if self._stopped(piece, self._most_held):
                return True
        self._tokens_read = part.end
        return part.reason is not None and self._stopped(self._detokenizer.rest(part.end), 0)

    def _stopped(self, piece: str, most_held: int) -> bool:
        """Clears all text but the last characters, or all before a stop text; whether there is one."""
        self._held += piece
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        cut = min(found)[1] if found else max(len(self._held) - most_held, 0)
        if cut:
            self._cleared.append(self._held[:cut])
        self._held = self._held[cut:]
        return bool(found)

    def _logprobs(self, start: int, end: int) -> TextLogprobs:
        draft = self._draft
        others = draft.others[start:end] or [[]] * (end - start)
        rows = list(zip(draft.drawn[start:end], draft.logprobs[start:end], others, strict=True))
        result = text_logprobs([(token, logp, tops) for token, logp, tops in rows], self._tokenizer)
        result.text_offset = self._offsets[start:end]
        return result


def text_logprobs(
    rows: Sequence[tuple[int, float | None, Sequence[tuple[int, float]]]], tokenizer: Tokenizer
) -> TextLogprobs:
    """Tokens with their logprobs and the most likely ones, each as text of its own."""
    result = TextLogprobs([], [], [], [])
    offset = 0
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
    told: Sequence[TextChoice], body: CompletionRequest, requests: Sequence[Request], tokenizer: Tokenizer
) -> list[TextChoice]:
    """Completions that were told at once, in order, with what is asked for of their prompts."""
    choices = []
    for choice in told:
        request = requests[choice.index // body.n]
        choice.prompt_token_ids = list(request.prompt_ids) if body.return_token_ids else None
        choices.append(_echoed(choice, request, tokenizer) if body.echo else choice)
    return choices


def _echoed(choice: TextChoice, request: Request, tokenizer: Tokenizer) -> TextChoice:
    """A whole completion with its prompt, and the prompt's logprobs, before it."""
    prompt = tokenizer.decode(request.prompt_ids)
    if choice.logprobs is not None:
        draft = request.drafts[0]
        others = draft.score_others or [[]] * len(draft.scores)
        rows = [(request.prompt_ids[0], None, []), *zip(draft.targets, draft.scores, others, strict=False)]
        before = text_logprobs(rows, tokenizer)
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
