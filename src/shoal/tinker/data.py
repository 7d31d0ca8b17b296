"""The API's protobuf messages as tensors: data of a loss, and what a forward pass gives.

N is the number of tokens of a datum and K the number of targets at each position.
"""

import math
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from shoal.errors import RequestRefused
from shoal.tinker.messages import MOST_ROWS

MOST_CELLS = 1 << 20
"""Targets of a request at most; so many logprobs come back."""
DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype(np.float32),
    pb.DTYPE_INT64: np.dtype(np.int64),
    pb.DTYPE_INT32: np.dtype(np.int32),
}


@dataclass(frozen=True)
class Datum:
    """Tokens [N], the tokens [N] or [N, K] whose logprobs the loss takes, and the loss's tensors of the same shape."""

    tokens: list[int]
    targets: Tensor
    inputs: dict[str, Tensor]

    def oldest(self) -> int | None:
        """Version of the oldest sampled token, as `versions` tells them; other tokens have a negative one."""
        versions = self.inputs.get("versions", torch.empty(0))
        return int(versions[versions >= 0].min()) if (versions >= 0).any() else None


def data_of(request: pb.ForwardBackwardRequest, vocabulary: int, longest: int, wanted: Collection[str]) -> list[Datum]:
    """Data of a request, with the `wanted` tensors of a loss. Raises `RequestRefused`, naming the datum and the field.

    Token ids lie below `vocabulary`, and a datum has at most `longest` tokens.
    """
    if len(request.data) > MOST_ROWS:
        raise RequestRefused(f"data: expected at most {MOST_ROWS} rows, got {len(request.data)}")
    room, data = MOST_CELLS, []
    for number, datum in enumerate(request.data):
        data.append(_datum(f"data[{number}]", datum, vocabulary, longest, room, wanted))
        room -= data[-1].targets.numel()
    return data


def settings_in(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Settings of the loss."""
    return dict(request.loss_fn_config) | {
        name: value.text if value.HasField("text") else value.number
        for name, value in request.loss_fn_config_v2.items()
    }


def _datum(name: str, datum: pb.Datum, vocabulary: int, longest: int, room: int, wanted: Collection[str]) -> Datum:
    """One datum, whose targets have at most `room` cells."""
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestRefused(f"{name}.model_input: expected text; images and audio are not supported")
        tokens += _numbers(f"{name}.model_input", chunk.encoded_text.tokens, np.dtype(np.int32)).tolist()
    if not 1 <= len(tokens) <= longest:
        raise RequestRefused(f"{name}.model_input: expected 1 to {longest} tokens, got {len(tokens)}")
    inputs = {
        key: _tensor(f"{name}.{key}", value, len(tokens), room)
        for key, value in datum.loss_fn_inputs.items()
        if key in wanted or key in ("target_tokens", "versions")
    }
    targets = inputs.pop("target_tokens", None)
    if targets is None:
        raise RequestRefused(f"{name}.target_tokens: expected [{len(tokens)}] tokens, got none")
    targets = targets.long()
    for field, ids in (("model_input", torch.tensor(tokens)), ("target_tokens", targets)):
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise RequestRefused(f"{name}.{field}: expected token ids from 0 to {vocabulary - 1}")
    if "weights" not in inputs and targets.dim() == 1:
        inputs["weights"] = torch.ones(targets.shape)
    return Datum(tokens, targets, inputs)


def _tensor(name: str, tensor: pb.Tensor, rows: int, room: int) -> Tensor:
    """Dense tensor [rows] or [rows, K] of a message; cells that a sparse one leaves out are 0. Raises `RequestRefused`.

    The shape is checked before there is a tensor of it.
    """
    if tensor.dtype not in DTYPES:
        raise RequestRefused(f"{name}: expected float32 or int64 numbers")
    kind, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    dense = None if tensor.HasField("sparse_csr") else _numbers(name, tensor.dense, kind)
    if dense is not None and not shape:
        shape = (len(dense),)
    if shape[:1] != (rows,) or len(shape) > 2 or not 1 <= math.prod(shape) <= room:
        expected = f"[{rows}] or [{rows}, K], of at most {room} cells"
        raise RequestRefused(f"{name}: expected a tensor of shape {expected}; got {list(shape[:3])}")
    try:
        if dense is not None:
            values = torch.from_numpy(dense.copy()).reshape(shape)
        else:
            csr = tensor.sparse_csr
            crow, columns = (
                torch.from_numpy(_numbers(name, data, np.dtype(np.int64)).copy())
                for data in (csr.crow_indices, csr.col_indices)
            )
            cells = torch.from_numpy(_numbers(name, csr.values, kind).copy())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch calls its sparse rows a beta
                values = torch.sparse_csr_tensor(crow, columns, cells, shape, check_invariants=True).to_dense()
    except (ValueError, RuntimeError) as error:
        raise RequestRefused(f"{name}: expected a tensor of shape {list(shape)}: {error}") from None
    if not bool(values.isfinite().all()):
        raise RequestRefused(f"{name}: expected finite numbers")
    return values


def _numbers(name: str, data: bytes, kind: np.dtype[Any]) -> "np.ndarray[Any, Any]":
    if len(data) % kind.itemsize:
        raise RequestRefused(f"{name}: expected {kind} numbers of {kind.itemsize} bytes each, got {len(data)} bytes")
    return np.frombuffer(data, kind)


def output_of(logps: Sequence[Tensor], losses: Sequence[float]) -> bytes:
    """ForwardBackwardOutput with each datum's logprobs, and the sum of the losses."""
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    message.metrics["loss:sum"] = sum(losses)
    start = 0
    while start < len(logps):  # one record for each run of data with the same number of targets
        trailing = logps[start].shape[1:]
        end = next((i for i in range(start, len(logps)) if logps[i].shape[1:] != trailing), len(logps))
        record = message.loss_fn_outputs.add(num_datums=end - start)
        arrays = [logp.float().numpy() for logp in logps[start:end]]
        field = record.fields["logprobs"]
        field.dtype = pb.DTYPE_FLOAT32
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
        field.trailing_shape.extend(trailing)
        start = end
    return bytes(message.SerializeToString())
