"""Rollouts of a run as a log of Inspect (`inspect view`): a sample per rollout, with its messages and reward.

A group is a sample id, and its rollouts are epochs, so that Inspect shows the answers to one question together. Format:
Inspect's EvalLog as JSON, version 2.
"""

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from shoal.experience.export import ExportRow, export_rows, written_to
from shoal.observe.runs import read_run
from shoal.types import Json, Message, Role

NAMED = ("task", "peer", "reason", "consumed_step", "consumed_version", "admitted_version", "parts", "receipt")
"""Columns of an export that become metadata."""


def export_inspect(run_dir: Path, file: Path) -> int:
    """Writes every committed rollout as a sample and returns their number. Raises `RunDirError`."""
    run, rewards = read_run(run_dir), list[float]()
    model = run.config.model.path if run.config is not None else "unknown"
    tasks, rows, epochs = set[str](), 0, dict[str, int]()
    created = datetime.fromtimestamp((run_dir / "log.sqlite").stat().st_mtime, UTC).isoformat(timespec="seconds")
    with written_to(file) as out:
        out.write(b'{"version":2,"status":"success","samples":[')
        for row in export_rows(run_dir):
            group = str(row["group_id"])
            epochs = {group: epochs.get(group, 0) + 1}  # the rollouts of a group follow one another
            out.write((b"," if rows else b"") + msgspec.json.encode(_sample(row, model, epochs[group])))
            rows += 1
            tasks.add(str(row["task"]))
            if isinstance(reward := row["reward"], float):
                rewards.append(reward)
        mean = sum(rewards) / len(rewards) if rewards else 0.0
        score = {"name": "reward", "scorer": "reward", "metrics": {"mean": {"name": "mean", "value": mean}}}
        rest = {
            "eval": {
                "created": created,
                "task": ",".join(sorted(tasks)) or run.name,
                "run_id": run.name,
                "dataset": {"name": run.name, "samples": rows},
                "model": f"shoal/{model}",
                "config": {},
                "metadata": {"settings": run.config_text},
            },
            "results": {"total_samples": rows, "completed_samples": rows, "scores": [score]},
        }
        out.write(b"]," + msgspec.json.encode(rest)[1:])
    return rows


def _sample(row: ExportRow, model: str, epoch: int) -> dict[str, object]:
    """Sample of one rollout."""
    given = row["messages"]
    messages = [message for message in given if isinstance(message, Message)] if isinstance(given, tuple) else []
    first = next((i for i, message in enumerate(messages) if message.role is Role.ASSISTANT), len(messages))
    said = [_message(message) for message in messages]
    last = messages[-1] if messages and messages[-1].role is Role.ASSISTANT else Message(Role.ASSISTANT, "")
    choice = {"message": {**_message(last), "model": model}, "stop_reason": "stop"}
    failed = row["status"] == "failed"
    return {
        "id": row["group_id"],
        "epoch": epoch,
        "uuid": f"{row['group_id']}/{row['rollout_id']}",
        "input": said[:first] or "",
        "target": row["answer"] or "",
        "messages": said,
        "output": {"model": model, "choices": [choice]},
        "scores": {} if row["reward"] is None else {"reward": _score(row, last.content)},
        "metadata": {name: row[name] for name in NAMED if row[name] not in (None, "")},
        **({"error": {"message": row["reason"], "traceback": "", "traceback_ansi": ""}} if failed else {}),
    }


def _score(row: ExportRow, answer: str) -> Mapping[str, object]:
    return {"value": row["reward"], "answer": answer, "explanation": row["evidence"] or None}


def _message(message: Message) -> dict[str, Json]:
    """Message in Inspect's form."""
    content: Json = message.content
    if message.reasoning:
        content = [{"type": "reasoning", "reasoning": message.reasoning}, {"type": "text", "text": message.content}]
    body: dict[str, Json] = {"role": message.role.value, "content": content}
    if message.tool_calls:
        body["tool_calls"] = [
            {"id": call.id, "function": call.name, "arguments": _arguments(call.arguments), "type": "function"}
            for call in message.tool_calls
        ]
    if message.tool_call_id:
        body["tool_call_id"] = message.tool_call_id
    return body


def _arguments(text: str) -> dict[str, Json]:
    """Arguments of a call; text that is not a JSON object is kept under one name."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    return found if isinstance(found, dict) else {"arguments": text}
