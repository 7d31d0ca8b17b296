"""lm-eval and Inspect, unchanged, against `shoal serve`: what the model says greedily is right, so every score is full.

They want versions of packages that Shoal's own environment has not; `make harnesses` makes one for them.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import openai
import pytest

from shoal.run.prepare import model_directory

BIN = Path(os.environ.get("SHOAL_HARNESS_BIN", "nowhere"))
QUESTIONS = [f"Spell the word '{word}' backward." for word in ("abc", "dog", "cat", "sun")]
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "SHOAL_API_KEY": "-"}
pytestmark = [
    pytest.mark.harness,
    pytest.mark.skipif(not BIN.is_dir(), reason="SHOAL_HARNESS_BIN names no folder; run make harnesses"),
]
MULTIPLE_CHOICE = """
task: choose
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
GENERATION = """
task: generate
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["!"], max_gen_toks: 8, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
"""
INSPECT = """
import json
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

@task
def spell():
    samples = [Sample(input=row["question"], target=row["said"]) for row in map(json.loads, open(DATA))]
    return Task(dataset=samples, solver=generate(), scorer=exact())
"""


@dataclass(frozen=True)
class Served:
    url: str
    client: openai.OpenAI


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    command = [str(Path(sys.executable).with_name("shoal")), "serve", "--model", "demo", "--port", "0", "--quiet"]
    with subprocess.Popen([*command, "--device", "cpu"], stdout=subprocess.PIPE, text=True) as served:
        try:
            assert served.stdout is not None
            url = served.stdout.readline().strip()
            with openai.OpenAI(base_url=url, api_key="-") as client:
                yield Served(url, client)
        finally:
            served.send_signal(signal.SIGINT)


def run(folder: Path, *command: str) -> str:
    env = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hf")}
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_lm_eval_compares_and_generates_as_the_model_does(server: Served, tmp_path: Path) -> None:
    rows = []
    for question in QUESTIONS:
        greedy = server.client.completions.create(
            model="demo", prompt=question, max_tokens=8, temperature=0, stop="!"
        ).choices[0]
        rows.append({"question": question, "choices": [greedy.text, "Q" + greedy.text], "answer": 0})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in (("choose", MULTIPLE_CHOICE), ("generate", GENERATION)):
        (tmp_path / f"{name}.yaml").write_text(text.replace("DATA", str(tmp_path / "data.jsonl")))
    options = f"model=demo,base_url={server.url}/completions,tokenizer={model_directory('demo')},max_length=250"
    run(
        tmp_path,
        *("lm_eval", "run", "--model", "local-completions", "--model_args", options, "--tasks", "choose,generate"),
        *("--include_path", str(tmp_path), "--output_path", str(tmp_path / "out")),
    )
    (found,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(found.read_text())["results"]
    assert results["choose"]["acc,none"] == 1.0
    assert results["generate"]["exact_match,none"] == 1.0


def test_inspect_runs_its_task_over_the_chat_route(server: Served, tmp_path: Path) -> None:
    rows = []
    for question in QUESTIONS:
        greedy = server.client.chat.completions.create(
            model="demo", messages=[{"role": "user", "content": question}], max_tokens=12, temperature=0
        )
        rows.append({"question": question, "said": greedy.choices[0].message.content})
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "spell.py").write_text(INSPECT.replace("DATA", repr(str(tmp_path / "data.jsonl"))))
    run(
        tmp_path,
        *("inspect", "eval", "spell.py", "--model", "openai-api/shoal/demo", "--model-base-url", server.url),
        *("--log-dir", "logs", "--log-format", "json", "--display", "none", "--max-tokens", "12"),
        *("--temperature", "0", "--logprobs", "--top-logprobs", "2", "--stop-seqs", "!"),
    )
    (log,) = (tmp_path / "logs").glob("*.json")
    read = json.loads(log.read_text())
    assert read["status"] == "success"
    assert [one["output"]["choices"][0]["message"]["content"] for one in read["samples"]] == [
        row["said"] for row in rows
    ]
    assert len(read["samples"]) == len(QUESTIONS)
