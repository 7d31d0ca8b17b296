"""The trainer on a tiny model: any packing gives the same gradient, runs resume bit for bit, rewarded tokens rise."""

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from engine_models import saved
from shoal.config import ModelConfig
from shoal.config.training import DecoupledLoss, DoubleSidedLoss, GRPOLoss, TrainConfig
from shoal.engine.server.http_server import engine_of, options_of
from shoal.errors import ConfigError, TrainerError
from shoal.model.file_sizes import longest_row, sizes_of
from shoal.model.loading import load_model
from shoal.model.packed import packed_logprobs
from shoal.trainer.influence import influences
from shoal.trainer.messages import RATIO_BOUNDS, Step, StepStats
from shoal.trainer.optim import Optimizer, learning_rate
from shoal.trainer.packing import Packer
from shoal.trainer.step_stats import StepTotals
from shoal.trainer.trainer import Moment, Trainer
from shoal.types import Sample

VOCABULARY = 60  # from 1: the pad token's embedding is zero, where gradients are ill-conditioned


def row(rng: random.Random, prompt: Sequence[int], answer: int, advantage: float, logp: float = -4.0) -> Sample:
    """A prompt and `answer` random tokens that were drawn with about `logp` nats each."""
    p = len(prompt)
    return Sample(
        tokens=(*prompt, *(rng.randrange(1, VOCABULARY) for _ in range(answer))),
        mask=(0,) * p + (1,) * answer,
        logprobs=(0.0,) * p + tuple(logp - rng.random() for _ in range(answer)),
        versions=(-1,) * p + (0,) * answer,
        advantages=(0.0,) * p + (advantage,) * answer,
    )


def groups(seed: int, count: int = 4, size: int = 4) -> list[list[Sample]]:
    """Groups of rows with a common prompt and advantages of both signs."""
    rng = random.Random(seed)
    result = []
    for _ in range(count):
        prompt = [rng.randrange(1, VOCABULARY) for _ in range(rng.randint(1, 8))]
        result.append([row(rng, prompt, rng.randint(1, 12), 1.0 if i % 2 else -1.0) for i in range(size)])
    return result


def trainer(path: Path, **settings: object) -> Trainer:
    return Trainer(path, ModelConfig(device="cpu"), TrainConfig.model_validate({"lr": 1e-2, **settings}))


def gradient(trainer: Trainer, rows: Sequence[Sample]) -> tuple[list[Tensor], StepStats]:
    """Of the loss of one update, with its statistics; leaves the trainer as it was."""
    totals = StepTotals("cpu")
    minibatch = trainer.minibatch(rows)
    trainer.accumulate(minibatch, totals, Moment(), fresh=True)
    result = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in trainer.model.parameters()]
    trainer.model.zero_grad()
    return result, totals.stats([], [minibatch], 0.0, "")


@pytest.fixture(scope="module")
def whole(tiny_model_dir: Path) -> Trainer:
    """Takes every batch in one piece and computes every row."""
    config = TrainConfig(tokens_per_microbatch=100_000)
    return Trainer(tiny_model_dir, ModelConfig(device="cpu"), config, skip_uninformative=False)


row_lists = st.lists(
    st.tuples(st.integers(0, 2), st.integers(1, 20), st.sampled_from([-1.0, 0.0, 0.5])), min_size=1, max_size=8
)


@settings(max_examples=20)
@given(plan=row_lists, budget=st.integers(16, 120), seed=st.integers(0, 99))
def test_any_packing_and_any_order_gives_the_same_loss_and_gradient(
    tiny_model_dir: Path, whole: Trainer, plan: list[tuple[int, int, float]], budget: int, seed: int
) -> None:
    rng = random.Random(seed)
    prompts = [(1,), (2, 3, 4), (2, 3, 4, 5, 6, 7, 8, 9, 10)]
    rows = [row(rng, prompts[prompt], answer, advantage) for prompt, answer, advantage in plan]
    pieces = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(tokens_per_microbatch=budget))
    wanted, wanted_stats = gradient(whole, rows)
    shuffled = rng.sample(rows, len(rows))
    got, stats = gradient(pieces, shuffled)
    assert stats.loss == pytest.approx(wanted_stats.loss, rel=1e-4, abs=1e-6)
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_the_gradient_of_rows_is_the_weighted_sum_of_the_gradients_of_each(whole: Trainer) -> None:
    rows = [row for group in groups(3, count=2) for row in group]
    wanted = [torch.zeros_like(p) for p in whole.model.parameters()]
    total = sum(sum(row.mask) for row in rows)
    for single in rows:
        for into, part in zip(wanted, gradient(whole, [single])[0], strict=True):
            into.add_(part, alpha=sum(single.mask) / total)
    for a, b in zip(gradient(whole, rows)[0], wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_rows_without_advantage_are_not_computed_but_stay_in_the_denominator(tiny_model_dir: Path) -> None:
    rng = random.Random(0)
    useful = row(rng, (1, 2), 5, 1.0)
    idle = row(rng, (3, 4), 7, 0.0)
    stats = trainer(tiny_model_dir).step([[useful, idle]])
    assert (stats.tokens, stats.skipped_tokens, stats.computed_tokens) == (12, 7, 7)
    alone = trainer(tiny_model_dir).step([[useful]])
    assert stats.loss == pytest.approx(alone.loss * 5 / 12)


def test_a_step_without_any_advantage_changes_nothing(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir)
    before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    stats = ours.step([[row(random.Random(0), (1, 2), 5, 0.0)], []])
    assert (stats.updates, stats.update_norm, stats.loss) == (0, 0.0, 0.0)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.tensors().items())


def test_statistics_equal_their_definitions(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir, loss=GRPOLoss())
    rows = [row for group in groups(1) for row in group]
    behav = torch.tensor([lp for r in rows for lp, m in zip(r.logprobs, r.mask, strict=True) if m])
    logp = torch.tensor(
        [
            lp
            for r, scored in zip(rows, ours.logprobs([r.tokens for r in rows]), strict=True)
            for lp, m in zip(scored, r.mask[1:], strict=True)
            if m
        ]
    )
    before = [p.detach().clone() for p in ours.model.parameters()]
    stats = ours.step([rows])
    moved = torch.cat([(p - q).detach().flatten() for p, q in zip(ours.model.parameters(), before, strict=True)])
    ratio = (logp - behav).exp()
    assert stats.ratio_mean == pytest.approx(ratio.mean().item(), rel=1e-4)
    assert stats.ratio_max == pytest.approx(ratio.max().item(), rel=1e-4)
    assert stats.ess == pytest.approx((ratio.sum() ** 2 / ratio.square().sum() / len(ratio)).item(), rel=1e-3)
    assert stats.mismatch == pytest.approx((logp - behav).abs().mean().item(), rel=1e-4)
    bounds = [0.0, *RATIO_BOUNDS, math.inf]
    inside = [((ratio > low) & (ratio <= high)).float().mean().item() for low, high in pairwise(bounds)]
    assert stats.ratio_shares == pytest.approx(inside)
    assert sum(share > 0 for share in stats.ratio_shares) > 2
    assert stats.update_norm == pytest.approx(moved.norm().item(), rel=1e-3)
    assert 0 < stats.clipped_share < 1
    assert stats.tokens == len(behav)


def test_the_mismatch_of_fresh_tokens_is_over_those_that_the_weights_being_trained_drew(tiny_model_dir: Path) -> None:
    (group,) = groups(5, count=1)
    scored = trainer(tiny_model_dir).logprobs([row.tokens for row in group])
    rows = [
        replace(row, logprobs=(0.0, *(lp - gap if m else 0.0 for lp, m in zip(lps, row.mask[1:], strict=True))))
        for gap, row, lps in zip((0.25, 0.5, 0.25, 0.5), group, scored, strict=True)
    ]
    mixed = [
        replace(row, versions=tuple(v + 7 * m * (i % 2) for v, m in zip(row.versions, row.mask, strict=True)))
        for i, row in enumerate(rows)
    ]
    for version, wanted in ((0, 0.25), (7, 0.5), (3, None), (None, None)):
        assert trainer(tiny_model_dir).step([mixed], version).mismatch_fresh == (
            None if wanted is None else pytest.approx(wanted, rel=1e-4)
        )


def test_proximal_logprobs_of_later_updates_are_those_before_the_first(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir, minibatches=2, groups_per_step=4, lr=3e-2)
    step = []
    for group in groups(2):
        scored = ours.logprobs([row.tokens for row in group])
        drawn = [(0.0, *logprobs) for logprobs in scored]
        kept = [
            tuple(lp if m else 0.0 for lp, m in zip(lps, row.mask, strict=True))
            for lps, row in zip(drawn, group, strict=True)
        ]
        step.append([replace(row, logprobs=lps) for row, lps in zip(group, kept, strict=True)])
    stats = ours.step(step)
    assert stats.updates == 2
    assert stats.mismatch < 1e-5
    assert stats.ratio_max > 1.5


def test_parity_logprobs_are_those_of_the_model_at_temperature_1(tiny_model_dir: Path) -> None:
    ours = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(), temperature=0.5)
    model = load_model(tiny_model_dir)
    rows = [[5, 6, 7, 8], [9, 10], [11]]
    wanted = [packed_logprobs(model, torch.tensor(r), [len(r)])[1:].tolist() for r in rows]
    assert [len(r) for r in ours.logprobs(rows)] == [3, 1, 0]
    for got, want in zip(ours.logprobs(rows), wanted, strict=True):
        assert got == pytest.approx(want, abs=1e-6)


def test_logprobs_of_rows_with_a_common_beginning_are_those_of_each_row_alone(tiny_model_dir: Path) -> None:
    rows = [[5, 6, 7, 8], [5, 6, 7, 9, 3], [5, 6, 2], [11], [4] * 17]
    for budget in (16, 100):
        ours = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(tokens_per_microbatch=budget))
        alone = [ours.logprobs([row])[0] for row in rows]
        for got, want in zip(ours.logprobs(rows), alone, strict=True):
            assert got == pytest.approx(want, abs=1e-6)


def test_a_step_computes_logprobs_at_the_temperature_that_its_tokens_were_sampled_at(tiny_model_dir: Path) -> None:
    (group,) = groups(5, count=1)
    for temperature, same in ((0.5, True), (1.0, False)):
        ours = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(), temperature=temperature)
        scored = ours.logprobs([row.tokens for row in group], temperature=0.5)
        rows = [
            replace(row, logprobs=(0.0, *(lp * m for lp, m in zip(lps, row.mask[1:], strict=True))))
            for row, lps in zip(group, scored, strict=True)
        ]
        assert (ours.step([rows]).mismatch < 1e-5) == same


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("reset", [False, True])
def test_a_resumed_trainer_arrives_at_the_same_bits(
    tiny_model_dir: Path, tmp_path: Path, minibatches: int, reset: bool
) -> None:
    config = {
        "minibatches": minibatches,
        "warmup_steps": 6,
        "reset_optimizer_at_push": reset,
        "weight_decay": 0.1,
    }
    straight = trainer(tiny_model_dir, **config)
    for seed in range(2):
        straight.step(groups(seed))
        straight.count_push()
    straight.step(groups(2))
    straight.save(tmp_path)
    resumed = trainer(tiny_model_dir, **config)
    resumed.load(tmp_path)
    for seed in (3, 4):
        a, b = straight.step(groups(seed)), resumed.step(groups(seed))
        assert (a.loss, a.lr, a.grad_norm, a.update_norm) == (b.loss, b.lr, b.grad_norm, b.update_norm)
    resumed_tensors = resumed.tensors()
    assert all(torch.equal(tensor, resumed_tensors[name]) for name, tensor in straight.tensors().items())


def test_loading_another_models_state_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = trainer(tiny_model_dir)
    with pytest.raises(TrainerError, match="expected a file that the trainer saved"):
        ours.load(tmp_path)
    ours.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tmp_path / "optimizer.safetensors").read_bytes())
    with pytest.raises(TrainerError, match="expected the tensors of this model"):
        ours.load(tmp_path)


class Allocations(TorchDispatchMode):
    """Counts the bytes of storages that did not exist before, as many as are alive at once."""

    def __init__(self, existing: Sequence[Tensor]) -> None:
        super().__init__()
        self._existing = {StorageWeakRef(one.untyped_storage()).cdata for one in existing}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._alive = {key: one for key, one in self._alive.items() if not one[0].expired()}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                self._alive.setdefault((found := StorageWeakRef(storage)).cdata, (found, storage.nbytes()))
        new = [size for key, (_, size) in self._alive.items() if key not in self._existing]
        self.peak_bytes = max(self.peak_bytes, sum(new))
        return result


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_an_update_copies_no_more_than_single_weights(weight_decay: float) -> None:
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(32)))
    optimizer = Optimizer(dict(model.named_parameters()), TrainConfig(weight_decay=weight_decay))
    for taken in range(2):  # the first one makes the moments
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        existing = [*model.parameters(), *(weight.grad for weight in model.parameters()), *optimizer.state().values()]
        with Allocations([one for one in existing if one is not None]) as counted:
            assert optimizer.update().taken
        if taken:
            assert 0 < counted.peak_bytes <= 8 * 256 * 256 * 4


def test_the_norm_of_an_update_counts_what_decay_takes_from_the_weights() -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = Optimizer(dict(model.named_parameters()), TrainConfig(lr=1e-2, weight_decay=0.5))
    for scale in (1.0, -0.3):
        model.weight.grad = torch.full_like(model.weight, scale)
        before = model.weight.detach().clone()
        norm = optimizer.update().update_norm
        assert norm == pytest.approx((model.weight - before).norm().item(), rel=1e-4)


def test_the_norm_of_an_update_counts_all_weights_large_and_small_and_those_that_joined_later() -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(8, 8), nn.Linear(200, 300), nn.Linear(8, 4))
    optimizer = Optimizer(dict(model.named_parameters()), TrainConfig(lr=1e-2, weight_decay=0.1))
    generator = torch.Generator().manual_seed(0)
    for with_gradient in (model[:2], model, model):  # Adam counts steps of each weight
        for weight in with_gradient.parameters():
            weight.grad = torch.randn(weight.shape, generator=generator)
        before = nn.utils.parameters_to_vector(model.parameters()).detach()
        norm = optimizer.update().update_norm
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        assert norm == pytest.approx((after - before).norm().item(), rel=1e-4)


def test_offloaded_moments_give_the_same_steps_and_the_same_state(tiny_model_dir: Path, tmp_path: Path) -> None:
    settings: dict[str, object] = {"lr": 1e-3, "weight_decay": 0.1}
    usual, offloaded = (trainer(tiny_model_dir, **settings, offload=kind) for kind in ("none", "optimizer"))
    for seed in range(2):
        ours, theirs = offloaded.step(groups(seed)), usual.step(groups(seed))
        assert ours.update_norm == pytest.approx(theirs.update_norm, rel=1e-6)
        assert ours.grad_norm == theirs.grad_norm
    offloaded.save(tmp_path)
    offloaded = trainer(tiny_model_dir, **settings, offload="optimizer")
    offloaded.load(tmp_path)
    offloaded.step(groups(2))
    usual.step(groups(2))
    state, expected = offloaded._optimizer.state(), usual._optimizer.state()
    assert all(torch.equal(one, expected[name]) for name, one in state.items())
    assert all(torch.equal(one, usual.tensors()[name]) for name, one in offloaded.tensors().items())


def test_published_weights_are_what_a_model_loads(tiny_model_dir: Path, tmp_path: Path) -> None:
    ours = trainer(tiny_model_dir)
    ours.step(groups(0))
    ours.write_weights(tmp_path / "model.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    (tmp_path / "config.json").write_bytes((tiny_model_dir / "config.json").read_bytes())
    served = load_model(tmp_path)
    own = ours.tensors()
    assert all(torch.equal(tensor, own[name]) for name, tensor in served.state_dict().items())


def test_tied_weights_are_trained_and_published_once(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = Qwen2Config.from_pretrained(tiny_model_dir, tie_word_embeddings=True)
    Qwen2ForCausalLM(config).save_pretrained(tmp_path)
    ours = trainer(tmp_path)
    assert "lm_head.weight" not in ours.tensors()
    assert sum(p.numel() for p in ours.model.parameters() if p.requires_grad) == sum(
        tensor.numel() for tensor in ours.tensors().values()
    )
    ours.step(groups(0))
    ours.write_weights(tmp_path / "model.safetensors")
    rows = [row.tokens for row in groups(1)[0]]
    assert trainer(tmp_path).logprobs(rows) == ours.logprobs(rows)


def test_a_failed_step_leaves_no_gradient_behind(tiny_model_dir: Path) -> None:
    ours, untouched = trainer(tiny_model_dir), trainer(tiny_model_dir)
    minibatch = ours.minibatch(groups(5)[0])
    ours.accumulate(minibatch, StepTotals("cpu"), Moment(), fresh=True)
    assert ours.step(groups(0)).grad_norm == untouched.step(groups(0)).grad_norm


def test_bfloat16_computes_in_half_but_keeps_whole_weights(tiny_model_dir: Path, tmp_path: Path) -> None:
    half = Trainer(tiny_model_dir, ModelConfig(device="cpu", dtype="bfloat16"), TrainConfig(lr=1e-5))
    whole = Trainer(tiny_model_dir, ModelConfig(device="cpu"), TrainConfig(lr=1e-5))
    a, b = half.step(groups(0)), whole.step(groups(0))
    assert a.entropy == pytest.approx(b.entropy, rel=0.02)
    assert a.entropy != b.entropy
    assert {tensor.dtype for tensor in half.tensors().values()} == {torch.float32}
    half.write_weights(tmp_path / "model.safetensors")
    assert {tensor.dtype for tensor in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}


def test_gradient_checkpointing_computes_layers_twice_and_changes_no_gradient(
    tiny_model_dir: Path, whole: Trainer
) -> None:
    saving = Trainer(tiny_model_dir, ModelConfig(device="cpu", gradient_checkpointing=True), TrainConfig())
    calls = []
    saving.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    rows = groups(5)[0]
    for a, b in zip(gradient(saving, rows)[0], gradient(whole, rows)[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    assert len(calls) == 2


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def test_selective_checkpointing_computes_no_product_of_weights_twice_and_changes_no_gradient(
    tiny_model_dir: Path, whole: Trainer
) -> None:
    rows, products = groups(5)[0], {}
    for kind in ("selective", True):
        saving = Trainer(tiny_model_dir, ModelConfig(device="cpu", gradient_checkpointing=kind), TrainConfig())
        with Products() as counted:
            found = gradient(saving, rows)[0]
        products[kind] = counted.count
        for a, b in zip(found, gradient(whole, rows)[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    again = 2 * 6  # in each of two layers; nothing of it needs the last of seven
    assert products[True] - products["selective"] == again


def test_a_gradient_that_is_not_finite_is_not_applied(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir)
    before = {name: tensor.clone() for name, tensor in ours.tensors().items()}
    stats = ours.step([[row(random.Random(0), (1, 2), 3, float("inf"))]])
    assert (stats.updates, stats.refused_updates, stats.lr) == (0, 1, 1e-2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.tensors().items())
    assert ours.step(groups(0)).updates == 1


def test_rows_that_the_model_cannot_read_are_refused(tiny_model_dir: Path) -> None:
    ours = trainer(tiny_model_dir)
    with pytest.raises(TrainerError, match=r"expected ids in 0\.\.\d+, got 1\.\.100000"):
        ours.step([[Sample((1, 100000), (0, 1), (0.0, -1.0), (-1, 0), (0.0, 1.0))]])
    with pytest.raises(TrainerError, match="expected 1 to 256 tokens"):
        ours.step([[row(random.Random(0), (1,), 300, 1.0)]])


def test_rows_above_the_length_at_which_longrope_changes_its_rotation_are_refused(tmp_path: Path) -> None:
    """transformers picks one rotation for all rows of a pass, by its longest row."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.0, 4.0, 8.0, 16.0]}
    rotation = {"rope_scaling": {"type": "longrope", **factors}, "original_max_position_embeddings": 16}
    path = saved("Phi3", tmp_path, num_key_value_heads=2, **rotation)
    model, short, long = load_model(path), list(range(5, 13)), list(range(20, 44))
    with torch.no_grad():
        alone = packed_logprobs(model, torch.tensor(short), [8])
        beside = packed_logprobs(model, torch.tensor(short + long), [8, 24])[:8]
    assert not torch.allclose(alone, beside, atol=0.1)  # why none may be longer
    with pytest.raises(TrainerError, match="expected 1 to 16 tokens, got 24"):
        trainer(path).step([[row(random.Random(0), (1,), 23, 1.0)]])
    with pytest.raises(ConfigError, match="expected at most the 16 tokens of the model, got 24"):
        engine_of(options_of(["--model", str(path), "--max-model-len", "24"]))
    assert engine_of(options_of(["--model", str(path)])).limits.max_model_len == 16
    assert longest_row(sizes_of(path)) == 16


def test_a_reset_at_push_makes_the_next_update_as_large_as_the_first(tiny_model_dir: Path) -> None:
    def norms(reset: bool) -> list[float]:
        ours = trainer(tiny_model_dir, lr=1e-3, reset_optimizer_at_push=reset)
        result = []
        for seed in range(6):
            result.append(ours.step(groups(seed)).update_norm)
            ours.count_push()
        return result

    kept, forgotten = norms(reset=False), norms(reset=True)
    assert kept[0] == forgotten[0]
    assert all(norm == pytest.approx(forgotten[0], rel=0.05) for norm in forgotten)
    assert kept[-1] < 0.8 * kept[0]


@pytest.mark.parametrize(("schedule", "quarter"), [("constant", 1.0), ("linear", 0.75), ("cosine", 0.853553)])
def test_the_rate_rises_to_its_peak_and_falls_by_its_schedule_to_its_end(schedule: str, quarter: float) -> None:
    lengths = {"steps": 10, "minibatches": 2, "groups_per_step": 2, "warmup_steps": 4}
    config = TrainConfig.model_validate({"lr": 1.0, "lr_schedule": schedule, **lengths})
    half, end = (1.0, 1.0) if schedule == "constant" else (0.5, 0.0)
    rates = [learning_rate(config, update, None) for update in (0, 3, 4, 8, 12, 20, 30)]
    assert rates == pytest.approx([0.25, 1.0, 1.0, quarter, half, end, end], rel=1e-5)
    assert [learning_rate(config, 20 + k, k) for k in range(3)] == pytest.approx([end / 4, end / 2, 3 * end / 4])


@pytest.mark.parametrize("loss", [GRPOLoss(), DecoupledLoss(), DoubleSidedLoss()])
def test_the_probability_of_rewarded_tokens_rises(
    tiny_model_dir: Path, loss: GRPOLoss | DecoupledLoss | DoubleSidedLoss
) -> None:
    """Policy gradient in small: draw one token after a fixed prompt, reward it if it is even."""
    ours = Trainer(
        tiny_model_dir,
        ModelConfig(device="cpu"),
        TrainConfig(lr=3e-3, loss=loss, minibatches=2, groups_per_step=4),
    )
    prompt = [10, 20, 30]
    vocabulary = ours.model.config.vocab_size

    def distribution() -> Tensor:
        rows = [[*prompt, token] for token in range(vocabulary)]
        return torch.tensor([logprobs[-1] for logprobs in ours.logprobs(rows)])

    even = torch.arange(vocabulary) % 2 == 0
    before = distribution().exp()[even].sum().item()
    generator = torch.Generator().manual_seed(0)
    for _ in range(15):
        logp = distribution()
        drawn = torch.multinomial(logp.exp(), 32, replacement=True, generator=generator).tolist()
        step = [
            [
                Sample((*prompt, t), (0, 0, 0, 1), (0.0,) * 3 + (logp[t].item(),), (-1,) * 3 + (0,), (0.0,) * 3 + (a,))
                for t in drawn[8 * g : 8 * g + 8]
                for a in [1.0 if t % 2 == 0 else -1.0]
            ]
            for g in range(4)
        ]
        ours.step(step)
    after = distribution().exp()[even].sum().item()
    assert before < 0.7
    assert after > 0.9


@pytest.mark.parametrize("mean", ["rows", "tokens"])
def test_the_influence_of_a_group_depends_on_the_rows_of_its_own_update_only(tiny_model_dir: Path, mean: str) -> None:
    few, many = groups(1, count=2, size=2), groups(2, count=2, size=6)

    def found(given: list[list[Sample]], minibatches: int) -> tuple[tuple[float, float], ...]:
        config = TrainConfig.model_validate({"minibatches": minibatches, "loss_mean": mean, "max_grad_norm": 1e9})
        one = Trainer(tiny_model_dir, ModelConfig(device="cpu"), config)
        (share,) = Packer(config, 64).step(given)
        return influences(one, Step(share, group_sizes=tuple(map(len, given))))

    alone, beside = found(few, 1), found(few + many, 2)
    assert all(influence > 0 for influence, _ in alone)
    for one, other in zip(alone, beside[:2], strict=True):
        assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize("loss_mean", ["tokens", "rows", "budget", "sums"])
def test_rows_without_trained_tokens_change_no_influence(tiny_model_dir: Path, loss_mean: str) -> None:
    given = groups(4, count=2, size=2)
    untrained = replace(given[0][0], mask=(0,) * len(given[0][0].mask))

    def found(given: list[list[Sample]]) -> tuple[tuple[float, float], ...]:
        config = TrainConfig.model_validate({"loss_mean": loss_mean, "max_grad_norm": 1e9})
        one = Trainer(tiny_model_dir, ModelConfig(device="cpu"), config, max_tokens=16)
        (share,) = Packer(config, 64, 16).step(given)
        return influences(one, Step(share, group_sizes=tuple(map(len, given))))

    wanted, got = found(given), found([[*given[0], untrained, untrained], given[1]])
    for one, other in zip(wanted, got, strict=True):
        assert other == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(("mean", "ratio"), [("tokens", 3.0), ("rows", 1.0)])
def test_what_others_gain_without_a_group_that_teaches_nothing_is_its_part_of_the_mean(
    tiny_model_dir: Path, mean: str, ratio: float
) -> None:
    rng, ((one, *_), *_) = random.Random(3), groups(3)
    untrained = replace(row(rng, (1, 2), 3, 0.0), mask=(0,) * 5)
    given = [[one], [row(rng, (1, 2), 2, 0.0)], [row(rng, (1, 2), 6, 0.0)], [untrained]]
    config = TrainConfig.model_validate({"loss_mean": mean, "max_grad_norm": 1e9})
    (share,) = Packer(config, 64, skip_uninformative=False).step(given)
    trained = Trainer(tiny_model_dir, ModelConfig(device="cpu"), config, skip_uninformative=False)
    _, (short, _), (long, _), none = influences(trained, Step(share, group_sizes=(1, 1, 1, 1)))
    assert short > 0
    assert long == pytest.approx(ratio * short, rel=1e-5)
    assert none == (0.0, 0.0)
