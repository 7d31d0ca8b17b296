"""JSON bodies of an engine's HTTP routes: vLLM's `/inference/v1/generate` and the routes that control it.

Names and shapes follow vLLM wherever vLLM has the route. Shoal adds `/stream`, `/score`, `/info` and
`/update_weights`.
"""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import fields
from itertools import groupby
from typing import Annotated, Literal

import msgspec

from shoal.errors import RequestRefused
from shoal.interfaces import LogitRules
from shoal.types import Completion, Sampling

MAX_BODY_BYTES = 8 * 1024 * 1024
MOST_LISTS = 1 << 18
"""Lists in one body, such as the tokens that `/score` is asked for in each place."""
CLIENT_GONE = 499  # the status of a client that has disconnected; no one reads it


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True):
    """Parameters of sampling. `top_k` 0 or -1 is off. `max_tokens` beyond the context is cut to the room left."""

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    seed: int | None = None
    stop_token_ids: Sequence[int] | None = None
    grammar: str = ""
    begun: Annotated[int, msgspec.Meta(ge=0)] = 0
    logprobs: Literal[0] | None = 0
    """Answers always carry the logprob of each sampled token, and no other logprob."""


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /inference/v1/generate`. Greater `priority` goes first."""

    token_ids: list[int]
    sampling_params: SamplingParams
    request_id: str = ""
    priority: int = 0
    model: str | None = None
    """Name of a loaded adapter, or of the model."""
    stream: Literal[False] = False


class StreamRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /stream`, whose answer has a line of JSON, `ServedTokens`, for at least `every` tokens."""

    token_ids: list[int]
    sampling_params: SamplingParams
    rules: LogitRules = LogitRules()
    every: int = 1


class TokenLogprob(msgspec.Struct):
    """One sampled token: its id, its logprob in nats, and the id as the string `token_id:N`."""

    token_id: int
    logprob: float
    token: str = ""


class Logprobs(msgspec.Struct):
    """Sampled tokens of a choice."""

    content: list[TokenLogprob]


class VersionSpan(msgspec.Struct):
    """Tokens `start : end` of a choice, sampled by the weights of `version`; other servers name it by a text."""

    version: int | str
    start: int
    end: int


class GeneratedChoice(msgspec.Struct):
    """One completion."""

    index: int
    token_ids: list[int]
    finish_reason: str
    logprobs: Logprobs | None = None
    weight_versions: list[VersionSpan] | None = None
    routing: str = ""
    """`Completion.routing` in base64; empty unless the engine records it."""
    forced: list[int] = []
    """`Completion.forced`."""
    kept: list[bytes] = []
    """`Completion.kept`, each in base64."""


class GenerateResponse(msgspec.Struct):
    """Answer to a generate request."""

    choices: list[GeneratedChoice]
    request_id: str = ""


class LogprobsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /score`; `others` wants more logprobs for each token but the first."""

    token_ids: list[int]
    others: Annotated[int, msgspec.Meta(ge=0)] | list[list[int]] = 0
    """Number of most likely tokens, or a list of token ids for each token but the first."""
    model: str | None = None
    """Name of a loaded adapter, or of the model."""


class ScoreResponse(msgspec.Struct, omit_defaults=True):
    """Logprobs (nats, temperature 1) of tokens 1..L-1, and of the others in their places as pairs with the id."""

    logprobs: list[float]
    others: list[list[tuple[int, float]]] = []


class UpdateWeightsRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /update_weights`. `path` is a safetensors file or its directory, on the engine's machine.

    An engine that pulls its Versions takes no path.
    """

    version: Annotated[int, msgspec.Meta(le=2**63 - 1)]  # metrics and most readers of JSON hold no larger number
    path: str = ""
    checksum: str | None = None


class LoadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/load_lora_adapter`: an adapter in the form of peft, on the engine's machine.

    A name that is loaded already gets a newer Version.
    """

    lora_name: Annotated[str, msgspec.Meta(min_length=1, max_length=1024)]
    lora_path: str
    version: Annotated[int, msgspec.Meta(le=2**63 - 1)] = 0
    checksum: str | None = None


class UnloadAdapterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /v1/unload_lora_adapter`."""

    lora_name: str


class LoadedAdapters(msgspec.Struct):
    """Versions of the loaded adapters by name: answer of loading and unloading."""

    adapters: dict[str, int]


class WeightInfo(msgspec.Struct):
    """Answer of `GET /weight_info` and of an update."""

    version: int
    checksum: str
    failure: str = ""
    """Reason why the last update was refused; empty when it was served."""


class PausedState(msgspec.Struct):
    """Answer of `GET /is_paused`."""

    is_paused: bool


def sampling_of(params: SamplingParams) -> Sampling:
    """Sampling of a request. Raises `RequestRefused` for values out of range."""
    given = {field.name: getattr(params, field.name) for field in fields(Sampling)}
    given |= {"top_k": 0 if params.top_k == -1 else params.top_k, "stop_token_ids": tuple(params.stop_token_ids or ())}
    try:
        return Sampling(**given)
    except ValueError as error:
        raise RequestRefused(f"sampling_params.{error}") from error


def versions_of(spans: Sequence[VersionSpan], length: int) -> tuple[int, ...]:
    """Version of each token of a choice. Raises `ValueError` unless the spans cover its tokens in order."""
    end = 0
    for span in spans:
        if not end == span.start < span.end <= length:
            raise ValueError(f"weight_versions: expected spans in order up to {length}, got {span.start}:{span.end}")
        end = span.end
    if end != length:
        raise ValueError(f"weight_versions: expected spans up to {length}, got {end}")
    return tuple(int(span.version) for span in spans for _ in range(span.start, span.end))


def choice_of(index: int, one: Completion) -> GeneratedChoice:
    """Choice of a completion, with a span for each run of tokens of one Version."""
    spans: list[VersionSpan] = []
    for version, run in groupby(one.versions):
        start = spans[-1].end if spans else 0
        spans.append(VersionSpan(version, start, start + len(list(run))))
    rows = zip(one.token_ids, one.logprobs, strict=True)
    sampled = Logprobs([TokenLogprob(token, logprob, f"token_id:{token}") for token, logprob in rows])
    routing = b64encode(one.routing).decode()
    ids, forced, kept = list(one.token_ids), list(one.forced), list(one.kept)
    return GeneratedChoice(index, ids, one.finish_reason, sampled, spans, routing, forced, kept)
