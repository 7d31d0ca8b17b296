"""vLLM's `/inference/v1/generate`: tokens in, tokens out, for agents that render by themselves."""

from typing import Literal

import msgspec

from shoal.gateway.chat import FINISH, Body, Refusal, logprobs_body, prompt_ask, spans, usage
from shoal.gateway.sessions import AnswerRequest
from shoal.gateway.token_tree import Conversation, Generation


class TokenSampling(msgspec.Struct):
    """Parameters of sampling; a session's own sampling wins."""

    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] | None = None


class TokensRequest(msgspec.Struct):
    """Body of `POST /inference/v1/generate`."""

    token_ids: list[int]
    sampling_params: TokenSampling
    request_id: str = ""
    stream: bool = False
    logprobs_format: Literal["content", "flat"] = "content"
    """Format of logprobs; `flat` gives a list of numbers, as Shoal's engines do."""


def tokens_ask(body: TokensRequest, digest: str, *, is_retry: bool) -> AnswerRequest:
    """Answer request of a body. Raises `Refusal`."""
    params = body.sampling_params
    for field, value, allowed in (("n", params.n, 1), ("stop", params.stop or None, None)):
        if value != allowed:
            raise Refusal(f"sampling_params.{field}", f"{allowed}", value)
    if body.stream:
        raise Refusal("stream", "false", True)
    return prompt_ask(
        tuple(body.token_ids),
        AnswerRequest(
            Conversation(()),
            digest,
            max_tokens=params.max_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            seed=params.seed,
            is_retry=is_retry,
        ),
    )


def tokens_body(generation: Generation, prompt_ids: tuple[int, ...], request: TokensRequest) -> Body:
    """Body of the answer to a request."""
    return {
        "request_id": request.request_id,
        "prompt_token_ids": list(prompt_ids),
        "choices": [
            {
                "index": 0,
                "token_ids": list(generation.completion.token_ids),
                "finish_reason": FINISH[generation.completion.finish_reason],
                "weight_versions": spans(generation),
                **_logprobs(generation, request),
            }
        ],
        "usage": usage(generation, prompt_ids),
    }


def _logprobs(generation: Generation, request: TokensRequest) -> Body:
    if request.logprobs_format == "flat":
        return {"token_logprobs": list(generation.completion.logprobs)}
    return {"logprobs": logprobs_body(generation)}
