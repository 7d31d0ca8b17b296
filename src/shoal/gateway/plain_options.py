"""Options that only plain requests have: their answers are never trained on, so their logits may be changed."""

from shoal.gateway.chat import ChatRequest, TextRequest
from shoal.gateway.dialects import ModelRequest
from shoal.gateway.fields import Refusal
from shoal.gateway.plain_answers import PlainOptions
from shoal.interfaces import LogitRules


def plain_options(body: ModelRequest) -> PlainOptions:
    """Options of a request. Raises `Refusal`."""
    echo, lowest = isinstance(body, TextRequest) and bool(body.echo), 1
    if echo:
        lowest = 0
    if body.max_tokens is not None and body.max_tokens < lowest:
        raise Refusal("max_tokens", f"at least {lowest}", body.max_tokens)
    logprobs, top = False, 0
    if isinstance(body, ChatRequest):
        logprobs, top = bool(body.logprobs), body.top_logprobs or 0
    elif isinstance(body, TextRequest):
        logprobs, top = body.logprobs is not None, body.logprobs or 0
    options = body.stream_options
    return PlainOptions(
        n=body.choices,
        max_tokens=body.max_tokens,
        seed=body.seed,
        rules=_rules(body, top),
        logprobs=logprobs,
        echo=echo,
        usage=bool(options and options.include_usage),
        token_ids=bool(body.return_token_ids),
    )


def _rules(body: ModelRequest, top: int) -> LogitRules:
    """Rules of the logits. Raises `Refusal`."""
    if not isinstance(body, ChatRequest | TextRequest):
        return LogitRules()
    try:
        bias = tuple((int(token), value) for token, value in (body.logit_bias or {}).items())
    except ValueError:
        raise Refusal("logit_bias", "token ids as names", list(body.logit_bias or {})[:3]) from None
    return LogitRules(top, body.presence_penalty or 0.0, body.frequency_penalty or 0.0, bias)
