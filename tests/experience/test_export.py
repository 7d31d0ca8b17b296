"""The log as rows: the fields others rely on."""

import asyncio
import json
import os
import threading
from dataclasses import replace
from typing import cast

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from buffer_values import META, group, open_buffer, rollout, run_group, train
from shoal.config import parse, to_toml
from shoal.errors import RunDirError
from shoal.experience.export import export_jsonl, export_parquet, export_rows, streams
from shoal.experience.raw import RawCompletion, RawTurn
from shoal.observe.export_extras import extras_of
from shoal.trainer.advantage import mask_tokens, step_samples
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Reward,
    RewardStatus,
    Role,
    Rollout,
    ToolCall,
    Turn,
)

FIELDS = [
    *("group_id", "rollout_id", "task", "receipt", "answer", "messages", "tokens", "mask", "logprobs", "versions"),
    *("advantages", "texts", "reward", "parts", "evidence", "turn_rewards", "turn_parents", "peer"),
    *("status", "reason", "finished_seq", "admitted_version", "consumed_version", "consumed_step"),
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
        "answer": "2",
        "messages": [
            {"role": "user", "content": "1 + 1 =", "tool_calls": [], "tool_call_id": "", "reasoning": ""},
            {"role": "assistant", "content": "2", "tool_calls": [], "tool_call_id": "", "reasoning": ""},
        ],
        "tokens": [1, 2, 3, 5, 5],
        "mask": [0, 0, 0, 1, 1],
        "logprobs": [0.0, 0.0, 0.0, -0.5, -0.5],
        "versions": [-1, -1, -1, 0, 0],
        "advantages": None,
        "texts": None,
        "reward": 1.0,
        "parts": [],
        "evidence": "",
        "turn_rewards": [0.0],
        "turn_parents": [None],
        "peer": None,
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


def turn(rendered, *drawn, parent=None):
    completion = RawCompletion(drawn, (-0.5,) * len(drawn), (4,) * len(drawn), FinishReason.STOP)
    return RawTurn(rendered, completion, parent=parent)


def test_a_turn_that_extends_what_came_before_goes_on_in_the_same_stream():
    tokens, mask, logprobs, versions = streams([turn([1, 2], 10, 11), turn([3], 12, parent=0)])
    assert tokens == [1, 2, 10, 11, 3, 12]
    assert mask == [0, 0, 1, 1, 0, 1]
    assert logprobs == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert versions == [-1, -1, 4, 4, -1, 4]


def test_a_turn_with_an_edited_history_is_appended_with_its_whole_prompt():
    tokens, mask, *_ = streams([turn([1, 2], 10), turn([1, 9], 11), turn([3], 12, parent=1)])
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


def said_with_a_tool(rollout_id: str, reward: Reward) -> Rollout:
    """Two turns: a call of a tool, its answer, and what the model makes of it."""
    first = Completion((5, 6), (-0.5, -0.5), (0, 0), FinishReason.STOP)
    second = Completion((8,), (-0.25,), (1,), FinishReason.STOP)
    messages = (
        Message(Role.USER, "1 + 1 ="),
        Message(Role.ASSISTANT, "", (ToolCall("c1", "add", '{"a": 1}'),), reasoning="I have a tool"),
        Message(Role.TOOL, "2", tool_call_id="c1"),
        Message(Role.ASSISTANT, "2"),
    )
    turns = (Turn((1, 2), first, 0.25), Turn((7,), second, parent=0))
    return Rollout(rollout_id, messages, turns, reward)


def consumed_group(run_dir, rewards, settings):
    """A run directory in which one group was trained, with its settings."""

    async def main():
        buffer = open_buffer(run_dir, replace(META, groups_per_step=1))
        admitted = await buffer.admit("a", "chain_sum")
        rollouts = tuple(said_with_a_tool(f"a/{i}", reward) for i, reward in enumerate(rewards))
        await buffer.add(Group("a", group("a").task, rollouts, admitted))
        await buffer.take(1, 1)
        await buffer.consumed(0, 1, ["a"], version_after=2)
        await buffer.close()

    asyncio.run(main())
    (run_dir / "resolved.toml").write_text(to_toml(parse({"tasks": [{"name": "chain_sum"}], **settings})))


def test_nothing_that_an_agent_or_a_scorer_said_is_left_out(tmp_path):
    reward = Reward(1.0, parts=(("exact", 1.0), ("length", 0.5)), evidence="as asked")
    consumed_group(tmp_path, [reward], {})
    assert export_parquet(tmp_path, tmp_path / "out.parquet") == 1
    export_jsonl(tmp_path, tmp_path / "out.jsonl")
    (row,) = lines(tmp_path / "out.jsonl")
    assert pq.read_table(tmp_path / "out.parquet").to_pylist() == [row]
    _, called, told, _ = row["messages"]
    assert called["tool_calls"] == [{"id": "c1", "name": "add", "arguments": '{"a": 1}'}]
    assert (called["reasoning"], told["tool_call_id"]) == ("I have a tool", "c1")
    assert row["turn_rewards"] == [0.25, 0.0]
    assert row["turn_parents"] == [None, 0]
    assert row["parts"] == [{"name": "exact", "value": 1.0}, {"name": "length", "value": 0.5}]
    assert row["evidence"] == "as asked"


@pytest.mark.parametrize("kind", ["grpo", "grpo_no_std", "rloo", "batch", "group_batch"])
@pytest.mark.parametrize("late", ["drop", "mask_tokens"])
def test_advantages_are_those_of_the_rows_that_were_trained(tmp_path, kind, late):
    settings = {"train": {"advantage": kind}, "asynchrony": {"late": late, "max_staleness": 0}}
    consumed_group(tmp_path, [Reward(1.0), Reward(0.0), Reward(0.0)], settings)
    rewards = [Reward(1.0), Reward(0.0), Reward(0.0)]
    trained = Group("a", group("a").task, tuple(said_with_a_tool(f"a/{i}", r) for i, r in enumerate(rewards)), 0)
    (rows,) = step_samples([trained], parse({"tasks": [{"name": "chain_sum"}], **settings}).train, 256)
    if late == "mask_tokens":
        rows, _ = mask_tokens(rows, 1)
    exported = list(export_rows(tmp_path, extras_of(tmp_path)))
    assert [tuple(row["advantages"]) for row in exported] == [row.advantages for row in rows]
    assert any(map(any, (row["advantages"] for row in exported)))


def test_the_texts_of_tokens_make_the_conversation_when_the_tokenizer_is_there(tmp_path):
    consumed_group(tmp_path, [Reward(1.0)], {})
    (tmp_path / "model").mkdir()
    tokenizer = Tokenizer(WordLevel({f" w{i}": i for i in range(10)} | {"a": 10}, unk_token="a"))
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    (row,) = export_rows(tmp_path, extras_of(tmp_path))
    assert row["tokens"] == [1, 2, 5, 6, 7, 8]
    assert [text.strip() for text in cast("list[str]", row["texts"])] == ["w1", "w2", "w5", "w6", "w7", "w8"]
