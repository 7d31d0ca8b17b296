"""One sampling request of the Tinker API on an engine: stop strings, prompt logprobs, the answer as protobuf."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from tinker import types
from tinker.proto import tinker_public_pb2 as pb

from shoal.engine.protocol import ScoreResponse
from shoal.errors import RequestRefused
from shoal.model.chat_template import ChatRenderer
from shoal.tinker.samplers import ServedWeights
from shoal.types import Completion, FinishReason, Sampling

if TYPE_CHECKING:
    from tinker.types._pydantic_types.tensor_data import TensorData

DEFAULT_MAX_TOKENS = 512
NAN, EMPTY = float("nan"), -99999.0


async def sample(engine: ServedWeights, renderer: ChatRenderer, request: types.SampleRequest) -> bytes:
    """Samples the request's completions; a SampleResponse. Raises `RequestRefused`, naming the field."""
    if request.prompt_alt_tokens_k:
        raise RequestRefused("prompt_alt_tokens_k: not supported")
    try:
        prompt = request.prompt.to_ints()
    except ValueError:
        raise RequestRefused("prompt: expected text; images and audio are not supported") from None
    longest = engine.longest
    room = longest - len(prompt)
    if not prompt or room < 1:
        raise RequestRefused(f"prompt: expected 1 to {longest - 1} tokens, got {len(prompt)}")
    strings, token_ids = stops(request.sampling_params.stop, renderer)
    sampling = _sampling(request.sampling_params, token_ids, room)
    completions = await engine.generate(prompt, sampling, n=request.num_samples)
    message = pb.SampleResponse()
    for completion in completions:
        kept = cut(completion, strings, renderer)
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if kept.finish_reason is FinishReason.STOP else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(kept.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(kept.logprobs, np.float32).tobytes(),
        )
        if (most := request.topk_sample_logprobs) and kept.token_ids:
            ranked = (await engine.scored([*prompt, *kept.token_ids], most)).others[-len(kept.token_ids) :]
            sequence.topk_sampled_logprobs.CopyFrom(_table(ranked, most))
    await _score_prompt(engine, request, prompt, message)
    return bytes(message.SerializeToString())


async def _score_prompt(
    engine: ServedWeights, request: types.SampleRequest, prompt: Sequence[int], message: pb.SampleResponse
) -> None:
    """Adds what the request wants to know about the prompt's tokens."""
    most, target = request.topk_prompt_logprobs, request.target_prompt_logprobs
    if len(prompt) > 1 and (request.prompt_logprobs or most):
        scored = await engine.scored(prompt, most)
    else:
        scored = ScoreResponse([])
    unwanted = max(len(prompt) - (request.prompt_logprobs_last_n or len(prompt)), 1)
    if request.prompt_logprobs:
        logps = [NAN] * unwanted + scored.logprobs[unwanted - 1 :]
        message.prompt_logprobs = np.asarray(logps, np.float32).tobytes()
    if most:
        message.topk_prompt_logprobs.CopyFrom(_table([*[()] * unwanted, *scored.others[unwanted - 1 :]], most))
    if target is not None:
        message.target_prompt_logprobs.CopyFrom(await _targets(engine, prompt, target))


def _table(rows: Sequence[Sequence[tuple[int, float]]], most: int) -> pb.TopkLogprobs:
    filled = np.array([[*row, *[(0, EMPTY)] * (most - len(row))] for row in rows])
    ids, logps = filled[:, :, 0].astype(np.int32), filled[:, :, 1].astype(np.float32)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logps.tobytes(), k=most, length=len(rows))


async def _targets(engine: ServedWeights, prompt: Sequence[int], target: "TensorData") -> pb.Tensor:
    """Logprobs of the listed tokens, in the layout of the list; a cell of -1 gets 0."""
    places, shape = len(prompt) - 1, target.shape or [len(target.data)]
    if len(shape) != 2 or shape[0] != places or places < 1:
        raise RequestRefused(f"target_prompt_logprobs: expected [{places}, K] token ids, got {shape}")
    ids = np.asarray(target.data, np.int64)
    ends = target.sparse_crow_indices or range(0, len(ids) + 1, shape[1])
    rows = [ids[start:end].tolist() for start, end in pairwise(ends)]
    asked = [[token for token in row if token >= 0] for row in rows]
    found = [iter(pairs) for pairs in (await engine.scored(prompt, asked)).others]
    cells = [next(pairs)[1] if token >= 0 else 0.0 for row, pairs in zip(rows, found, strict=True) for token in row]
    answer, values = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=shape), np.asarray(cells, np.float32).tobytes()
    if target.sparse_crow_indices is None:
        answer.dense = values
    else:
        answer.sparse_csr.values = values
        answer.sparse_csr.crow_indices = np.asarray(target.sparse_crow_indices, np.int64).tobytes()
        answer.sparse_csr.col_indices = np.asarray(target.sparse_col_indices, np.int64).tobytes()
    return answer


def stops(given: object, renderer: ChatRenderer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings, and stop tokens: the model's own for None, none for an empty list, or the listed ones."""
    if given is None:
        return (), renderer.stop_token_ids
    listed = [given] if isinstance(given, str) else list(given) if isinstance(given, Sequence) else []
    if all(isinstance(stop, int) for stop in listed):
        return (), tuple(int(stop) for stop in listed)
    strings = tuple(str(stop) for stop in listed)
    whole = {text: renderer.token_ids(text) for text in strings}
    single = tuple(ids[0] for ids in whole.values() if len(ids) == 1)
    return strings, (*renderer.stop_token_ids, *single)


def cut(completion: Completion, strings: Sequence[str], renderer: ChatRenderer) -> Completion:
    """The completion up to the first stop string, with the token in which that ends."""
    if not strings or not any(text in renderer.text(completion.token_ids) for text in strings):
        return completion
    low, high = 1, len(completion.token_ids)
    while low < high:  # the shortest beginning with a stop string in it
        middle = (low + high) // 2
        text = renderer.text(completion.token_ids[:middle])
        low, high = (low, middle) if any(stop in text for stop in strings) else (middle + 1, high)
    return replace(
        completion,
        token_ids=completion.token_ids[:low],
        logprobs=completion.logprobs[:low],
        versions=completion.versions[:low],
        finish_reason=FinishReason.STOP,
    )


def _sampling(given: types.SamplingParams, stop_token_ids: tuple[int, ...], room: int) -> Sampling:
    try:
        return Sampling(
            max_tokens=min(given.max_tokens or DEFAULT_MAX_TOKENS, room),
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            seed=given.seed,
        )
    except ValueError as error:
        raise RequestRefused(f"sampling_params.{error}") from None
