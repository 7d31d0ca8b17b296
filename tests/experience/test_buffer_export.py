"""The log as rows: the fields others rely on."""

import asyncio
import json
import os
import threading

import pyarrow.parquet as pq
import pytest

from buffer_values import group, open_buffer, rollout, run_group, train
from shoal.errors import RunDirError
from shoal.experience.export import export_jsonl, export_parquet, streams
from shoal.experience.raw import RawCompletion, RawTurn
from shoal.types import Completion, FinishReason, Group, Reward, RewardStatus, Rollout

FIELDS = [
    *("group_id", "rollout_id", "task", "receipt", "messages", "tokens", "mask", "logprobs", "versions"),
    *("reward", "status", "reason", "finished_seq", "admitted_version", "consumed_version", "consumed_step"),
]


@pytest.fixture
def run_dir(tmp_path):
    """Two groups consumed, one waiting, one of which a rollout failed."""

    async def main():
        buffer = open_buffer(tmp_path / "run")
        await run_group(buffer, "a")
        await run_group(buffer, "b", size=3, failed=1)
        await train(buffer, 0, 0)
        await run_group(buffer, "c")
        await buffer.close()

    asyncio.run(main())
    return tmp_path / "run"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_per_rollout_has_the_promised_fields_in_order(run_dir, tmp_path):
    file = tmp_path / "out.jsonl"
    assert export_jsonl(run_dir, file) == 7
    rows = lines(file)
    assert all(list(row) == FIELDS for row in rows)
    assert [row["rollout_id"] for row in rows] == ["a/0", "a/1", "b/0", "b/1", "b/2", "c/0", "c/1"]
    assert rows[0] == {
        "group_id": "a",
        "rollout_id": "a/0",
        "task": "chain_sum",
        "receipt": {"dataset": "chain_sum", "dataset_version": "0.1.25", "config": "{}", "seed": 7, "index": 3},
        "messages": [{"role": "user", "content": "1 + 1 ="}, {"role": "assistant", "content": "2"}],
        "tokens": [1, 2, 3, 5, 5],
        "mask": [0, 0, 0, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.5],
        "versions": [-1, -1, -1, 0, 0],
        "reward": 1.0,
        "status": "finished",
        "reason": "",
        "finished_seq": 1,
        "admitted_version": 0,
        "consumed_version": 0,
        "consumed_step": 0,
    }
    assert (rows[2]["status"], rows[2]["reason"]) == ("failed", "no answer")
    assert (rows[6]["consumed_version"], rows[6]["consumed_step"], rows[6]["admitted_version"]) == (None, None, 1)


def test_rollouts_of_a_dropped_group_say_why_and_unscored_ones_have_no_reward(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        admitted = await buffer.admit("a", "chain_sum")
        unscored = rollout("a/0")
        unscored = Rollout("a/0", unscored.messages, unscored.turns, Reward(0.0, RewardStatus.TIMED_OUT))
        await buffer.add(Group("a", group("a").task, (unscored,), admitted))
        await run_group(buffer, "b", (3, 3))
        assert [g.id for g in await buffer.take(1, 3)] == ["b"]
        await buffer.close()

    asyncio.run(main())
    export_jsonl(tmp_path, tmp_path / "out.jsonl")
    first, *_ = lines(tmp_path / "out.jsonl")
    assert (first["reward"], first["status"], first["reason"]) == (None, "finished", "stale")


def turn(prompt, *drawn):
    return RawTurn(list(prompt), RawCompletion(list(drawn), [-0.5] * len(drawn), [4] * len(drawn)))


def test_a_turn_that_extends_what_came_before_goes_on_in_the_same_stream():
    tokens, mask, logprobs, versions = streams([turn([1, 2], 10, 11), turn([1, 2, 10, 11, 3], 12)])
    assert tokens == [1, 2, 10, 11, 3, 12]
    assert mask == [0, 0, 1, 1, 0, 1]
    assert logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert versions == [-1, -1, 4, 4, -1, 4]


def test_a_turn_with_an_edited_history_is_appended_with_its_whole_prompt():
    tokens, mask, *_ = streams([turn([1, 2], 10), turn([1, 9], 11), turn([1, 9, 11, 3], 12)])
    assert tokens == [1, 2, 10, 1, 9, 11, 3, 12]
    assert mask == [0, 0, 1, 0, 0, 1, 0, 1]


def test_parquet_holds_the_same_rows(run_dir, tmp_path):
    export_jsonl(run_dir, tmp_path / "out.jsonl")
    assert export_parquet(run_dir, tmp_path / "out.parquet") == 7
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [list(row) for row in rows] == [FIELDS] * 7
    assert rows == lines(tmp_path / "out.jsonl")


def test_an_export_that_fails_leaves_nothing_and_keeps_what_was_there(run_dir, tmp_path):
    with pytest.raises(RunDirError, match="cannot be written"):
        export_jsonl(run_dir, tmp_path / "missing" / "out.jsonl")
    file = tmp_path / "out.jsonl"
    file.write_text("before")
    with pytest.raises(RunDirError, match="holds no run"):
        export_jsonl(tmp_path / "no run", file)
    assert file.read_text() == "before"
    assert sorted(os.listdir(tmp_path)) == ["out.jsonl", "run"]


def test_a_pipe_can_be_exported_to(run_dir, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()))
    reader.start()
    export_jsonl(run_dir, pipe)
    reader.join(10)
    assert len(read[0].splitlines()) == 7


def test_every_token_of_a_long_answer_is_there(tmp_path):
    async def main():
        buffer = open_buffer(tmp_path)
        admitted = await buffer.admit("a", "chain_sum")
        drawn = Completion(tuple(range(20_000)), (-1e-3,) * 20_000, (0,) * 20_000, FinishReason.LENGTH)
        long = rollout("a/0", drawn=drawn)
        await buffer.add(Group("a", group("a").task, (long,), admitted))
        await buffer.close()

    asyncio.run(main())
    export_jsonl(tmp_path, tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert row["tokens"] == [1, 2, 3, *range(20_000)]
    assert sum(row["mask"]) == 20_000
