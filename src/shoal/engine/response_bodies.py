"""Response bodies of finished requests."""

from itertools import pairwise

from shoal.engine import protocol
from shoal.engine.request import Draft, Request


def version_spans(draft: Draft) -> list[protocol.VersionSpan]:
    """Spans of sampled tokens by sampling Version and by Version of their KV."""
    spans = []
    first = 0
    for version, last in draft.spans:
        inner = {since for since, _ in draft.kv_versions if first < since < last}
        borders = [first, *sorted(inner), last] if first < last else []
        spans += [protocol.VersionSpan(version, *span, draft.kv_version(span[0])) for span in pairwise(borders)]
        first = last
    return spans


def choice(draft: Draft, *, flat: bool) -> protocol.GeneratedChoice:
    """Response choice of a finished completion."""
    assert draft.finish_reason is not None
    return protocol.GeneratedChoice(
        index=draft.index,
        token_ids=draft.sampled,
        finish_reason=draft.finish_reason,
        weight_versions=version_spans(draft),
        logprobs=None if flat else _logprobs(draft),
        token_logprobs=draft.logprobs if flat else None,
        token_log_kept=draft.log_kept if draft.truncates else None,
    )


def _logprobs(draft: Draft) -> protocol.Logprobs:
    rows = zip(draft.sampled, draft.logprobs, strict=True)
    return protocol.Logprobs([protocol.TokenLogprob(f"token_id:{token}", token, logp) for token, logp in rows])


def response(body: protocol.GenerateRequest, request: Request) -> protocol.GenerateResponse:
    """Answer to a finished generate request; its usage counts the prompt once."""
    flat = body.logprobs_format == "flat"
    prompt, sampled = len(request.prompt_ids), sum(len(draft.sampled) for draft in request.drafts)
    return protocol.GenerateResponse(
        request_id=body.request_id,
        choices=[choice(draft, flat=flat) for draft in request.drafts],
        usage=protocol.Usage(prompt, sampled, prompt + sampled),
        prompt_token_ids=None if flat else body.token_ids,
    )
