"""The HTTP bodies of an engine, as JSON: vLLM's `/inference/v1/generate` shape and the routes that control it.

Field names and shapes are vLLM's where vLLM has the route. Ours are `/score`, `/info`, `/update_weights` and the
`logprobs_format: "flat"` of a generate request, which gives `token_logprobs` as a list instead of an object per token.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

LogprobsFormat: TypeAlias = Literal["content", "flat"]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """How tokens are drawn. `top_k` 0 or -1 is off. `max_tokens` beyond the context is cut to what fits."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: Literal[0] | None = 0
    """That of each drawn token is always given, and no other."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /inference/v1/generate`. Greater `priority` goes first."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    priority: int = 0
    logprobs_format: LogprobsFormat = "content"
    model: str | None = None
    """Accepted for the sake of vLLM's clients; there is one model."""
    stream: Literal[False] = False


class TokenLogprob(msgspec.Struct):
    """One drawn token: its id, also as the string `token_id:N`, and its logprob in nats."""

    token: str
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    """The drawn tokens of a choice."""

    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct, omit_defaults=True):
    """The tokens `start : end` of a choice were drawn by weights of `version`."""

    version: int
    start: int
    end: int
    kv_version: int | None = None
    """The Version of the oldest KV that they were drawn on, where that is older: `--on-update keep`."""


class GeneratedChoice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One completion."""

    index: int
    token_ids: list[int]
    weight_versions: list[VersionSpan]
    logprobs: Logprobs | None = None
    token_logprobs: list[float] | None = None
    token_log_kept: list[float] | None = None
    """With top-k, top-p or min-p: the log of the mass that they kept. A logprob plus it is the one without them."""
    finish_reason: str


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """The answer to a generate request; `prompt_token_ids` are left out of flat ones."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class LogprobsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /score`."""

    token_ids: list[int]


class ScoreResponse(msgspec.Struct):
    """Logprobs (nats, temperature 1) of tokens 1..L-1."""

    logprobs: list[float]


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /abort_requests`; no ids means all."""

    request_ids: list[str] = []


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`POST /update_weights`. `path` is a safetensors file or its directory, on the engine's machine."""

    version: Annotated[int, msgspec.Meta(le=2**63 - 1)]  # metrics and most readers of JSON hold no larger number
    path: str
    checksum: str | None = None


class WeightInfo(msgspec.Struct):
    """`GET /weight_info`, and the answer to an update."""

    version: int
    checksum: str
    failure: str = ""
    """Why the last update was refused; empty when it was served."""


class PausedState(msgspec.Struct):
    """`GET /is_paused`."""

    is_paused: bool


class ErrorDetail(msgspec.Struct):
    """What went wrong, in words."""

    message: str
    code: int


class ErrorResponse(msgspec.Struct):
    """The body of every answer that is not 200."""

    error: ErrorDetail
