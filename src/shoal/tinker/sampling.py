"""One sampling request of the Tinker API on an engine: stop strings, prompt logprobs, the answer as protobuf."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

from shoal.engine.pool.engine_pool import EnginePool
from shoal.engine.pool.replica import NamedModel
from shoal.engine.server.protocol import ScoreResponse
from shoal.errors import RequestRefused
from shoal.model.chat_template import ChatRenderer
from shoal.tinker.requests import MOST_RANKED_CELLS, ListedTokens, SampleBody, SamplingBody
from shoal.types import Completion, FinishReason, Sampling

DEFAULT_MAX_TOKENS = 512
NAN, EMPTY = float("nan"), -99999.0


def checked(request: SampleBody) -> list[int]:
    """Prompt of a request that is right as far as no engine is asked. Raises `RequestRefused`, naming the field."""
    if request.prompt_alt_tokens_k:
        raise RequestRefused("prompt_alt_tokens_k: not supported")
    prompt = request.prompt.tokens()
    if not prompt:
        raise RequestRefused("prompt: expected at least 1 token, got 0")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if (cells := getattr(request, name) * len(prompt)) > MOST_RANKED_CELLS:
            raise RequestRefused(f"{name}: expected at most {MOST_RANKED_CELLS} in all places, got {cells}")
    if request.target_prompt_logprobs is not None:
        _listed(request.target_prompt_logprobs, len(prompt) - 1)
    if isinstance(stop := request.sampling_params.stop, list) and len({type(one) for one in stop}) > 1:
        raise RequestRefused("sampling_params.stop: expected texts or token ids, got both")
    _sampling(request.sampling_params, ())
    return prompt


async def sample(pool: EnginePool, model: NamedModel, renderer: ChatRenderer, request: SampleBody) -> bytes:
    """Samples the request's completions; a SampleResponse. Raises `RequestRefused`, naming the field."""
    prompt = checked(request)
    strings, token_ids = stops(request.sampling_params.stop, renderer)
    sampling = _sampling(request.sampling_params, token_ids)
    completions = await pool.generate(prompt, sampling, n=request.num_samples, model=model)
    message = pb.SampleResponse()
    for completion in completions:
        kept = await asyncio.to_thread(cut, completion, strings, renderer) if strings else completion
        sequence = message.sequences.add(
            stop_reason=pb.STOP_REASON_STOP if kept.finish_reason is FinishReason.STOP else pb.STOP_REASON_LENGTH,
            tokens=np.asarray(kept.token_ids, np.int32).tobytes(),
            logprobs=np.asarray(kept.logprobs, np.float32).tobytes(),
        )
        if (most := request.topk_sample_logprobs) and kept.token_ids:
            ranked = (await pool.scored([*prompt, *kept.token_ids], most, model=model)).others
            sequence.topk_sampled_logprobs.CopyFrom(_table(ranked[-len(kept.token_ids) :], most))
    await _score_prompt(pool, model, request, prompt, message)
    return bytes(message.SerializeToString())


async def _score_prompt(
    pool: EnginePool, model: NamedModel, request: SampleBody, prompt: Sequence[int], message: pb.SampleResponse
) -> None:
    """Adds the requested logprobs of the prompt's tokens."""
    most, target = request.topk_prompt_logprobs, request.target_prompt_logprobs
    if len(prompt) > 1 and (request.prompt_logprobs or most):
        scored = await pool.scored(prompt, most, model=model)
    else:
        scored = ScoreResponse([])
    unwanted = max(len(prompt) - (request.prompt_logprobs_last_n or len(prompt)), 1)
    if request.prompt_logprobs:
        logps = [NAN] * unwanted + scored.logprobs[unwanted - 1 :]
        message.prompt_logprobs = np.asarray(logps, np.float32).tobytes()
    if most:
        rows = [*[()] * unwanted, *scored.others[unwanted - 1 :]]
        message.topk_prompt_logprobs.CopyFrom(await asyncio.to_thread(_table, rows, most))
    if target is not None:
        asked = [[token for token in row if token >= 0] for row in _listed(target, len(prompt) - 1)]
        found = (await pool.scored(prompt, asked, model=model)).others
        message.target_prompt_logprobs.CopyFrom(_targets(target, len(prompt) - 1, found))


def _table(rows: Sequence[Sequence[tuple[int, float]]], most: int) -> pb.TopkLogprobs:
    filled = np.array([[*row, *[(0, EMPTY)] * (most - len(row))] for row in rows])
    ids, logps = filled[:, :, 0].astype(np.int32), filled[:, :, 1].astype(np.float32)
    return pb.TopkLogprobs(token_ids=ids.tobytes(), logprobs=logps.tobytes(), k=most, length=len(rows))


def _listed(target: ListedTokens, places: int) -> list[list[int]]:
    """Listed tokens of each position. Raises `RequestRefused` for an invalid layout."""
    shape, data = target.shape or [len(target.data)], target.data
    if len(shape) != 2 or shape[0] != places or not places or not shape[1]:
        raise RequestRefused(f"target_prompt_logprobs.shape: expected [{places}, K] with both above 0, got {shape}")
    ends, columns = target.sparse_crow_indices, target.sparse_col_indices
    if ends is None and columns is None:
        if len(data) != places * shape[1]:
            raise RequestRefused(f"target_prompt_logprobs.data: expected {places * shape[1]} ids, got {len(data)}")
        return [data[start : start + shape[1]] for start in range(0, len(data), shape[1])]
    if ends is None or len(ends) != places + 1 or ends[0] != 0 or ends[-1] != len(data) or ends != sorted(ends):
        expected = f"{places + 1} numbers that rise from 0 to {len(data)}"
        raise RequestRefused(f"target_prompt_logprobs.sparse_crow_indices: expected {expected}")
    if columns is None or len(columns) != len(data) or max(columns, default=0) >= shape[1]:
        expected = f"{len(data)} numbers from 0 to {shape[1] - 1}"
        raise RequestRefused(f"target_prompt_logprobs.sparse_col_indices: expected {expected}")
    return [data[start:end] for start, end in pairwise(ends)]


def _targets(target: ListedTokens, places: int, found: Sequence[Sequence[tuple[int, float]]]) -> pb.Tensor:
    """Logprobs of the listed tokens, in the layout of the list; a cell of -1 gets 0."""
    rows = zip(_listed(target, places), map(iter, found), strict=True)
    cells = [next(pairs)[1] if token >= 0 else 0.0 for row, pairs in rows for token in row]
    answer, values = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=target.shape), np.asarray(cells, np.float32).tobytes()
    if target.sparse_crow_indices is None:
        answer.dense = values
    else:
        answer.sparse_csr.values = values
        answer.sparse_csr.crow_indices = np.asarray(target.sparse_crow_indices, np.int64).tobytes()
        answer.sparse_csr.col_indices = np.asarray(target.sparse_col_indices, np.int64).tobytes()
    return answer


def stops(given: str | list[int | str] | None, renderer: ChatRenderer) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Stop strings, and stop tokens: the model's own for None, none for an empty list, or the listed ones."""
    if given is None:
        return (), renderer.stop_token_ids
    listed = [given] if isinstance(given, str) else given
    if token_ids := tuple(stop for stop in listed if isinstance(stop, int)):
        return (), token_ids
    strings = tuple(str(stop) for stop in listed)
    if not strings:
        return (), ()
    whole = {text: renderer.token_ids(text) for text in strings}
    single = tuple(ids[0] for ids in whole.values() if len(ids) == 1)
    return strings, (*renderer.stop_token_ids, *single)


def cut(completion: Completion, strings: Sequence[str], renderer: ChatRenderer) -> Completion:
    """The completion up to the first stop string, including the token that completes it."""
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


def _sampling(given: SamplingBody, stop_token_ids: tuple[int, ...]) -> Sampling:
    try:
        return Sampling(
            max_tokens=given.max_tokens or DEFAULT_MAX_TOKENS,
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            stop_token_ids=tuple(dict.fromkeys(stop_token_ids)),
            seed=given.seed,
        )
    except ValueError as error:
        raise RequestRefused(f"sampling_params.{error}") from None
