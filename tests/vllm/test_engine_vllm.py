"""A real vLLM behind Shoal's protocol: tokens, versions, weights under way, the canary, and a whole run."""

import asyncio
import json
import os
import re
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from engine_models import plain, saved
from external_engine import BOUND_NATS, adapters_under_way, asked, assert_drawn_by_its_versions, logprobs, more_drawn
from joining import TOKEN, joining
from shoal import wire
from shoal.engine.external.detect_server import connect
from shoal.engine.external.external_server import ForeignEngine
from shoal.engine.external.server_adapter import Abilities, StopMode
from shoal.engine.external.vllm import VLLM
from shoal.engine.pool import canary
from shoal.engine.pool.engine_pool import EnginePool
from shoal.errors import ConfigError, EngineUnavailable, RequestRefused
from shoal.experience.audit import audit
from shoal.experience.log import BODY_BYTES, read, read_step, snapshot
from shoal.experience.raw import RawRollout, read_groups
from shoal.net.listening import free_port
from shoal.run.demo_model.warm_start import demo_model
from shoal.types import MOST_KEPT, Completion, FinishReason, Sampling
from vllm_server import ENVIRONMENT, PYTHON, command_at, second_runner, vllm_serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON, reason="needs a vLLM in an environment of its own: make test-vllm"),
]
PROMPT = [1, 2, 3, 4]
EXPERTS = 8


@pytest.fixture(scope="module")
def model_dir() -> Path:
    """The embedded model, which has its head apart from its embeddings."""
    return demo_model()[0]


@pytest.fixture(scope="module")
def url(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_serving(model_dir, tmp_path_factory.mktemp("vllm") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def versions(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Directories of weights: the model's own, and three that differ from it in every tensor."""
    folder = tmp_path_factory.mktemp("weights")
    return [model_dir, *(changed(model_dir, folder / f"v{version}", version) for version in (1, 2, 3))]


def changed(model: Path, folder: Path, seed: int) -> Path:
    """Weights a little away from the model's, with their canary."""
    folder.mkdir()
    torch.manual_seed(seed)
    tensors = load_file(model / "model.safetensors")
    save_file({name: t + 0.02 * torch.randn_like(t) for name, t in tensors.items()}, folder / "model.safetensors")
    row = tuple(range(3, 60))
    canary.write(canary.Canary(row, tuple(logprobs(model, folder, row)), 1e-3), folder)
    return folder


def test_versions_that_are_adapters_are_loaded_beside_the_weights(model_dir: Path, tmp_path: Path) -> None:
    async def body(engine: ForeignEngine) -> None:
        await adapters_under_way(engine, PROMPT, model_dir, tmp_path)

    more = ("--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4")
    with vllm_serving(model_dir, tmp_path / "log", *more) as url:
        asked(url, model_dir, body, "drain", adapters=True)


def test_ids_logprobs_and_scores_are_those_of_the_model(url: str, model_dir: Path) -> None:
    async def body(engine: ForeignEngine) -> None:
        first = await engine.generate(PROMPT, Sampling(40, seed=3), n=3)
        assert len({c.token_ids for c in first}) == 3
        for completion in first:
            assert_drawn_by_its_versions(completion, PROMPT, model_dir, [model_dir])
        row = [*PROMPT, *first[0].token_ids]
        scored, computed = (await engine.scored(row)).logprobs, logprobs(model_dir, model_dir, row)
        assert max(abs(a - b) for a, b in zip(scored, computed, strict=True)) < BOUND_NATS
        greedy = [(await engine.generate(PROMPT, Sampling(40, temperature=0)))[0].token_ids for _ in range(2)]
        assert greedy[0] == greedy[1]
        stop = greedy[0][5]
        (stopped,) = await engine.generate(PROMPT, Sampling(40, temperature=0, stop_token_ids=(stop,)))
        assert stopped.finish_reason is FinishReason.STOP
        assert stopped.token_ids == greedy[0][: greedy[0].index(stop) + 1]
        info = await engine.info()
        assert (info.version, info.max_model_len) == (0, 512)
        assert info.tokens_drawn >= 200
        with pytest.raises(RequestRefused):
            await engine.generate([10**6], Sampling(4))

    asked(url, model_dir, body, "recompute")


@pytest.mark.parametrize("on_update", ["recompute", "keep", "drain"])
def test_weights_under_way_and_every_token_has_the_version_that_drew_it(
    url: str, model_dir: Path, versions: list[Path], on_update: str
) -> None:
    async def body(engine: ForeignEngine) -> None:
        tasks = [asyncio.create_task(engine.generate([*PROMPT, i], Sampling(450))) for i in range(24)]
        for version in (1, 2, 3):
            await more_drawn(engine, 500, tasks)
            await engine.update_weights(version, versions[version] / "model.safetensors")
        answers = [(await task)[0] for task in tasks]
        assert all(len(answer.token_ids) == 450 for answer in answers)
        spread = {len(set(answer.versions)) for answer in answers}
        assert (max(spread) > 1) == (on_update != "drain")
        if on_update != "keep":  # whose KV is of older weights on purpose
            for i in (0, 11, 23):
                assert_drawn_by_its_versions(answers[i], [*PROMPT, i], model_dir, versions)
        (after,) = await engine.generate(PROMPT, Sampling(30))
        assert set(after.versions) == {3}
        assert_drawn_by_its_versions(after, PROMPT, model_dir, versions)

    asked(url, model_dir, body, on_update)


async def test_the_base_path_aborts_keeps_the_partial_answer_and_sends_it_again(
    url: str, model_dir: Path, versions: list[Path]
) -> None:
    class Older(VLLM):
        """A server that cannot keep requests."""

        async def abilities(self) -> Abilities:
            return replace(await super().abilities(), keeps_requests=False)

    sampling = Sampling(8)
    engine = await ForeignEngine.start(Older(url), on_update="recompute", model_dir=model_dir, sampling=sampling)
    assert engine.how is StopMode.ABORT
    pool = EnginePool()
    await pool.join("vllm", engine)
    tasks = [asyncio.create_task(pool.generate([*PROMPT, i], Sampling(450, seed=i), n=2)) for i in range(12)]
    for version in (1, 2):
        await more_drawn(engine, 500, tasks)
        await pool.update_weights(version, versions[version])
    answers = [completion for task in tasks for completion in await task]
    assert all(len(c.token_ids) == 450 and c.finish_reason is FinishReason.LENGTH for c in answers)
    assert all(set(c.versions) <= {0, 1, 2} for c in answers)
    assert any(set(c.versions) == {0, 1, 2} for c in answers)  # cut off twice; on a busy machine not all are
    for i in (0, 11):
        assert_drawn_by_its_versions(answers[2 * i + 1], [*PROMPT, i], model_dir, versions)
    await pool.aclose()


def test_a_server_that_lost_its_weights_is_given_the_newest_again(
    url: str, model_dir: Path, versions: list[Path]
) -> None:
    async def body(engine: ForeignEngine) -> None:
        pool = EnginePool(check_every_s=0.1)
        await pool.join("vllm", engine)
        await pool.update_weights(2, versions[2])
        adapter = VLLM(url)
        await adapter.stop(StopMode.ABORT)  # what a restart comes to
        await adapter.load(model_dir, 0, StopMode.ABORT)
        await adapter._client.post("/update_weight_version", {"new_version": "default"})
        await adapter.resume()
        await adapter.aclose()
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(pool.watch())
            assert (await pool.info()).version == 2
            (answer,) = await pool.generate(PROMPT, Sampling(20))
            watching.cancel()
        assert_drawn_by_its_versions(answer, PROMPT, model_dir, versions)

    asked(url, model_dir, body, "recompute")


def test_what_cannot_work_is_refused_in_words(url: str, model_dir: Path, tmp_path: Path) -> None:
    async def body(engine: ForeignEngine) -> None:
        with pytest.raises(RequestRefused, match="do not exist"):
            await engine.update_weights(1, tmp_path / "nowhere")
        with pytest.raises(ConfigError, match="another server"):
            await connect(f"{url}/nowhere", on_update="keep", model_dir=model_dir, sampling=Sampling(8))

    asked(url, model_dir, body, "keep")


def test_the_canary_catches_a_head_that_stays_behind(model_dir: Path, tmp_path: Path) -> None:
    """vLLM on a CPU keeps the old head of a model with tied embeddings, and says that all went well."""
    tied = tmp_path / "tied"
    tied.mkdir()
    for file in model_dir.iterdir():
        if file.suffix != ".safetensors":
            (tied / file.name).write_bytes(file.read_bytes())
    settings = AutoConfig.from_pretrained(model_dir, tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(settings).save_pretrained(tied)
    pushed = changed(tied, tmp_path / "pushed", 1)

    async def body(engine: ForeignEngine) -> None:
        await engine.generate(PROMPT, Sampling(4))
        with pytest.raises(RequestRefused, match="computes with other weights"):
            await engine.update_weights(1, pushed)
        with pytest.raises(EngineUnavailable, match="no whole weights"):
            await engine.generate(PROMPT, Sampling(4))

    with vllm_serving(tied, tmp_path / "log") as url:
        asked(url, tied, body, "recompute")


def trained(folder: Path, *overrides: str, steps: int = 20, **environment: str) -> Path:
    """The directory of a run of 20 steps, in whose course most answers see several Versions."""
    rewrite = [r"^Spell this word backward \(example: sun -> nus\): (\w+)$", r"reverse \1"]
    task = {"name": "spell_backward", "reward": ["score", "length:0.001"], "rewrite": [rewrite]}
    own = [
        # As hot as vLLM draws: answers end late, and hundreds of them are under way when weights come.
        *("--rollout.group_size=8", "--rollout.max_tokens=200", "--rollout.temperature=2"),
        *(f"--train.steps={steps}", "--train.lr=1e-4", "--eval.every_steps=0", "--eval.questions=16"),
    ]
    params = "{min_word_len = 8, max_word_len = 14}"
    written = "\n".join(f"{key} = {json.dumps(value)}" for key, value in task.items())
    (folder / "run.toml").write_text(f'run_dir = "run"\n[[tasks]]\n{written}\nparams = {params}\n')
    command = [sys.executable, "-m", "shoal.cli", "train", "run.toml", "--json", *own, *overrides]
    env = {**os.environ, **environment}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == steps
    return folder / "run"


def assert_trained_on_what_was_drawn(run_dir: Path, count: int = 20) -> list[dict[str, float]]:
    """The audit is clean, each Version was loaded, and its tokens have the logprobs that the trainer computes.

    Returns the records of the steps.
    """
    report = audit(run_dir)
    assert report.ok, report.sentences()
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["kind"] == "step"]
    assert [step["version"] for step in steps] == list(range(count))
    assert sum(step["failed"] for step in steps) == 0
    fresh = [step["mismatch_fresh"] for step in steps if "mismatch_fresh" in step]
    assert fresh
    assert max(fresh) < BOUND_NATS
    return steps


def test_a_whole_run_trains_on_vllm_with_weights_pushed_under_way(url: str, tmp_path: Path) -> None:
    run_dir = trained(tmp_path, f"--engine.urls={json.dumps([url])}")
    assert_trained_on_what_was_drawn(run_dir)
    spread = [len(versions) for versions in trained_versions(run_dir)]
    assert sum(count > 1 for count in spread) > len(spread) / 20, Counter(spread)


def assert_sampled_among_what_was_told(completion: Completion, temperature: float, model: Path) -> list[list[int]]:
    """Each token's logprob is that among the tokens which could be sampled, in float64. Returns these tokens."""
    row = torch.tensor([[*PROMPT, *completion.token_ids]])
    with torch.no_grad():
        logits_LV = plain(model)(row).logits[0, len(PROMPT) - 1 : -1].double() / temperature
    kept = [list(array("I", ids)) for ids in completion.kept]
    for z_V, ids, token, logprob in zip(logits_LV, kept, completion.token_ids, completion.logprobs, strict=True):
        assert float(z_V[token] - z_V[ids].logsumexp(0)) == pytest.approx(logprob, abs=BOUND_NATS)
    return kept


def test_the_tokens_told_are_those_of_top_k_and_top_p(url: str, model_dir: Path) -> None:
    async def body(engine: ForeignEngine) -> None:
        for sampling in (Sampling(40, 0.7, top_k=5, top_p=0.9), Sampling(40, 1.5, top_k=MOST_KEPT, top_p=0.8)):
            sizes: set[int] = set()
            for completion in await engine.generate(PROMPT, sampling, n=2):
                sizes |= {
                    len(ids) for ids in assert_sampled_among_what_was_told(completion, sampling.temperature, model_dir)
                }
            assert max(sizes) <= sampling.top_k

    asked(url, model_dir, body, "recompute")


def test_under_a_grammar_the_tokens_told_are_those_that_it_allows(url: str, model_dir: Path) -> None:
    async def body(engine: ForeignEngine) -> None:
        grammar = 'start: "reverse " /[ab]{2,6}/'
        sampling = Sampling(40, top_k=20, stop_token_ids=(1,), grammar=grammar)
        tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
        for completion in await engine.generate(PROMPT, sampling, n=4):
            assert completion.finish_reason is FinishReason.STOP
            assert re.fullmatch("reverse [ab]{2,6}", tokenizer.decode(completion.token_ids[:-1]))
            kept = assert_sampled_among_what_was_told(completion, 1.0, model_dir)
            assert len(kept[0]) < 20
        for refused in (replace(sampling, top_k=0), replace(sampling, begun=1)):
            with pytest.raises(RequestRefused, match="response_format, tool_choice"):
                await engine.generate(PROMPT, refused)

    asked(url, model_dir, body, "recompute")


TRUNCATED = ("--rollout.top_p=0.9", "--rollout.temperature=1", "--asynchrony.max_staleness=0")


def assert_trained_among_what_could_be_sampled(run_dir: Path, steps: int, most: int) -> list[Completion]:
    """Under the weights that sampled, each token has the probability that it was sampled with. Returns the answers."""
    for step in assert_trained_on_what_was_drawn(run_dir, steps):
        assert step["ratio_max"] == pytest.approx(1, abs=1e-3), step
    groups = [group for at in range(steps) for group in read(run_dir, lambda log, at=at: read_step(log, at))]
    answers = [one.turns[0].completion for group in groups for one in group.rollouts]
    sizes = {len(ids) // 4 for answer in answers for ids in answer.kept}
    assert len(sizes) > 1
    assert max(sizes) <= most
    return answers


@pytest.mark.timeout(900)
def test_a_mixture_of_experts_trains_on_vllm_with_adapters_masks_and_replay(model_dir: Path, tmp_path: Path) -> None:
    model, layers = mixture(model_dir, tmp_path / "mixture"), ["q_proj", "k_proj", "v_proj", "o_proj"]
    flags = ["--enable-return-routed-experts", "--return-sampling-mask", "--enforce-eager", "--enable-lora"]
    flags += ["--max-lora-rank", "8", "--max-loras", "2", "--max-cpu-loras", "4", "--lora-target-modules", *layers]
    with vllm_serving(model, tmp_path / "log", *flags, **second_runner(tmp_path / "plugin")) as url:
        run_dir = trained(
            tmp_path,
            *(f"--model.path={model}", f"--engine.urls={json.dumps([url])}", "--engine.adapters=true"),
            *("--train.lora.rank=4", f"--train.lora.targets={json.dumps(layers)}", "--train.router_replay=true"),
            *(*TRUNCATED, "--rollout.top_k=6", "--rollout.max_tokens=16", "--rollout.group_size=4"),
            *("--train.groups_per_step=2", "--train.lr=1e-2", "--eval.questions=2"),
            steps=4,
        )
    for answer in assert_trained_among_what_could_be_sampled(run_dir, 4, 6):
        assert answer.routing
        assert max(answer.routing) < EXPERTS
    assert {version for versions in trained_versions(run_dir) for version in versions} == {0, 1, 2, 3}
    assert (run_dir / "adapter" / "adapter_model.safetensors").exists()


def mixture(model_dir: Path, folder: Path) -> Path:
    """A random mixture of experts with the tokenizer of a model."""
    shape = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32, "num_key_value_heads": 2}
    saved("Qwen3Moe", folder, vocabulary=102, num_experts=EXPERTS, max_position_embeddings=512, **shape)
    for file in model_dir.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.timeout(1200)
def test_a_whole_run_trains_on_vllm_of_another_host_that_pulls_differences(tmp_path: Path) -> None:
    port, host = free_port(), tmp_path / "host"
    command = ("--", *command_at("{model}", "{port}"))
    role = joining(host, "engine", "join", f"http://127.0.0.1:{port}", *command, **ENVIRONMENT)
    try:
        listen = f"--cluster.listen=127.0.0.1:{port}"
        run_dir = trained(tmp_path, "--engine.count=0", listen, SHOAL_RUN_TOKEN=TOKEN)
    finally:
        role.terminate()
        role.wait(60)
    assert_trained_on_what_was_drawn(run_dir)
    pulled = sorted(path.name for path in host.glob("shoal-engine/*/v*"))
    assert pulled[0] == "v0"
    assert int(pulled[-1][1:]) >= 19


def trained_versions(run_dir: Path) -> list[set[int]]:
    """The Versions that drew each answer which was trained."""
    with snapshot(run_dir) as connection:
        bodies = [body for group in read_groups(connection) if group.step is not None for body in group.bodies]
    return [set(wire.decode(body, RawRollout, BODY_BYTES).sampled_versions) for body in bodies]
