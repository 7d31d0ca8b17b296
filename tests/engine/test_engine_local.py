"""The local engine against plain forwards of the same model, one sequence at a time."""

import math
import random
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from engine_models import plain, saved
from shoal.engine.compute.options import EngineLimits, OnUpdate, PauseMode
from shoal.engine.compute.request import Draft, Request, scoring
from shoal.engine.compute.step_engine import StepEngine
from shoal.errors import EngineUnavailable, RequestRefused
from shoal.files import checksum
from shoal.model.loading import load_model
from shoal.types import FinishReason, Sampling

VOCABULARY = 97
MAX_MODEL_LEN = 160
KINDS: dict[str, dict[str, object]] = {
    "Qwen2": {"num_key_value_heads": 2},
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "Llama": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    "GPTNeoX": {},
    "Gemma": {"num_key_value_heads": 2, "head_dim": 16},  # ties its embeddings
    "Mistral": {"num_key_value_heads": 2, "sliding_window": 20},
    "SeedOss": {"num_key_value_heads": 2, "head_dim": 16},
}


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {kind: saved(kind, tmp_path_factory.mktemp(kind), **KINDS[kind]) for kind in KINDS}


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen2 weights from another seed."""
    return saved("Qwen2", tmp_path_factory.mktemp("other"), seed=1, **KINDS["Qwen2"])


def engine(path: Path, *, on_update: OnUpdate = OnUpdate.RECOMPUTE, seed: int = 0, **limits: int) -> StepEngine:
    limits = {"max_model_len": MAX_MODEL_LEN, "max_running": 4, "chunk_tokens": 24, **limits}
    return StepEngine(load_model(path), EngineLimits(**limits), on_update=on_update, seed=seed)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def forced(model: PreTrainedModel, prompt: Sequence[int], drawn: Sequence[int]) -> list[float]:
    """Logprobs of the drawn tokens at temperature 1, by one full forward."""
    logp_LV = model(torch.tensor([[*prompt, *drawn]])).logits[0].log_softmax(-1)
    return [float(logp_LV[len(prompt) - 1 + i, token]) for i, token in enumerate(drawn)]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed * 1000 + length).choices(range(2, VOCABULARY), k=length)


def finish(engine: StepEngine) -> list[Request]:
    """Steps until nothing is left to do."""
    done = []
    while not engine.idle:
        done += engine.step()
    return done


def drafts(requests: Sequence[Request]) -> list[Draft]:
    return [draft for request in requests for draft in request.drafts]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_logprobs_equal_plain_forwards_while_requests_come_and_go(
    kind: str, directories: dict[str, Path]
) -> None:
    served, model = engine(directories[kind]), plain(directories[kind])
    chosen = random.Random(1)
    requests = []
    for i in range(8):
        sampling = Sampling(chosen.choice([1, 5, 30, 120]), temperature=0)
        requests.append(Request(prompt_of(chosen.choice([1, 7, 7, 38]), i), sampling, n=chosen.choice([1, 1, 3])))
        served.submit(requests[-1])
        for _ in range(chosen.randrange(6)):
            served.step()
    finish(served)
    for draft in drafts(requests):
        assert draft.sampled == greedy(model, draft.prompt_ids, draft.sampling.max_tokens)
        assert draft.logprobs == pytest.approx(forced(model, draft.prompt_ids, draft.sampled), abs=1e-4)
        assert draft.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_of_sampled_tokens_and_scores_agree_with_a_full_forward(
    kind: str, directories: dict[str, Path]
) -> None:
    served, model = engine(directories[kind]), plain(directories[kind])
    requests = [Request(prompt_of(9, i), Sampling(25), n=3) for i in range(3)]
    for request in requests:
        served.submit(request)
    finish(served)
    for draft in drafts(requests):
        expected = forced(model, draft.prompt_ids, draft.sampled)
        assert draft.logprobs == pytest.approx(expected, abs=1e-4)
        asked = scoring([*draft.prompt_ids, *draft.sampled])
        served.submit(asked)
        finish(served)
        assert asked.drafts[0].scores[draft.prompt_len - 1 :] == pytest.approx(expected, abs=1e-4)
    assert len({tuple(draft.sampled) for draft in drafts(requests)}) == 9


def test_tokens_after_an_update_follow_the_new_weights_and_their_versions_say_so(
    directories: dict[str, Path], other_weights: Path
) -> None:
    served = engine(directories["Qwen2"])
    request = Request(prompt_of(8), Sampling(30, temperature=0))
    served.submit(request)
    for _ in range(10):
        served.step()
    served.update(served.slots.staged(3, other_weights, None))
    finish(served)
    (draft,) = request.drafts
    old, new = plain(directories["Qwen2"]), plain(other_weights)
    assert draft.sampled[:10] == greedy(old, request.prompt_ids, 10)
    assert draft.sampled[10:] == greedy(new, [*request.prompt_ids, *draft.sampled[:10]], 20)
    assert draft.versions == [0] * 10 + [3] * 20
    assert (served.version, served.interruptions) == (3, 1)
    assert served.checksum == checksum(other_weights / "model.safetensors")


@pytest.mark.parametrize("interrupted", [False, True])
def test_numbers_that_overflowed_under_other_weights_reach_no_later_answer(
    interrupted: bool, directories: dict[str, Path], tmp_path: Path
) -> None:
    weights = load_file(directories["Qwen2"] / "model.safetensors")
    huge = {name: weight * (1e38 if "v_proj" in name else 1) for name, weight in weights.items()}
    save_file(huge, tmp_path / "model.safetensors", {"format": "pt"})
    served, model = engine(directories["Qwen2"]), plain(directories["Qwen2"])
    served.update(served.slots.staged(1, tmp_path, None))
    for i, length in enumerate((30, 20, 3)):
        served.submit(Request(prompt_of(length, i), Sampling(12, temperature=0)))
    for _ in range(6):
        served.step()
    if not interrupted:
        finish(served)
    served.update(served.slots.staged(2, directories["Qwen2"], None))
    later = [Request(prompt_of(length, 5), Sampling(20, temperature=0)) for length in (2, 14, 9, 5)]
    for request in later:
        served.submit(request)
    finish(served)
    for request in later:
        assert request.drafts[0].sampled == greedy(model, request.prompt_ids, 20)


def test_kept_kv_is_counted_and_new_requests_do_not_reuse_it(directories: dict[str, Path], other_weights: Path) -> None:
    served = engine(directories["Qwen2"], on_update=OnUpdate.KEEP)
    first = Request(prompt_of(8), Sampling(30, temperature=0))
    served.submit(first)
    for _ in range(10):
        served.step()
    served.update(served.slots.staged(1, other_weights, None))
    prefilled = served.tokens_prefilled
    second = Request(prompt_of(8), Sampling(10, temperature=0))
    served.submit(second)
    finish(served)
    assert served.stale_sequences == 1
    assert served.tokens_prefilled - prefilled == 8
    assert first.drafts[0].versions == [0] * 10 + [1] * 20
    assert second.drafts[0].sampled == greedy(plain(other_weights), second.prompt_ids, 10)


def test_tokens_drawn_on_kept_kv_are_counted(directories: dict[str, Path], other_weights: Path) -> None:
    served = engine(directories["Qwen2"], on_update=OnUpdate.KEEP)
    first, later = (Request(prompt_of(8, seed), Sampling(30, temperature=0)) for seed in range(2))
    served.submit(first)
    for version in (3, 5):
        for _ in range(10):
            served.step()
        served.update(served.slots.staged(version, other_weights, None))
        served.submit(Request(prompt_of(9, version), Sampling(1)))
    served.submit(later)
    finish(served)
    assert first.drafts[0].versions == [0] * 10 + [3] * 10 + [5] * 10
    assert later.drafts[0].versions == [5] * 30
    assert (served.stale_sequences, served.stale_tokens) == (2, 20)


def test_draining_lets_running_answers_finish_first_and_the_newest_update_wins(
    directories: dict[str, Path], other_weights: Path
) -> None:
    served = engine(directories["Qwen2"], on_update=OnUpdate.DRAIN, max_running=1)
    requests = [Request(prompt_of(8), Sampling(10, temperature=0)) for _ in range(2)]
    for request in requests:
        served.submit(request)
    served.step()
    superseded: Future[int] = served.update(served.slots.staged(1, directories["Qwen2"], None))
    newest: Future[int] = served.update(served.slots.staged(2, other_weights, None))
    late: Future[int] = served.update(served.slots.staged(1, directories["Qwen2"], None))
    finish(served)
    assert superseded.result(0) == newest.result(0) == late.result(0) == 2
    assert served.update(served.slots.staged(1, directories["Qwen2"], None)).result(0) == served.version == 2
    with pytest.raises(RequestRefused, match="2 is served, expected no older one, got 1"):
        served.check_update(1)
    assert requests[0].drafts[0].versions == [0] * 10
    assert requests[1].drafts[0].versions == [2] * 10
    assert requests[1].drafts[0].sampled == greedy(plain(other_weights), requests[1].prompt_ids, 10)


def test_an_update_while_nothing_runs_interrupts_nothing(directories: dict[str, Path], other_weights: Path) -> None:
    served = engine(directories["Qwen2"])
    served.update(served.slots.staged(1, other_weights, None))
    finish(served)
    assert (served.version, served.interruptions, served.tokens_prefilled) == (1, 0, 0)


@pytest.mark.parametrize("kind", ["Gemma", "Llama"])
def test_tied_embeddings_stay_tied_when_weights_are_loaded(
    kind: str, directories: dict[str, Path], tmp_path: Path
) -> None:
    other = saved(kind, tmp_path / "other", seed=3, **KINDS[kind])
    served = engine(directories[kind])
    served.update(served.slots.staged(1, other, None))
    request = Request(prompt_of(6), Sampling(12, temperature=0))
    served.submit(request)
    finish(served)
    assert request.drafts[0].logprobs == pytest.approx(
        forced(plain(other), request.prompt_ids, request.drafts[0].sampled), abs=1e-4
    )


def with_last(tensor: torch.Tensor, number: float) -> torch.Tensor:
    """A copy whose last number is another."""
    changed = tensor.clone()
    changed.view(-1)[-1] = number
    return changed


def test_weights_that_are_not_right_are_refused_and_change_nothing(
    directories: dict[str, Path], other_weights: Path, tmp_path: Path
) -> None:
    served = engine(directories["Qwen2"])
    before = {name: tensor.clone() for name, tensor in served.model.state_dict().items()}
    tensors = load_file(other_weights / "model.safetensors")
    good = tmp_path / "good.safetensors"
    save_file(tensors, good)
    name = "model.norm.weight"
    wrong = {
        "expected shape": {**tensors, name: tensors[name][:16].clone()},
        "is missing": {key: value for key, value in tensors.items() if key != name},
        "no tensor 'extra'": {**tensors, "extra": tensors[name].clone()},
        "expected one of torch.float32, .*, got torch.float8_e4m3fn": {
            **tensors,
            name: tensors[name].to(torch.float8_e4m3fn),
        },
        "expected one of torch.float32, .*, got torch.complex64": {**tensors, name: tensors[name].to(torch.complex64)},
        **{
            f"{broken}' holds numbers that are not finite": {**tensors, broken: with_last(tensors[broken], number)}
            for broken, number in zip(sorted(tensors), (math.nan, math.inf, -math.inf), strict=False)
        },
    }
    for message, content in wrong.items():
        bad = tmp_path / "bad.safetensors"
        save_file(content, bad)
        with pytest.raises(RequestRefused, match=message):
            served.slots.staged(1, bad, None)
    with pytest.raises(RequestRefused, match="expected checksum 00, got"):
        served.slots.staged(1, good, "00")
    with pytest.raises(RequestRefused, match="cannot be read"):
        served.slots.staged(1, tmp_path / "nowhere", None)
    (tmp_path / "torn.safetensors").write_bytes(good.read_bytes()[:2000])
    with pytest.raises(RequestRefused, match="cannot be read"):
        served.slots.staged(1, tmp_path / "torn.safetensors", None)
    (tmp_path / "checksum").write_text("11")
    with pytest.raises(RequestRefused, match="expected checksum 11"):
        served.slots.staged(1, good, None)
    assert served.slots.staged(1, good, checksum(good)).checksum == checksum(good)
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.model.state_dict().items())


def test_the_context_limit_ends_an_answer_with_length(directories: dict[str, Path]) -> None:
    served = engine(directories["Qwen2"], max_model_len=40)
    requests = [Request(prompt_of(30), Sampling(1000)), Request(prompt_of(39), Sampling(1000))]
    for request in requests:
        served.check(request)
        served.submit(request)
    finish(served)
    assert [len(draft.sampled) for draft in drafts(requests)] == [10, 1]
    assert {draft.finish_reason for draft in drafts(requests)} == {FinishReason.LENGTH}
    with pytest.raises(RequestRefused, match="1 to 39 tokens, got 40"):
        served.check(Request(prompt_of(40), Sampling(1)))


def test_pausing_keeps_aborts_or_waits(directories: dict[str, Path]) -> None:
    served = engine(directories["Qwen2"])
    request = Request(prompt_of(8), Sampling(30, temperature=0))
    served.submit(request)
    for _ in range(5):
        served.step()
    served.pause(PauseMode.KEEP)
    served.step()
    assert len(request.drafts[0].sampled) == 5
    assert served.idle
    served.resume()
    emptied = served.pause(PauseMode.WAIT)
    with pytest.raises(EngineUnavailable, match="paused"):
        served.submit(Request(prompt_of(8), Sampling(3)))
    assert not emptied.done()
    finish(served)
    assert emptied.done()
    assert request.drafts[0].sampled == greedy(plain(directories["Qwen2"]), request.prompt_ids, 30)
    served.resume()
    aborted = Request(prompt_of(8), Sampling(30, temperature=0), n=6)
    served.submit(aborted)
    for _ in range(5):
        served.step()
    assert served.pause(PauseMode.ABORT).done()
    assert finish(served) == [aborted]
    assert [len(draft.sampled) for draft in aborted.drafts] == [5, 5, 5, 5, 0, 0]
    assert aborted.drafts[0].finish_reason is FinishReason.ABORT


def test_a_full_queue_is_refused(directories: dict[str, Path]) -> None:
    served = engine(directories["Qwen2"], max_waiting=3)
    served.submit(Request(prompt_of(4), Sampling(3), n=3))
    with pytest.raises(EngineUnavailable, match="queue is full"):
        served.submit(Request(prompt_of(4), Sampling(3)))


def test_running_out_of_memory_preempts_and_loses_nothing(directories: dict[str, Path]) -> None:
    served = engine(directories["Qwen2"], max_running=4, kv_tokens=MAX_MODEL_LEN + 140)
    requests = [Request(prompt_of(100, i), Sampling(50, temperature=0)) for i in range(4)]
    for request in requests:
        served.submit(request)
    finish(served)
    assert served.preemptions > 0
    model = plain(directories["Qwen2"])
    for draft in drafts(requests):
        assert draft.sampled == greedy(model, draft.prompt_ids, 50)


def test_the_next_turn_of_a_conversation_computes_only_what_is_new(directories: dict[str, Path]) -> None:
    served, model = engine(directories["Qwen2"]), plain(directories["Qwen2"])
    conversation = prompt_of(30)
    for turn in range(4):
        before = (served.tokens_prefilled, served.prefix_tokens_reused)
        request = Request(list(conversation), Sampling(7, temperature=0))
        served.submit(request)
        finish(served)
        (draft,) = request.drafts
        assert draft.sampled == greedy(model, conversation, 7)
        assert draft.logprobs == pytest.approx(forced(model, conversation, draft.sampled), abs=1e-4)
        reused = served.prefix_tokens_reused - before[1]
        assert reused == (0 if turn == 0 else len(conversation) - 6)  # the last drawn token was never computed
        assert served.tokens_prefilled - before[0] == len(conversation) - reused
        conversation += [*draft.sampled, *prompt_of(5, turn)]


@pytest.mark.parametrize("on_update", [OnUpdate.RECOMPUTE, OnUpdate.KEEP])
def test_kv_of_ended_sequences_is_not_used_under_other_weights(
    on_update: OnUpdate, directories: dict[str, Path], other_weights: Path
) -> None:
    served = engine(directories["Qwen2"], on_update=on_update)
    for path, version in ((directories["Qwen2"], 1), (other_weights, 2)):
        served.update(served.slots.staged(version, path, None))
        first = Request(prompt_of(30), Sampling(20, temperature=0))
        served.submit(first)
        finish(served)
        assert first.drafts[0].sampled == greedy(plain(path), prompt_of(30), 20)
        assert served.prefix_tokens_reused == 0
    running = Request(prompt_of(30), Sampling(20, temperature=0))
    served.submit(running)
    for _ in range(3):
        served.step()
    reused = served.prefix_tokens_reused
    served.update(served.slots.staged(3, directories["Qwen2"], None))
    served.step()  # loads; `running` now is of both weights under `keep`
    finish(served)
    after = Request(prompt_of(30), Sampling(20, temperature=0))
    served.submit(after)
    finish(served)
    assert after.drafts[0].sampled == greedy(plain(directories["Qwen2"]), prompt_of(30), 20)
    assert served.prefix_tokens_reused - reused == (29 if on_update is OnUpdate.RECOMPUTE else 0)


def test_what_is_kept_of_ended_sequences_is_bounded_or_nothing(directories: dict[str, Path]) -> None:
    for most_bytes in (0, 20_000):
        served = engine(directories["Qwen2"], prefix_cache_bytes=most_bytes)
        for i in range(20):
            served.submit(Request(prompt_of(30, i), Sampling(10)))
        finish(served)
        size_bytes = served.prefix_cache_bytes
        assert size_bytes <= most_bytes
        assert (size_bytes > 0) == (most_bytes > 0)


def test_requests_with_one_prompt_prefill_it_once(directories: dict[str, Path]) -> None:
    served, model = engine(directories["Qwen2"]), plain(directories["Qwen2"])
    requests = [Request(prompt_of(20), Sampling(count, temperature=0)) for count in (4, 9, 30)]
    for request in requests:
        served.submit(request)
    finish(served)
    assert served.tokens_prefilled == 20
    for draft in drafts(requests):
        assert draft.sampled == greedy(model, prompt_of(20), draft.sampling.max_tokens)


def test_prompts_are_scored_in_chunks_through_interruptions_and_next_to_decoding(
    directories: dict[str, Path],
) -> None:
    path = directories["Qwen2"]
    served, model = engine(path), plain(path)  # chunks of 24
    running = Request(prompt_of(9), Sampling(40, temperature=0))
    served.submit(running)
    served.step()
    asked = Request(prompt_of(100), Sampling(5, temperature=0), n=3)
    alone = scoring(prompt_of(160))
    for request in (asked, alone):
        served.submit(request)
    for _ in range(2):
        served.step()
    served.update(served.slots.staged(1, path, None))
    finish(served)
    tokens = prompt_of(100)
    assert [draft.sampled for draft in asked.drafts] == [greedy(model, tokens, 5)] * 3
    assert alone.drafts[0].scores == pytest.approx(forced(model, prompt_of(160)[:1], prompt_of(160)[1:]), abs=1e-4)
    assert alone.drafts[0].sampled == []
    assert running.drafts[0].sampled == greedy(model, prompt_of(9), 40)
    assert served.tokens_drawn == 40 + 15


@pytest.mark.parametrize("interruptions", [1, 20])
def test_an_answer_interrupted_up_to_20_times_equals_the_uninterrupted_one(
    interruptions: int, directories: dict[str, Path]
) -> None:
    path = directories["Qwen2"]
    for sampling in (Sampling(60, temperature=0), Sampling(60, seed=3)):
        whole = Request(prompt_of(12), sampling)
        undisturbed = engine(path)
        undisturbed.submit(whole)
        finish(undisturbed)
        cut = Request(prompt_of(12), sampling)
        served = engine(path)
        served.submit(cut)
        for version in range(1, interruptions + 1):
            served.step()
            served.step()
            served.update(served.slots.staged(version, path, None))
        finish(served)
        assert served.interruptions == interruptions
        assert cut.drafts[0].sampled == whole.drafts[0].sampled
        assert cut.drafts[0].logprobs == pytest.approx(whole.drafts[0].logprobs, abs=1e-4)
        assert set(cut.drafts[0].versions) == set(range(interruptions + 1))
