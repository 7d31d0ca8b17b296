"""What is served is what was trained: a Version in a fresh engine gives the trainer's logprobs of the same rows."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import pytest
from test_trainer import groups

from engine_models import saved
from pairwise import Case, covering, title
from quantised_files import published_gpt_oss, write_gguf
from shoal.config import Config, parse
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import scoring
from shoal.engine.compute.step_engine import StepEngine
from shoal.errors import ConfigError, TrainerError
from shoal.files import ADAPTER_FILE, MODEL_FILE
from shoal.model.loading import load_model
from shoal.model.renderer_loading import local_directory
from shoal.run.demo_model.architecture import Shape, untrained
from shoal.run.policy import PARITY_BOUND_NATS
from shoal.trainer.trainer import Trainer
from shoal.trainer.worker import TrainerProcess, local_ranks

MIXTURE = {"num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2}
KINDS: dict[str, dict[str, object]] = {
    "Qwen2": {"num_key_value_heads": 2},
    "Gemma3Text": {"num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4},
    "Qwen3Moe": {**MIXTURE, "num_experts": 4, "moe_intermediate_size": 24},
    "GptOss": {**MIXTURE, "num_local_experts": 4},
}
MIXTURES = ("Qwen3Moe", "GptOss", "mxfp4")
AXES = {
    "model": [*KINDS, "gguf", "mxfp4"],
    "tied": [False, True],
    "dtype": list(PARITY_BOUND_NATS),
    "adapted": [None, [], ["q_proj", "o_proj"], ["lm_head"], ["q_proj", "lm_head"], ["embed_tokens"]],
    "served": ["merged", "adapter", "named"],
    "ranks": ["one", "sharded", "parallel"],
    "checkpointing": [False, True],
}
ROWS = [tuple((7 * i + j * j) % 90 + 3 for j in range(24)) for i in range(3)]


def is_possible(case: Case) -> bool:
    """Whether there are such a file, adapters to serve, and experts to keep apart."""
    return (
        (case["adapted"] is not None or case["served"] == "merged")
        and (case["served"] != "named" or "lm_head" not in str(case["adapted"]))  # refused as it is loaded
        and (case["model"] in MIXTURES or case["ranks"] != "parallel")
        and not (case["model"] in ("gguf", "mxfp4") and case["tied"])
    )


def is_refused(case: Case) -> bool:
    """Whether adapters would change a weight that another layer shares, no expert, or a head of several ranks."""
    adapted = case["adapted"]
    if adapted is None:
        return False
    assert isinstance(adapted, list)
    packed = case["model"] in MIXTURES and not adapted
    headless = bool(case["tied"]) or case["ranks"] != "one"
    return packed or "embed_tokens" in adapted or (headless and "lm_head" in adapted)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, bool], Path]]:
    """Directories by kind and whether the head is tied."""
    folder = tmp_path_factory.mktemp("models")
    found = {
        (kind, tied): saved(kind, folder / f"{kind}-{tied}", tie_word_embeddings=tied, **settings)
        for kind, settings in KINDS.items()
        for tied in (False, True)
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        write_gguf(untrained(Shape(width=32, feed_forward=64), seed=3), folder / "tiny.gguf")
        published_gpt_oss(folder / "published")
        found["gguf", False] = local_directory(str(folder / "tiny.gguf"))
        found["mxfp4", False] = local_directory(str(folder / "published"))
        yield found


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[asyncio.Runner, TrainerProcess]]:
    """Two ranks, which each test starts anew."""
    with asyncio.Runner() as runner:
        opened = local_ranks(tmp_path_factory.mktemp("ranks") / "log", 2, 2)
        yield runner, TrainerProcess(runner.run(opened.__aenter__()))
        runner.run(opened.__aexit__(None, None, None))


def config_of(case: Case) -> Config:
    train: dict[str, object] = {"lr": 5e-2, "ranks": 1 if case["ranks"] == "one" else 2}
    if case["adapted"] is not None:
        train["lora"] = {"rank": 4, "alpha": 32.0, "targets": case["adapted"]}
    if case["ranks"] == "parallel":
        train["backend"] = "experts"
    model = {"device": "cpu", "dtype": case["dtype"], "gradient_checkpointing": case["checkpointing"]}
    return parse({"tasks": [{"name": "chain_sum"}], "model": model, "train": train})


def trained(model: Path, config: Config, file: Path) -> list[list[float]]:
    """Logprobs of the rows after three steps, and the Version in the file."""
    ours = Trainer(model, config.model, config.train)
    for seed in range(3):
        ours.step(groups(seed))
    ours.write_weights(file)
    return ours.logprobs(ROWS)


async def trained_by(trainer: TrainerProcess, model: Path, config: Config, file: Path) -> list[list[float]]:
    """The same, by several ranks."""
    await trainer.start(model, config, 2)
    for seed in range(3):
        await trainer.step([tuple(group) for group in groups(seed)])
    await trainer.write_version(file)
    return [list(row) for row in await trainer.logprobs(ROWS)]


def served(model: Path, dtype: str, file: Path | None, *, named: bool) -> list[list[float]]:
    """Logprobs of the rows by a fresh engine."""
    engine = StepEngine(load_model(model, dtype=dtype), EngineLimits(max_model_len=64, max_running=4))
    if named:
        assert file is not None
        engine.load_adapter(engine.slots.adapter("one", 1, file, None))
    elif file is not None:
        engine.update(engine.slots.staged(1, file, None))
    requests = [scoring(row, adapter="one" if named else "") for row in ROWS]
    for request in requests:
        engine.submit(request)
    while not all(request.finished for request in requests):
        engine.step()
    return [list(request.drafts[0].scores) for request in requests]


def distance(one: list[list[float]], other: list[list[float]]) -> float:
    return fmean(abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True))


@pytest.mark.parametrize("case", covering(AXES, is_possible, at_least=60), ids=title)
def test_a_fresh_engine_gives_a_versions_logprobs_of_the_trainer(
    case: Case,
    models: dict[tuple[str, bool], Path],
    pair: tuple[asyncio.Runner, TrainerProcess],
    tmp_path: Path,
) -> None:
    model, config, dtype = models[str(case["model"]), bool(case["tied"])], config_of(case), str(case["dtype"])
    file = tmp_path / (MODEL_FILE if case["served"] == "merged" else ADAPTER_FILE)

    def logprobs() -> list[list[float]]:
        if case["ranks"] == "one":
            return trained(model, config, file)
        return pair[0].run(trained_by(pair[1], model, config, file))

    if is_refused(case):
        with pytest.raises((ConfigError, TrainerError), match=r"train\.lora\.targets"):
            logprobs()
        return
    wanted = logprobs()
    found = served(model, dtype, file, named=case["served"] == "named")
    assert distance(found, wanted) < PARITY_BOUND_NATS[dtype]
    assert distance(found, served(model, dtype, None, named=False)) > 0.12
