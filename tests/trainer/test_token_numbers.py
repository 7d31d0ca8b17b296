"""Numbers of each trained token: those with which the loss was made, and the gradient that came of them."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from test_trainer import groups, trainer

from shoal import wire
from shoal.experience.raw import RawGroup
from shoal.observe.token_files import TokensFiles, TrainedToken, trained_tokens
from shoal.trainer.advantage import rows
from shoal.trainer.messages import TokensFile
from shoal.types import Completion, FinishReason, Reward, Rollout, RolloutStatus, Sample, Turn


def rollout_of(row: Sample, *, status: RolloutStatus = RolloutStatus.FINISHED) -> Rollout:
    """The rollout that a row would be made of."""
    given = row.mask.index(1)
    drawn = Completion(row.tokens[given:], row.logprobs[given:], row.versions[given:], FinishReason.STOP)
    return Rollout("r", (), (Turn(row.tokens[:given], drawn),), Reward(0.0), status)


def raw(name: str, step: int, rollouts: list[Rollout]) -> RawGroup:
    bodies = tuple(wire.encode(one) for one in rollouts)
    return RawGroup(1, name, b"", 0, None, None, step, 0, None, None, None, bodies)


def numbers_of(
    tmp_path: Path, model: Path, rows: list[list[Sample]], **settings: object
) -> Mapping[tuple[int, int], list[TrainedToken | None]]:
    """Numbers of each row of each group after one step."""
    names = [f"g{index}" for index in range(len(rows))]
    wish = TokensFiles(tmp_path, 1).wanted(1, names)
    ours = trainer(model, **settings)
    ours.step(rows, 0, tokens_file=wish)
    found = {}
    for index, group in enumerate(rows):
        stored = raw(names[index], 0, [rollout_of(row) for row in group])
        for position in range(len(group)):
            numbers = trained_tokens(tmp_path, stored, position)
            assert numbers is not None
            assert len(numbers) == sum(group[position].mask)
            found[index, position] = numbers
    return found


@pytest.mark.parametrize("minibatches", [1, 2])
def test_the_gradient_is_weight_times_advantage_times_ratio_while_nothing_is_clipped(
    tmp_path: Path, tiny_model_dir: Path, minibatches: int
) -> None:
    rows = groups(3)
    settings = {"loss": {"name": "reinforce", "weight_cap": 1e9}, "minibatches": minibatches, "lr": 1e-12}
    found = numbers_of(tmp_path, tiny_model_dir, rows, tokens_per_microbatch=30, **settings)
    trained = sum(sum(row.mask) for group in rows for row in group)
    for (index, position), numbers in found.items():
        row = rows[index][position]
        sampled = [logprob for logprob, mask in zip(row.logprobs, row.mask, strict=True) if mask]
        for token, logprob in zip(numbers, sampled, strict=True):
            assert token is not None
            assert token.advantage == row.advantages[-1]
            ratio = math.exp(token.logp - logprob)
            assert token.gradient == pytest.approx(token.weight * token.advantage * ratio, rel=1e-4)
            assert token.entropy > 0
            assert token.fate == ""
    weights = [token.weight for numbers in found.values() for token in numbers if token is not None]
    assert sum(weights) == pytest.approx(minibatches)  # the weights of each update add up to one
    assert len(weights) == trained


def test_a_clipped_token_says_so_and_has_no_gradient(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [[replace(row, logprobs=tuple(min(0.0, lp - 9.0) * m for lp, m in zip(row.logprobs, row.mask, strict=True)))
             for row in group] for group in groups(4, count=1)]  # fmt: skip
    found = numbers_of(tmp_path, tiny_model_dir, rows, loss={"name": "grpo"}, lr=1e-12)
    fates = {(position, token.fate, token.gradient) for (_, position), own in found.items() for token in own if token}
    # Ratios are far above 1: what is reinforced is clipped, and what is weakened meets the bound of the dual clip.
    assert {fate for _, fate, _ in fates} == {"clipped"}
    assert {gradient for _, _, gradient in fates} == {0.0}


def test_a_row_without_advantage_has_no_numbers_and_does_not_move_the_others(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    rows = groups(5, count=2)
    rows[0][1] = replace(rows[0][1], advantages=(0.0,) * len(rows[0][1].tokens))
    found = numbers_of(tmp_path, tiny_model_dir, rows)
    assert set(found[0, 1]) == {None}
    assert all(token is not None for place, own in found.items() if place != (0, 1) for token in own)
    assert found[1, 2][0].advantage == rows[1][2].advantages[-1]


def test_a_step_that_computes_no_row_has_no_numbers(tmp_path: Path, tiny_model_dir: Path) -> None:
    rows = [[replace(row, advantages=tuple(0.0 for _ in row.tokens)) for row in group] for group in groups(3)]
    found = numbers_of(tmp_path, tiny_model_dir, rows)
    assert {number for numbers in found.values() for number in numbers} == {None}


def test_a_file_that_names_fewer_groups_than_its_step_has_is_not_written(tmp_path: Path, tiny_model_dir: Path) -> None:
    wish = TokensFiles(tmp_path, 1).wanted(1, ["g0"])
    with pytest.raises(ValueError, match="longer"):
        trainer(tiny_model_dir).step(groups(2), 0, tokens_file=wish)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_failed_rollout_is_passed_over_as_in_training(tmp_path: Path, tiny_model_dir: Path) -> None:
    (rows,) = groups(6, count=1)
    wish = TokensFiles(tmp_path, 1).wanted(1, ["g"])
    trainer(tiny_model_dir).step([rows], 0, tokens_file=wish)
    whole = raw("g", 0, [rollout_of(row) for row in rows])
    failed = rollout_of(rows[0], status=RolloutStatus.FAILED)
    with_failed = raw("g", 0, [failed, *(rollout_of(row) for row in rows)])
    assert trained_tokens(tmp_path, with_failed, 0) is None
    assert trained_tokens(tmp_path, with_failed, 2) == trained_tokens(tmp_path, whole, 1)


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_forced_tokens_have_no_numbers_and_move_no_others(data: st.DataObject) -> None:
    """Each written number names its row and its place; rollouts of several rows have any tokens forced."""
    sizes = data.draw(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=3), min_size=1, max_size=4))
    rollouts = []
    for turns in sizes:
        forced = [tuple(data.draw(st.sets(st.integers(0, size - 1)))) for size in turns]
        drawn = [
            Completion((5,) * size, (-1.0,) * size, (0,) * size, FinishReason.STOP, forced=own)
            for size, own in zip(turns, forced, strict=True)
        ]
        parents = [data.draw(st.sampled_from([None, *range(index)])) for index in range(len(turns))]
        made = (Turn((1,), one, parent=parent) for one, parent in zip(drawn, parents, strict=True))
        rollouts.append(Rollout("r", (), tuple(made), Reward(0.0)))
    with TemporaryDirectory() as folder:
        wish = TokensFiles(Path(folder), 1).wanted(1, ["g"])
        assert wish is not None
        trained = [rows(one, [1.0 + turn for turn in range(len(one.turns))]) for one in rollouts]
        write_advantages(wish, [row for own in trained for row in own])
        stored = raw("g", 0, rollouts)
        owners = [position for position, own in enumerate(trained) for _ in own]
        for position, rollout in enumerate(rollouts):
            found = trained_tokens(Path(folder), stored, position)
            expected = [
                (position, 1.0 + turn) if index not in one.completion.forced else None
                for turn, one in enumerate(rollout.turns)
                for index in range(len(one.completion.token_ids))
            ]
            assert found is not None
            assert [token and (owners[round(token.weight)], token.advantage) for token in found] == expected


def write_advantages(wish: TokensFile, samples: list[Sample]) -> None:
    """Writes a step's file, in which the weight of each row is its index."""
    counts = [sum(row.mask) for row in samples]
    advantages = [value for row in samples for value, mask in zip(row.advantages, row.mask, strict=True) if mask]
    zeros = np.zeros(len(advantages), np.float32)
    streams = {
        "row_R": np.arange(len(samples), dtype=np.int32),
        "count_R": np.array(counts, np.int32),
        "weight_R": np.arange(len(samples), dtype=np.float32),
        "advantage_N": np.array(advantages, np.float32),
        "fate_N": zeros.astype(np.uint8),
        **dict.fromkeys(("logp_N", "entropy_N", "gradient_N"), zeros),
    }
    Path(wish.path).parent.mkdir()
    save_file(streams, wish.path, metadata={"groups": json.dumps([("g", len(samples))])})


def test_files_of_all_ranks_are_counted_and_go_with_their_step(tmp_path: Path) -> None:
    files = TokensFiles(tmp_path, 1)
    for step in (1, 2):
        wish = files.wanted(step, ["g"])
        assert isinstance(wish, TokensFile)
        first = Path(wish.path)
        first.parent.mkdir(exist_ok=True)
        for path in (first, first.with_suffix(".1.safetensors")):
            path.write_bytes(b"x" * 400_000)
        files.prune()
    names = ["000002.1.safetensors", "000002.safetensors"]
    assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == names


def test_only_the_newest_steps_are_kept_and_a_torn_file_is_no_numbers(tmp_path: Path) -> None:
    files = TokensFiles(tmp_path, 1)
    for step in range(1, 5):
        wish = files.wanted(step, ["g"])
        assert isinstance(wish, TokensFile)
        Path(wish.path).parent.mkdir(exist_ok=True)
        Path(wish.path).write_bytes(b"x" * 400_000)
        files.prune()
    assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == ["000003.safetensors", "000004.safetensors"]
    assert TokensFiles(tmp_path, 0).wanted(5, ["g"]) is None
    resumed = TokensFiles(tmp_path, 1)
    Path(resumed.wanted(5, ["g"]).path).write_bytes(b"x" * 400_000)
    resumed.prune()
    assert sorted(file.name for file in (tmp_path / "tokens").iterdir()) == ["000004.safetensors", "000005.safetensors"]
    assert trained_tokens(tmp_path, raw("g", 3, [rollout_of(groups(0)[0][0])]), 0) is None
