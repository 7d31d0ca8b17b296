"""Adapters by name: several on one base model in one engine, against models that each have one of them merged."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel

from engine_models import plain, saved
from engine_server import PROMPT, threaded
from shoal.engine.compute.adapters import PREFIX, SETTINGS, UNSUPPORTED
from shoal.engine.compute.options import EngineLimits, OnUpdate
from shoal.engine.compute.request import Request, scoring
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.server.http_client import HttpEngine
from shoal.errors import RequestRefused
from shoal.files import ADAPTER_FILE
from shoal.model.loading import load_model
from shoal.types import FinishReason, Sampling

KINDS: dict[str, dict[str, object]] = {
    "Qwen3": {"num_key_value_heads": 2, "head_dim": 16},  # joint products
    "GPTNeoX": {},  # transformers' modules
}
SOME = {"qwen3": "e_proj", "gpt_neox": "dense"}
PROMPTS = ([5, 6, 7, 8, 9] * 6, [20, 21, 22, 23] * 5, [40, 41])
GREEDY = Sampling(max_tokens=12, temperature=0.0)


def adapter(model_dir: Path, folder: Path, seed: int, layers: str = "", **settings: object) -> Path:
    """A random adapter of the linear layers whose name has that ending, as peft writes it."""
    generator = torch.Generator().manual_seed(seed)
    rank, tensors = 2 + seed % 3, {}
    for name, module in plain(model_dir).named_modules():
        if isinstance(module, nn.Linear) and name.endswith(layers) and "lm_head" not in name and "embed" not in name:
            for part, shape in (("A", (rank, module.in_features)), ("B", (module.out_features, rank))):
                key = f"{PREFIX}{name}.lora_{part}.weight"
                tensors[key] = torch.randn(shape, generator=generator) * 0.2
    folder.mkdir(parents=True)
    save_file(tensors, folder / ADAPTER_FILE)
    (folder / SETTINGS).write_text(json.dumps({"r": rank, "lora_alpha": 4.0, **settings}))
    return folder


def merged(model_dir: Path, folder: Path) -> PreTrainedModel:
    """The model with the adapter in its weights, by transformers' own attention."""
    model, tensors = plain(model_dir), load_file(folder / ADAPTER_FILE)
    scale = 4.0 / json.loads((folder / SETTINGS).read_text())["r"]
    modules = dict(model.named_modules())
    with torch.no_grad():
        for key in tensors:
            name, _, part = key.removeprefix(PREFIX).rpartition(".lora_")
            if part == "A.weight":
                modules[name].weight += scale * tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
    return model


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: Sequence[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@torch.inference_mode()
def logprobs(model: PreTrainedModel, row: Sequence[int]) -> list[float]:
    logp_LV = model(torch.tensor([list(row)])).logits[0].log_softmax(-1)
    return logp_LV[range(len(row) - 1), row[1:]].tolist()


def engine(path: Path, **settings: object) -> StepEngine:
    limits = EngineLimits(max_model_len=96, max_running=8, chunk_tokens=24, max_adapters=2)
    return StepEngine(load_model(path), limits, **settings)  # type: ignore[arg-type]


def load(ours: StepEngine, name: str, version: int, folder: Path) -> None:
    ours.load_adapter(ours.slots.adapter(name, version, folder, None))


def answered(ours: StepEngine, requests: Sequence[Request]) -> list[list[int]]:
    for request in requests:
        ours.submit(request)
    while not all(request.finished for request in requests):
        ours.step()
    return [request.drafts[0].sampled for request in requests]


@pytest.fixture(scope="module", params=KINDS)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(request.param, tmp_path_factory.mktemp(request.param), **KINDS[request.param])


def test_requests_of_two_adapters_and_of_none_share_a_batch(model_dir: Path, tmp_path: Path) -> None:
    some = SOME[json.loads((model_dir / "config.json").read_text())["model_type"]]
    folders = {
        "one": adapter(model_dir, tmp_path / "one", 1),
        "two": adapter(model_dir, tmp_path / "two", 2, some),
    }
    ours = engine(model_dir)
    for version, (name, folder) in enumerate(folders.items(), 5):
        load(ours, name, version, folder)
    theirs = {"": plain(model_dir)} | {name: merged(model_dir, folder) for name, folder in folders.items()}
    requests = [Request(prompt, GREEDY, n=2, adapter=name) for prompt in PROMPTS for name in theirs]
    wanted = [greedy(theirs[request.adapter], request.prompt_ids, 12) for request in requests]
    assert answered(ours, requests) == wanted
    assert len({tuple(row) for row in wanted}) > 6, "the adapters change the answers"
    assert answered(ours, [Request(PROMPTS[0], GREEDY, adapter=name) for name in theirs]) == wanted[:3]
    assert ours.prefix_tokens_reused > 0, "and the KV of ended sequences is each adapter's own"
    versions = {request.adapter: set(request.drafts[1].versions) for request in requests}
    assert versions == {"": {0}, "one": {5}, "two": {6}}
    scored = [scoring(PROMPTS[1], adapter=name) for name in theirs]
    answered(ours, scored)
    for request, model in zip(scored, theirs.values(), strict=True):
        assert request.drafts[0].scores == pytest.approx(logprobs(model, PROMPTS[1]), abs=1e-4)


@pytest.mark.parametrize("on_update", [OnUpdate.RECOMPUTE, OnUpdate.KEEP])
def test_a_running_answer_goes_on_under_its_adapters_next_version(
    model_dir: Path, tmp_path: Path, on_update: OnUpdate
) -> None:
    first, second = (adapter(model_dir, tmp_path / str(seed), seed) for seed in (1, 2))
    ours = engine(model_dir, on_update=on_update)
    load(ours, "mine", 1, first)
    mine, other = Request(PROMPTS[0], GREEDY, adapter="mine"), Request(PROMPTS[0], GREEDY)
    ours.submit(mine)
    ours.submit(other)
    while len(mine.drafts[0].sampled) < 5:
        ours.step()
    load(ours, "mine", 2, second)
    assert other.drafts[0].decoding, "an answer of no adapter is not computed again"
    while not (mine.finished and other.finished):
        ours.step()
    draft = mine.drafts[0]
    assert draft.versions == [1] * 5 + [2] * 7
    if on_update is OnUpdate.RECOMPUTE:
        wanted = greedy(merged(model_dir, second), [*PROMPTS[0], *draft.sampled[:5]], 7)
        assert draft.sampled[5:] == wanted
    assert (ours.stale_sequences, ours.interruptions) == (on_update is OnUpdate.KEEP, 1)
    assert other.drafts[0].sampled == greedy(plain(model_dir), PROMPTS[0], 12)
    with pytest.raises(RequestRefused, match="version: 2 of 'mine' is served, got 1"):
        load(ours, "mine", 1, first)


def test_an_unloaded_adapter_ends_its_answers_and_is_refused_afterwards(model_dir: Path, tmp_path: Path) -> None:
    ours = engine(model_dir)
    folder = adapter(model_dir, tmp_path / "one", 1)
    for name in ("one", "two"):
        load(ours, name, 1, folder)
    with pytest.raises(RequestRefused, match="2 adapters are loaded already"):
        load(ours, "three", 1, folder)
    request = Request(PROMPTS[0], GREEDY, adapter="one")
    ours.submit(request)
    for _ in range(5):
        ours.step()
    ours.unload_adapter("one")
    assert request.drafts[0].finish_reason is FinishReason.ABORT
    with pytest.raises(RequestRefused, match=r"expected the name of a loaded adapter \(two\), got 'one'"):
        ours.submit(Request(PROMPTS[0], GREEDY, adapter="one"))
    with pytest.raises(RequestRefused, match="no adapter 'one'"):
        ours.unload_adapter("one")


def test_settings_that_change_what_an_adapter_means_are_refused_by_name(model_dir: Path, tmp_path: Path) -> None:
    ours = engine(model_dir)
    for number, name in enumerate((*UNSUPPORTED, "bias")):
        folder = adapter(model_dir, tmp_path / str(number), 1, **{name: "all" if name == "bias" else True})
        with pytest.raises(RequestRefused, match=name):
            load(ours, "one", 1, folder)


async def test_clients_load_adapters_over_http_and_name_them(tmp_path: Path) -> None:
    path = saved("Qwen3", tmp_path / "model", **KINDS["Qwen3"])
    folders = [adapter(path, tmp_path / name, seed) for seed, name in enumerate(("one", "two"), 1)]

    async def ask(client: HttpEngine) -> None:
        assert await client.load_adapter("one", 3, folders[0]) == {"one": 3}
        assert await client.load_adapter("two", 1, folders[1]) == {"one": 3, "two": 1}
        answers = [(await client.generate(PROMPT, GREEDY, adapter=name))[0] for name in ("one", "two", "")]
        models = [*(merged(path, folder) for folder in folders), plain(path)]
        assert [list(one.token_ids) for one in answers] == [greedy(model, PROMPT, 12) for model in models]
        assert [one.versions[0] for one in answers] == [3, 1, 0]
        scores = (await client.scored(PROMPT, adapter="two")).logprobs
        assert scores == pytest.approx(logprobs(models[1], PROMPT), abs=1e-4)
        with pytest.raises(RequestRefused, match="below a folder given as --weights"):
            await client.load_adapter("one", 4, Path("/etc"))
        assert await client.unload_adapter("one") == {"two": 1}
        with pytest.raises(RequestRefused, match="got 'one'"):
            await client.generate(PROMPT, GREEDY, adapter="one")
        assert (await client.generate(PROMPT, GREEDY, adapter=str(path)))[0] == answers[2]

    with threaded(path, "--max-adapters=2", weights=tmp_path) as server:
        async with server.engine() as client:
            await ask(client)


async def test_weights_without_finite_logits_end_only_the_requests_that_name_them(tmp_path: Path) -> None:
    """Finite weights of one owner can be so large that their logits are not."""
    path = saved("Qwen3", tmp_path / "model", **KINDS["Qwen3"])
    folder = adapter(path, tmp_path / "huge", 1)
    save_file({name: tensor * 1e19 for name, tensor in load_file(folder / ADAPTER_FILE).items()}, folder / ADAPTER_FILE)

    async def ask(client: HttpEngine) -> None:
        (alone,) = await client.generate(PROMPT, GREEDY)
        await client.load_adapter("huge", 1, folder)
        asked = (client.generate(PROMPT, Sampling(12, seed=1), adapter="huge"), client.scored(PROMPT, adapter="huge"))
        *refused, answers = await asyncio.gather(*asked, client.generate(PROMPT, GREEDY), return_exceptions=True)
        assert all(isinstance(one, RequestRefused) and "finite" in str(one) for one in refused)
        assert answers[0].token_ids == alone.token_ids
        assert answers[0].logprobs == pytest.approx(alone.logprobs, abs=1e-4)

    with threaded(path, weights=tmp_path) as server:
        async with server.engine() as client:
            await ask(client)
