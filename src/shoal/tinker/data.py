"""The API's protobuf messages as requests of the trainer and back: data of a loss, and the logprobs of a forward pass.

N is the number of tokens of a datum and K the number of targets at each position.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError
from tinker.proto import tinker_public_pb2 as pb

from shoal.errors import RequestRefused
from shoal.staleness import Staleness
from shoal.tinker.requests import MOST_ROWS
from shoal.trainer.datum_loss import LOSSES
from shoal.trainer.messages import Datum, Gradient, GradientDone

Array: TypeAlias = "np.ndarray[Any, Any]"

MOST_CELLS = 1 << 20
"""Targets of a request at most; so many logprobs come back."""
MOST_FLOAT = float(np.finfo(np.float32).max)
DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}
WITHOUT_DEFINITION = ("stable_reinforce", "custom")
"""Names in the package's list whose definition is not published."""


def gradient_of(body: bytes, version: int) -> Gradient:
    """Gradient that a `ForwardBackwardRequest` asks of a model which has taken `version` steps.

    Raises `RequestRefused`, naming the datum and the field.
    """
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError as error:
        raise RequestRefused(f"body: expected a ForwardBackwardRequest: {error}") from None
    given = dict(request.loss_fn_config) | {
        name: value.text if value.HasField("text") else value.number
        for name, value in request.loss_fn_config_v2.items()
    }
    most = finite("loss_fn_config.max_staleness", given.pop("max_staleness", MOST_FLOAT))
    if most < 0:
        raise RequestRefused(f"loss_fn_config.max_staleness: expected at least 0, got {most:g}")
    settings = settings_of(request.loss_fn, given)
    if len(request.data) > MOST_ROWS:
        raise RequestRefused(f"data: expected at most {MOST_ROWS} rows, got {len(request.data)}")
    room, data = MOST_CELLS, []
    for number, datum in enumerate(request.data):
        tokens, inputs = _arrays(f"data[{number}]", datum, room, LOSSES[request.loss_fn][1])
        targets, versions = inputs.pop("target_tokens"), inputs.pop("versions", np.empty(0))
        room -= targets.size
        check_inputs(request.loss_fn, targets.shape, inputs)
        oldest = versions[versions >= 0].min(initial=version)
        if oldest < Staleness(int(most)).oldest(version):
            raise RequestRefused(
                f"data[{number}].versions: expected at most {most:g} steps before version {version}, got {oldest:g}"
            )
        wanted = {name: inputs[name].astype(np.float32).tobytes() for name in LOSSES[request.loss_fn][1]}
        data.append(Datum(tokens, targets.astype(np.int32).tobytes(), targets.shape, wanted))
    return Gradient(request.model_id, tuple(data), request.loss_fn, settings, not request.forward_only)


def settings_of(name: str, given: Mapping[str, float | str]) -> dict[str, float]:
    """Settings of a loss with defaults filled in. Raises `RequestRefused`, naming the loss or the setting."""
    if name not in LOSSES:
        why = " (it has no published definition)" if name in WITHOUT_DEFINITION else ""
        raise RequestRefused(f"loss_fn: expected one of {', '.join(LOSSES)}; got {name!r}{why}")
    settings = dict(LOSSES[name][2])
    for key, value in given.items():
        if key not in settings:
            raise RequestRefused(f"loss_fn_config: {name} has {', '.join(settings) or 'no settings'}; got {key!r}")
        settings[key] = finite(f"loss_fn_config.{key}", value)
    return settings


def finite(name: str, value: float | str) -> float:
    """Number in a setting. Raises `RequestRefused` for text, NaN, and values outside float32."""
    if isinstance(value, str) or not abs(value) <= MOST_FLOAT:
        raise RequestRefused(f"{name}: expected a finite number up to {MOST_FLOAT:g}, got {value!r}")
    return value


def check_inputs(name: str, shape: tuple[int, ...], inputs: Mapping[str, Array]) -> None:
    """Raises `RequestRefused` when an array of a datum is missing, or has another shape than its targets."""
    wanted = LOSSES[name][1]
    for field in wanted:
        if field not in inputs:
            raise RequestRefused(f"loss_fn_inputs: {name} expects {', '.join(wanted)}; {field} is missing")
        if inputs[field].shape != shape:
            expected, came = list(shape), list(inputs[field].shape)
            raise RequestRefused(f"loss_fn_inputs.{field}: expected the shape of target_tokens, {expected}; got {came}")
    if name == "gspo" and not inputs["sequence_ratio_mask"].any():
        raise RequestRefused("sequence_ratio_mask: expected at least one token that is not 0")


def _arrays(name: str, datum: pb.Datum, room: int, wanted: Collection[str]) -> tuple[bytes, dict[str, Array]]:
    """Tokens of a datum, int32, and its arrays of the shape [N] or [N, K], of at most `room` cells."""
    parts: list[bytes] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestRefused(f"{name}.model_input: expected text; images and audio are not supported")
        parts.append(_numbers(f"{name}.model_input", chunk.encoded_text.tokens, np.dtype(np.int32)).tobytes())
    tokens = b"".join(parts)
    count = len(tokens) // 4
    if not count:
        raise RequestRefused(f"{name}.model_input: expected at least 1 token, got 0")
    arrays = {
        key: _array(f"{name}.{key}", value, count, room)
        for key, value in datum.loss_fn_inputs.items()
        if key in wanted or key in ("target_tokens", "versions")
    }
    targets = arrays.get("target_tokens")
    if targets is None:
        raise RequestRefused(f"{name}.target_tokens: expected [{count}] tokens, got none")
    if targets.min() < 0 or targets.max() >= 1 << 31:
        raise RequestRefused(f"{name}.target_tokens: expected token ids from 0, got {targets.min()}..{targets.max()}")
    if "weights" not in arrays and targets.ndim == 1:
        arrays["weights"] = np.ones(count, np.float32)
    return tokens, arrays


def _array(name: str, tensor: pb.Tensor, rows: int, room: int) -> Array:
    """Array [rows] or [rows, K] of a message; cells that a sparse one leaves out are 0. Raises `RequestRefused`.

    The shape is checked before there is an array of it.
    """
    if tensor.dtype not in DTYPES:
        raise RequestRefused(f"{name}: expected float32 or int64 numbers")
    kind, shape = DTYPES[tensor.dtype], tuple(tensor.shape[:3])
    dense = None if tensor.HasField("sparse_csr") else _numbers(name, tensor.dense, kind)
    if dense is not None and not shape:
        shape = (len(dense),)
    if shape[:1] != (rows,) or len(shape) > 2 or not 1 <= math.prod(shape) <= room:
        expected = f"[{rows}] or [{rows}, K], of at most {room} cells"
        raise RequestRefused(f"{name}: expected a tensor of shape {expected}; got {list(shape[:3])}")
    if dense is not None and dense.size != math.prod(shape):
        raise RequestRefused(f"{name}: expected a tensor of shape {list(shape)}, got {dense.size} numbers")
    values = _dense(name, tensor.sparse_csr, kind, shape) if dense is None else dense.reshape(shape)
    if not np.isfinite(values).all():
        raise RequestRefused(f"{name}: expected finite numbers")
    return values


def _dense(name: str, rows: pb.SparseCsr, kind: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Array of compressed sparse rows. Raises `RequestRefused` for indices outside of the shape, or repeated ones."""
    crow, columns = (_numbers(name, data, np.dtype(np.int64)) for data in (rows.crow_indices, rows.col_indices))
    cells, counts = _numbers(name, rows.values, kind), np.diff(crow)
    ends = len(shape) == 2 and len(crow) == shape[0] + 1 and crow[0] == 0 and crow[-1] == len(columns) == len(cells)
    if not ends or (counts < 0).any() or (counts > shape[1]).any() or ((columns < 0) | (columns >= shape[1])).any():
        raise RequestRefused(f"{name}: expected sparse rows of shape {list(shape)}, with indices that fit")
    places = np.repeat(np.arange(shape[0]) * shape[1], counts) + columns
    if len(np.unique(places)) != len(places):
        raise RequestRefused(f"{name}: expected sparse rows with each column once")
    values = np.zeros(math.prod(shape), kind)
    values[places] = cells
    return values.reshape(shape)


def _numbers(name: str, data: bytes, kind: np.dtype[Any]) -> Array:
    if len(data) % kind.itemsize:
        raise RequestRefused(f"{name}: expected {kind} numbers of {kind.itemsize} bytes each, got {len(data)} bytes")
    return np.frombuffer(data, kind)


def output_of(job: Gradient, done: GradientDone) -> bytes:
    """ForwardBackwardOutput with each datum's logprobs, and the sum of the losses."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = done.loss
    trailing, start = [datum.shape[1:] for datum in job.data], 0
    while start < len(trailing):  # one record for each run of data with the same number of targets
        end = next((i for i in range(start, len(trailing)) if trailing[i] != trailing[start]), len(trailing))
        record = message.loss_fn_outputs.add(num_datums=end - start)
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(done.logprobs[start:end])
        field.offsets = np.cumsum([0, *map(len, done.logprobs[start:end])], dtype=np.int64).tobytes()
        field.trailing_shape.extend(trailing[start])
        start = end
    return bytes(message.SerializeToString())
