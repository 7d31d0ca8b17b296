"""The API's protobuf messages as tensors: data of a loss, and what a forward pass gives.

N is the number of tokens of a datum and K the number of targets at each position.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tinker.proto import tinker_public_pb2 as pb
from torch import Tensor

from shoal.errors import RequestRefused

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


def data_of(request: pb.ForwardBackwardRequest, vocabulary: int) -> list[Datum]:
    """Data of a request. Raises `RequestRefused`, naming the datum and the field."""
    return [_datum(number, datum, vocabulary) for number, datum in enumerate(request.data)]


def settings_in(request: pb.ForwardBackwardRequest) -> dict[str, float | str]:
    """Settings of the loss."""
    return dict(request.loss_fn_config) | {
        name: value.text if value.HasField("text") else value.number
        for name, value in request.loss_fn_config_v2.items()
    }


def _datum(number: int, datum: pb.Datum, vocabulary: int) -> Datum:
    tokens: list[int] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise RequestRefused(f"data[{number}].model_input: expected text; images and audio are not supported")
        tokens += np.frombuffer(chunk.encoded_text.tokens, np.int32).tolist()
    inputs = {name: _tensor(f"data[{number}].{name}", value) for name, value in datum.loss_fn_inputs.items()}
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.shape[:1] != (len(tokens),) or targets.dim() > 2 or not tokens:
        came = "none" if targets is None else list(targets.shape)
        raise RequestRefused(f"data[{number}].target_tokens: expected [{len(tokens)}] tokens, at least 1; got {came}")
    targets = targets.long()
    for name, ids in (("model_input", torch.tensor(tokens)), ("target_tokens", targets)):
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise RequestRefused(f"data[{number}].{name}: expected token ids from 0 to {vocabulary - 1}")
    if "weights" not in inputs and targets.dim() == 1:
        inputs["weights"] = torch.ones(targets.shape)
    return Datum(tokens, targets, inputs)


def _tensor(name: str, tensor: pb.Tensor) -> Tensor:
    """Dense tensor of a message; cells that a sparse one leaves out are 0. Raises `RequestRefused`."""
    if tensor.dtype not in DTYPES:
        raise RequestRefused(f"{name}: expected float32 or int64 numbers")
    kind, shape = DTYPES[tensor.dtype], tuple(tensor.shape)
    try:
        if not tensor.HasField("sparse_csr"):
            flat = torch.from_numpy(np.frombuffer(tensor.dense, kind).copy())
            return flat.reshape(shape) if shape else flat
        rows, columns = (
            torch.from_numpy(np.frombuffer(data, np.int64).copy())
            for data in (tensor.sparse_csr.crow_indices, tensor.sparse_csr.col_indices)
        )
        values = torch.from_numpy(np.frombuffer(tensor.sparse_csr.values, kind).copy())
        return torch.sparse_csr_tensor(rows, columns, values, shape, check_invariants=True).to_dense()
    except (ValueError, RuntimeError) as error:
        raise RequestRefused(f"{name}: expected a tensor of shape {list(shape)}: {error}") from None


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
