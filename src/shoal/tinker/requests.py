"""JSON bodies of the Tinker API with their bounds, and the part of a protobuf body that the server reads.

A body is checked whole while it is decoded, before anything is stored. msgspec decodes 8 MiB of any JSON in a sixth of
a second; the package's own pydantic types took 46 s for 8 MiB of empty chunks.
"""

from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Literal

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError
from msgspec import Meta, Raw

from shoal.engine.server.protocol import MAX_BODY_BYTES
from shoal.net.server import Refused, decoded
from shoal.tinker.store import MOST_TTL_S
from shoal.trainer.messages import Adam
from shoal.types import MOST_TOP_K

MOST_JSON_BYTES = 1 << 20
MOST_SAMPLE_BYTES = MAX_BODY_BYTES
"""Bytes of a sampling request; an engine takes no more."""
MOST_BYTES = 16 << 20
"""Bytes of a `forward_backward`."""
MOST_RANK = 512
MOST_SAMPLES = 1024
"""Completions of one request, and completions that engines sample for one key at once."""
MOST_RANKED = 128
"""Likely tokens in the place of one token."""
MOST_RANKED_CELLS = 1 << 20
"""Likely tokens in the places of all tokens of a prompt."""
MOST_STOPS = 64
LONGEST_STOP = 256
MOST_CHUNKS = 1024
MOST_ROWS = 1024
"""Rows of a `forward_backward`; the package splits longer lists by this number."""
MOST_SETTINGS = 64
"""Settings of the loss in a `forward_backward`."""
MOST_PARTS = 1 << 16
"""Chunks, inputs and spans in all rows of a `forward_backward`."""

Number = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Id = Annotated[str, Meta(max_length=256)]
Ttl = Annotated[int, Meta(ge=0, le=MOST_TTL_S)]
Ranked = Annotated[int, Meta(ge=0, le=MOST_RANKED)]
Order = Annotated[int, Meta(ge=1, le=2**31 - 1)]
"""Number of a request among its model's; the creation has 0."""


class _Untyped(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, gc=False):
    """Body of a route that several types, or none, name."""


class _Body(_Untyped, tag_field="type"):
    """Body with the type of its route; metadata is read over."""

    user_metadata: Raw = Raw()


class CreateSession(_Body, tag="create_session", kw_only=True):
    """Body of `create_session`; its fields are ignored."""

    tags: Raw = Raw()
    sdk_version: Raw = Raw()
    project_id: Raw = Raw()
    display_name: Raw = Raw()


class Heartbeat(_Body, tag="session_heartbeat", kw_only=True):
    """Body of `session_heartbeat`."""

    session_id: Id


class Lora(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Settings of an adapter."""

    rank: Annotated[int, Meta(ge=1, le=MOST_RANK)]
    seed: Seed | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """Optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(_Body, tag="create_model", kw_only=True):
    """Body of `create_model`."""

    session_id: Id
    model_seq_id: Number
    base_model: str
    lora_config: Lora
    optimizer_config: OptimizerBody = OptimizerBody()


class OfModel(_Untyped, kw_only=True):
    """Body of `unload_model` and `get_info`."""

    model_id: Id
    type: Literal["unload_model", "get_info"] | None = None


class OptimStepBody(_Body, tag="optim_step", kw_only=True):
    """Body of `optim_step`; the package names the settings in three ways."""

    model_id: Id
    seq_id: Order
    adam_params: Adam | None = None
    optim_params: Adam | None = None
    optimizer_params: Adam | None = None

    def adam(self) -> Adam:
        """Settings of the step. Raises `Refused` without any, or with several."""
        given = [one for one in (self.adam_params, self.optim_params, self.optimizer_params) if one is not None]
        if len(given) != 1:
            raise Refused(HTTPStatus.BAD_REQUEST, f"adam_params: expected one set of Adam's, got {len(given)}")
        return given[0]


class SaveWeights(_Body, tag="save_weights", kw_only=True):
    """Body of `save_weights`."""

    model_id: Id
    seq_id: Order
    path: str | None = None
    ttl_seconds: Ttl | None = None
    overwrite: bool = False


class SaveForSampler(_Body, tag="save_weights_for_sampler", kw_only=True):
    """Body of `save_weights_for_sampler`."""

    model_id: Id
    seq_id: Order
    path: str | None = None
    sampling_session_seq_id: Number | None = None
    kind: str = "snapshot"
    ttl_seconds: Ttl | None = None


class LoadWeights(_Body, tag="load_weights", kw_only=True):
    """Body of `load_weights`: into a model, or as the beginning of a new one in a session."""

    path: str
    optimizer: bool
    model_id: Id | None = None
    seq_id: Order | None = None
    session_id: Id | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: Raw = Raw()


class CreateSampler(_Body, tag="create_sampling_session", kw_only=True):
    """Body of `create_sampling_session`."""

    session_id: Id
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: str | None = None


class Retrieve(_Untyped, kw_only=True):
    """Body of `retrieve_future`."""

    request_id: Id
    allow_metadata_only: bool = False


class WeightsInfo(_Untyped, kw_only=True):
    """Body of `weights_info`."""

    tinker_path: str


class SetTtl(_Untyped, kw_only=True):
    """Body of a checkpoint's `ttl`."""

    ttl_seconds: Ttl | None = None


class TextChunk(msgspec.Struct, forbid_unknown_fields=True, tag_field="type", tag="encoded_text", gc=False):
    """Tokens; chunks of images and audio are refused by their type."""

    tokens: list[Number]


class PromptBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Chunks of text, one after another; counted before they are decoded, since many empty ones take long."""

    chunks: Annotated[list[Raw], Meta(max_length=MOST_CHUNKS)]

    def tokens(self) -> list[int]:
        """Tokens of all chunks. Raises `Refused`."""
        return [token for chunk in self.chunks for token in decoded(bytes(chunk), TextChunk).tokens]


class SamplingBody(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Parameters of sampling; `stop` is a text, texts, or token ids."""

    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    seed: Seed | None = None
    stop: (
        Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
        | Annotated[
            list[Number | Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]], Meta(max_length=MOST_STOPS)
        ]
        | None
    ) = None
    temperature: float = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MOST_TOP_K)] = -1
    top_p: float = 1.0


class ListedTokens(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """Token ids [P, K] for the places of a prompt after its first token; -1 lists none. Dense, or sparse rows."""

    data: list[Annotated[int, Meta(ge=-1, le=2**31 - 1)]]
    dtype: Literal["int64"] = "int64"
    shape: Annotated[list[Number], Meta(max_length=2)] | None = None
    sparse_crow_indices: list[Number] | None = None
    sparse_col_indices: list[Number] | None = None


class SampleBody(_Body, tag="sample", kw_only=True):
    """Body of `asample`."""

    prompt: PromptBody
    sampling_params: SamplingBody
    sampling_session_id: Id
    seq_id: Number
    num_samples: Annotated[int, Meta(ge=1, le=MOST_SAMPLES)] = 1
    base_model: str | None = None
    model_path: str | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Ranked = 0
    topk_sample_logprobs: Ranked = 0
    target_prompt_logprobs: ListedTokens | None = None
    prompt_alt_tokens_k: Number = 0
    prompt_logprobs_last_n: Order | None = None
    record_stability_info: bool | None = None


@dataclass(frozen=True, slots=True)
class Head:
    """Part of a `ForwardBackwardRequest` that the server reads; the trainer reads the rest."""

    model_id: str
    seq_id: int
    rows: int
    forward_only: bool


def head(data: bytes) -> Head:
    """Head of a `ForwardBackwardRequest`. Raises `Refused`, also for more parts than protobuf reads in a moment.

    Rows and parts stay bytes: as messages, 16 MiB of empty rows took a second and 600 MB, of settings four.
    """
    try:
        message: Any = _HEAD.FromString(data)
        rows: list[Any] = [_ROW.FromString(row) for row in message.data[:MOST_ROWS]]
    except DecodeError as error:
        raise Refused(HTTPStatus.BAD_REQUEST, f"body: expected a ForwardBackwardRequest: {error}") from None
    settings, parts = (
        len(message.settings) + len(message.settings_v2),
        sum(len(getattr(row, part)) for row in rows for part in _PARTS),
    )
    for name, most, count in (("loss_fn_config", MOST_SETTINGS, settings), ("data", MOST_PARTS, parts)):
        if count > most:
            raise Refused(HTTPStatus.BAD_REQUEST, f"{name}: expected at most {most} parts in all, got {count}")
    return Head(message.model_id, message.seq_id, len(message.data), message.forward_only)


def _message_types() -> tuple[Any, Any]:
    """Types with the numbers of the fields of the package's `ForwardBackwardRequest`, and of its `Datum`."""
    of = descriptor_pb2.FieldDescriptorProto
    kinds = {
        "model_id": (1, of.TYPE_STRING, of.LABEL_OPTIONAL),
        "seq_id": (2, of.TYPE_INT32, of.LABEL_OPTIONAL),
        "data": (3, of.TYPE_BYTES, of.LABEL_REPEATED),
        "settings": (5, of.TYPE_BYTES, of.LABEL_REPEATED),
        "forward_only": (6, of.TYPE_BOOL, of.LABEL_OPTIONAL),
        "settings_v2": (7, of.TYPE_BYTES, of.LABEL_REPEATED),
    }
    parts = {name: (number, of.TYPE_BYTES, of.LABEL_REPEATED) for number, name in enumerate(_PARTS, 1)}
    file = descriptor_pb2.FileDescriptorProto(name="shoal/tinker_head.proto", package="shoal", syntax="proto3")
    for type_, fields in {"Head": kinds, "Row": parts}.items():
        message = file.message_type.add(name=type_)
        for name, (number, kind, label) in fields.items():
            message.field.add(name=name, number=number, type=kind, label=label)
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    head_, row = (
        message_factory.GetMessageClass(pool.FindMessageTypeByName(f"shoal.{one}")) for one in ("Head", "Row")
    )
    return head_, row


_PARTS = ("chunks", "inputs", "chunk_spans", "input_spans")
_HEAD, _ROW = _message_types()
