"""Trackers of other projects, with the real libraries and their stores on this machine.

Their packages are in an environment of their own, which `make trackers` makes: what they pin is not what Shoal pins.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.config import MetricsConfig, parse
from shoal.errors import ConfigError
from shoal.observe.metrics import trackers_of
from shoal.observe.trackers import KINDS
from shoal.run.prepare import check_start

PYTHON = os.environ.get("SHOAL_TRACKERS_PYTHON", "")
pytestmark = pytest.mark.trackers
needs_trackers = pytest.mark.skipif(not PYTHON, reason="SHOAL_TRACKERS_PYTHON names no Python; run make trackers")
LOGGING = """
import os, sys
sys.path += OTHERS
os.environ["PYTHONPATH"] = os.pathsep.join(OTHERS)  # for what a tracker starts, not for this process
from pathlib import Path
from shoal.config import MetricsConfig
from shoal.observe.metrics import trackers_of

run_dir, kind, first = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
trackers = trackers_of(MetricsConfig(trackers=[f"{kind}:project"]), run_dir)
for step in (first, first + 1):
    trackers.log(step, {"reward": step / 10, "reward/chain_sum": 0.5})
asked = {"number": 0, "task": "chain_sum", "question": "1 + 1", "truth": "2"}
answers = [{**asked, "answer": f"at {first}", "reward": 1.0}]
trackers.log_answers(first, answers)
trackers.log_eval(first + 1, {"sampled": 0.25})
trackers.close()
"""
READING = {
    "tensorboard": """
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data
read = EventMultiplexer(size_guidance={"tensors": 0}).AddRunsFromDirectory(str(run_dir)).Reload()
steps = [(one.step, one.value) for one in read.Scalars("tensorboard", "reward")]
started = read.SummaryMetadata("tensorboard", SESSION_START_INFO_TAG).plugin_data.content
lr = parse_session_start_info_plugin_data(started).hparams["train.lr"].number_value
tables = [one.tensor_proto.string_val for one in read.Tensors("tensorboard", "completions")]
answers = sum(cell == b"at %d" % first for table in tables for cell in table for first in (1, 3))
found = {"status": "FINISHED", "steps": steps, "lr": lr, "answers": answers}
""",
    "mlflow": """
from mlflow import MlflowClient
client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
steps = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "reward")]
config = json.loads(Path(client.download_artifacts(run.info.run_id, "config.json")).read_text())
table = json.loads(Path(client.download_artifacts(run.info.run_id, "completions.json")).read_text())
found = {"status": run.info.status, "steps": steps, "lr": config["train.lr"], "answers": len(table["data"])}
""",
}


def of_others() -> list[str]:
    """Folders of the other environment's packages, which come after this one's."""
    command = [PYTHON, "-c", "import site, json; print(json.dumps(site.getsitepackages()))"]
    folders: list[str] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return folders


def run_dir_in(folder: Path) -> Path:
    run_dir = folder / "runs" / "first"
    run_dir.mkdir(parents=True)
    (run_dir / "resolved.toml").write_text('[train]\nlr = 0.125\n[model]\npath = "demo"\n')
    return run_dir


def python(code: str, folder: Path, *arguments: str) -> str:
    env = {
        **os.environ,
        "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
    }
    whole = code.replace("OTHERS", repr(of_others()))
    done = subprocess.run(
        [sys.executable, "-c", whole, *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@needs_trackers
@pytest.mark.parametrize("kind", list(READING))
def test_a_tracker_gets_numbers_settings_and_answers_and_a_resumed_run_goes_on(kind: str, tmp_path: Path) -> None:
    run_dir = run_dir_in(tmp_path)
    for first in ("1", "3"):
        python(LOGGING, tmp_path, str(run_dir), kind, first)
    head = "import json, sys\nsys.path += OTHERS\nfrom pathlib import Path\nrun_dir = Path(sys.argv[1])\n"
    code = f"{head}{READING[kind]}\nprint('FOUND' + json.dumps(found))"
    found = json.loads(python(code, tmp_path, str(run_dir)).partition("FOUND")[2])
    assert [[step, pytest.approx(value)] for step, value in sorted(found["steps"])] == [
        [1, 0.1],
        [2, 0.2],
        [3, 0.3],
        [4, 0.4],
    ]
    assert (found["lr"], found["status"]) == (0.125, "FINISHED")
    assert found["answers"] == 2


@needs_trackers
def test_wandb_gets_its_id_back_when_the_run_goes_on(tmp_path: Path) -> None:
    run_dir = run_dir_in(tmp_path)
    ids = []
    for first in ("1", "3"):
        python(LOGGING, tmp_path, str(run_dir), "wandb", first)
        ids.append(json.loads((run_dir / "trackers.json").read_text())["wandb"])
    assert ids[0] == ids[1]
    folders = list((run_dir / "wandb").glob("offline-run-*"))
    assert folders
    assert all(folder.name.endswith(ids[0]) for folder in folders)
    assert list((run_dir / "wandb").rglob("completions_*.table.json"))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"trackers": ["comet:x"]}, "comet"),
        ({"trackers": ["mlflow"]}, "KIND:NAME"),
        ({"trackers": ["no_such_module:opened"]}, "no_such_module"),
        *(({"trackers": [f"{kind}:x"]}, rf"shoal\[{kind}\]") for kind in KINDS if find_spec(kind) is None),
    ],
)
def test_a_tracker_that_cannot_be_had_is_named_before_the_run(
    settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    config = parse({"tasks": [{"name": "chain_sum"}], "run_dir": str(tmp_path / "run"), "metrics": settings})
    with pytest.raises(ConfigError, match=named):
        check_start(config)


OWN = """
import json

class Opened:
    def __init__(self, run):
        self._file, self._lr = open(run.run_dir / "own.jsonl", "a"), run.settings["train.lr"]

    def log(self, step, values):
        self._file.write(json.dumps([self._lr, step, values["reward"]]) + chr(10))

    def log_answers(self, step, answers):
        self._file.write(json.dumps([step, answers[0]["answer"]]) + chr(10))

    def close(self):
        self._file.close()
"""


def test_a_users_function_opens_a_tracker_of_any_kind(tmp_path: Path) -> None:
    run_dir = run_dir_in(tmp_path)
    (tmp_path / "own.py").write_text(OWN)
    trackers = trackers_of(MetricsConfig(trackers=[f"{tmp_path / 'own.py'}:Opened"]), run_dir)
    trackers.log(1, {"reward": 0.5})
    trackers.log_answers(1, [{"answer": "two"}])
    trackers.close()
    assert [json.loads(line) for line in (run_dir / "own.jsonl").read_text().splitlines()] == [
        [0.125, 1, 0.5],
        [1, "two"],
    ]


def test_no_tracker_is_opened_unless_it_is_asked_for(tmp_path: Path) -> None:
    trackers_of(MetricsConfig(), tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
