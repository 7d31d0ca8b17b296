"""Finished and unfinished requests as the bodies of answers."""

from collections.abc import Sequence
from itertools import pairwise

from shoal.engine import protocol
from shoal.engine.request import Draft, Request
from shoal.engine.token_stream import Part


def drawn_spans(draft: Draft, start: int, end: int, version: int) -> list[protocol.VersionSpan]:
    """Which Version drew the tokens `start : end`, and on what KV; `version` drew those that no closed span holds."""
    spans = []
    first = 0
    for drew, last in [*draft.spans, (version, end)]:
        low, high = max(first, start), min(last, end)
        inner = {since for since, _ in draft.kv_versions if low < since < high}
        borders = [low, *sorted(inner), high] if low < high else []
        spans += [protocol.VersionSpan(drew, *span, draft.kv_version(span[0])) for span in pairwise(borders)]
        first = max(first, last)
    return spans


def whole_choice(draft: Draft, *, flat: bool) -> protocol.Choice:
    """A completion that has ended."""
    assert draft.finish_reason is not None
    end = len(draft.drawn)
    return protocol.Choice(
        index=draft.index,
        token_ids=draft.drawn,
        finish_reason=draft.finish_reason,
        weight_versions=drawn_spans(draft, 0, end, 0),
        logprobs=None if flat else _logprobs(draft, 0, end),
        token_logprobs=draft.logprobs if flat else None,
        token_log_kept=draft.log_kept if draft.truncates else None,
    )


def choice_part(part: Part, *, flat: bool) -> protocol.ChoicePart:
    """What a part adds."""
    draft, start, end = part.draft, part.start, part.end
    return protocol.ChoicePart(
        index=draft.index,
        token_ids=draft.drawn[start:end],
        finish_reason=part.reason,
        weight_versions=drawn_spans(draft, start, end, part.version),
        logprobs=None if flat else _logprobs(draft, start, end),
        token_logprobs=draft.logprobs[start:end] if flat else None,
        token_log_kept=draft.log_kept[start:end] if draft.truncates else None,
    )


def usage(requests: Sequence[Request]) -> protocol.Usage:
    """Tokens of the prompts, each once, and of all completions."""
    prompt = sum(len(request.prompt_ids) for request in requests)
    drawn = sum(len(draft.drawn) for request in requests for draft in request.drafts)
    return protocol.Usage(prompt, drawn, prompt + drawn)


def prompt_logprobs(request: Request) -> list[list[protocol.LikelyToken] | None] | None:
    """What the scores of the prompt are, if they were asked for."""
    if request.score_alternatives is None:
        return None
    draft = request.drafts[0]
    others = draft.score_others or [[]] * len(draft.scores)
    rows = zip(draft.targets, draft.scores, others, strict=False)
    return [None, *([likely(token, logp), *_likely(tops)] for token, logp, tops in rows)]


def likely(token: int, logprob: float) -> protocol.LikelyToken:
    """One token that may be drawn."""
    return protocol.LikelyToken(f"token_id:{token}", token, logprob)


def _likely(pairs: Sequence[tuple[int, float]]) -> list[protocol.LikelyToken]:
    return [likely(token, logprob) for token, logprob in pairs]


def _logprobs(draft: Draft, start: int, end: int) -> protocol.Logprobs:
    others = draft.others[start:end] if draft.others else [None] * (end - start)
    rows = zip(draft.drawn[start:end], draft.logprobs[start:end], others, strict=True)
    return protocol.Logprobs([_logprob(*row) for row in rows])


def _logprob(token: int, logprob: float, others: Sequence[tuple[int, float]] | None) -> protocol.TokenLogprob:
    tops = None if others is None else _likely(others)
    return protocol.TokenLogprob(f"token_id:{token}", token, logprob, tops)


def response(body: protocol.GenerateRequest, request: Request) -> protocol.GenerateResponse:
    """The answer to a generate request that has ended."""
    flat = body.logprobs_format == "flat"
    return protocol.GenerateResponse(
        request_id=body.request_id,
        choices=[whole_choice(draft, flat=flat) for draft in request.drafts],
        usage=usage([request]),
        prompt_token_ids=None if flat else body.token_ids,
        prompt_logprobs=prompt_logprobs(request),
    )
