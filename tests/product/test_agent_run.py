"""`shoal train` on conversations: a shortened run of examples/turns, beside an agent."""

import json
import subprocess
import sys
from pathlib import Path
from typing import cast

from shoal.experience.audit import audit
from shoal.experience.export import export_rows
from shoal.rollout.agents.runner import CUT
from shoal.types import Message

ROOT = Path(__file__).parents[2]
AGENT = """
[[tasks]]
name = "in_process"
service = "turns"
path = "guess_number"
agent = "examples.agents.guess_openai:guess"
"""


def test_a_shortened_run_of_the_example_trains_on_whole_conversations_and_its_audit_is_clean(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    config = tmp_path / "config.toml"
    example = (ROOT / "examples/turns/config.toml").read_text()
    config.write_text(example.replace("[rollout]", AGENT + "[rollout]"))
    overrides = (
        *(f"--run_dir={tmp_path / 'run'}", f'--model.path="{tiny_model_dir}"', "--train.steps=4"),
        *("--train.groups_per_step=3", "--rollout.group_size=4", "--eval.questions=3", "--eval.every_steps=0"),
    )
    done = subprocess.run(
        [sys.executable, "-m", "shoal.cli", "train", str(config), *overrides, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["steps"] == 4
    report = audit(tmp_path / "run")
    assert report.ok, report.sentences()
    exported = list(export_rows(tmp_path / "run"))
    assert {row["task"] for row in exported} == {"hanoi", "in_process"}
    for row in exported:
        drawn = sum(row["mask"])
        answers = sum(message.role == "assistant" for message in cast("tuple[Message, ...]", row["messages"]))
        assert row["status"] == "finished" or row["reason"] == CUT, row["reason"]  # the tiny model ends few answers
        # A number may be guessed at once, by chance.
        assert drawn >= answers > (0 if row["reward"] == 1 else 1), "one row of many answers"
