"""JSON bodies of an engine's HTTP routes: vLLM's `/inference/v1/generate` and the routes that control it.

Names and shapes follow vLLM wherever vLLM has the route. Shoal adds `/score`, `/info`, `/update_weights` and the
`logprobs_format: "flat"` of a generate request. The flat format gives `token_logprobs` as a list instead of an object
per token.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec

LogprobsFormat: TypeAlias = Literal["content", "flat"]


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of sampling. `top_k` 0 or -1 is off. `max_tokens` beyond the context is cut to the room left."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logprobs: Literal[0] | None = 0
    """Answers always carry the logprob of each sampled token, and no other logprob."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/generate`. Greater `priority` goes first."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    priority: int = 0
    logprobs_format: LogprobsFormat = "content"
    model: str | None = None
    """Name accepted for vLLM's clients; the engine has one model."""
    stream: Literal[False] = False


class TokenLogprob(msgspec.Struct):
    """One sampled token: its id, also as the string `token_id:N`, and its logprob in nats."""

    token: str
    token_id: int
    logprob: float


class Logprobs(msgspec.Struct):
    """Sampled tokens of a choice."""

    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct, omit_defaults=True):
    """Tokens `start : end` of a choice, sampled by the weights of `version`."""

    version: int
    start: int
    end: int
    kv_version: int | None = None
    """Version of the oldest KV in the tokens' context, if older than `version`; occurs with `--on-update keep`."""


class GeneratedChoice(msgspec.Struct, omit_defaults=True, kw_only=True):
    """One completion."""

    index: int
    token_ids: list[int]
    weight_versions: list[VersionSpan]
    logprobs: Logprobs | None = None
    token_logprobs: list[float] | None = None
    token_log_kept: list[float] | None = None
    """Log of the probability mass that top-k, top-p and min-p kept; logprob plus this value is the untruncated
    logprob."""
    finish_reason: str


class Usage(msgspec.Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class GenerateResponse(msgspec.Struct, omit_defaults=True):
    """Answer to a generate request; flat answers have no `prompt_token_ids`."""

    request_id: str
    choices: list[GeneratedChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = None


class LogprobsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /score`."""

    token_ids: list[int]


class ScoreResponse(msgspec.Struct):
    """Logprobs (nats, temperature 1) of tokens 1..L-1."""

    logprobs: list[float]


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /abort_requests`; an empty list means all requests."""

    request_ids: list[str] = []


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /update_weights`. `path` is a safetensors file or its directory, on the engine's machine."""

    version: Annotated[int, msgspec.Meta(le=2**63 - 1)]  # metrics and most readers of JSON hold no larger number
    path: str
    checksum: str | None = None


class WeightInfo(msgspec.Struct):
    """Answer of `GET /weight_info` and of an update."""

    version: int
    checksum: str
    failure: str = ""
    """Reason why the last update was refused; empty when it was served."""


class PausedState(msgspec.Struct):
    """Answer of `GET /is_paused`."""

    is_paused: bool
