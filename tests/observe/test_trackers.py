"""Trackers of other projects, with the real libraries and their stores on this machine, and spans to a real receiver.

Their packages are in an environment of their own, which `make trackers` makes: what they pin is not what Shoal pins.
"""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from shoal.config import MetricsConfig, parse
from shoal.errors import ConfigError
from shoal.observe.metrics import trackers_of
from shoal.observe.trackers import KINDS
from shoal.run.checks import check_start

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
wanted = {"tensorboard": True} if kind == "tensorboard" else {"trackers": [f"{kind}:project"]}
trackers = trackers_of(MetricsConfig(**wanted), run_dir)
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
    "aim": """
import aim
from aim.storage.context import Context
known = json.loads((run_dir / "trackers.json").read_text())["aim"]
quiet = {"system_tracking_interval": None, "capture_terminal_logs": False}
run = aim.Run(known, repo=str(run_dir.parent), **quiet)  # what no index has yet only the run itself can read
rows = run.get_metric("reward", Context({})).dataframe()
texts = run.get_text_sequence("completions", Context({})).values.sparse_list()[1]
pairs, lr = list(zip(rows["step"].tolist(), rows["value"].tolist())), run["config"]["train.lr"]
found = {"status": "FINISHED", "steps": pairs, "lr": lr, "answers": len(texts)}
""",
    "trackio": """
import trackio
from trackio.sqlite_storage import SQLiteStorage
names = SQLiteStorage.get_runs("project")
assert names == [run_dir.name], names
rows = SQLiteStorage.get_logs("project", run_dir.name)
steps = [(row["step"], row["reward"]) for row in rows if "reward" in row]
config = SQLiteStorage.get_run_config("project", run_dir.name)
answers = sum("completions" in row for row in rows)
found = {"status": "FINISHED", "steps": steps, "lr": config["train.lr"], "answers": answers}
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
        "TRACKIO_DIR": str(folder / "trackio"),
        "WANDB_MODE": "offline",
        "AIM_ACCESS_LOG": "0",
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


@pytest.fixture
def receiver() -> Iterator[tuple[str, list[bytes], threading.Event]]:
    """An OTLP receiver over HTTP: its URL, the bodies that came, and an event for the first."""
    bodies: list[bytes] = []
    came = threading.Event()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["content-length"])))
            assert self.path == "/v1/traces"
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()
            came.set()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", bodies, came
    server.shutdown()
    thread.join()
    server.server_close()


SPANS = """
import sys
sys.path += OTHERS
from shoal.observe.spans import SpanListener
listener = SpanListener(sys.argv[1], "first")
listener({"kind": "step", "step": 1, "time_s": 10.0, "train_s": 1.0})
waits = {"groups_wait_s": 2.0, "train_s": 1.5, "engine_busy": 0.5}
listener({"kind": "step", "step": 2, "time_s": 14.0, "reward": 0.5, **waits})
listener({"kind": "event", "name": "engine_lost", "time_s": 14.5})
listener.close()
"""
DECODE = """
import json, sys
sys.path += OTHERS
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
spans = []
for path in sys.argv[1:]:
    request = ExportTraceServiceRequest.FromString(open(path, "rb").read())
    for resource in request.resource_spans:
        named = {one.key: one.value.string_value for one in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                length_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
                spans.append([span.name, length_s, bool(span.parent_span_id), named["shoal.run"]])
print("FOUND" + json.dumps(spans))
"""


@needs_trackers
def test_spans_reach_a_receiver_with_who_worked_and_waited(
    receiver: tuple[str, list[bytes], threading.Event], tmp_path: Path
) -> None:
    url, bodies, came = receiver
    python(SPANS, tmp_path, url)
    assert came.wait(30)
    paths = []
    for i, body in enumerate(bodies):
        (tmp_path / f"{i}.pb").write_bytes(body)
        paths.append(str(tmp_path / f"{i}.pb"))
    spans = {name: rest for name, *rest in json.loads(python(DECODE, tmp_path, *paths).partition("FOUND")[2])}
    assert spans["step"] == [pytest.approx(4.0), False, "first"]
    assert spans["trainer: waits for groups"] == [pytest.approx(2.0), True, "first"]
    assert spans["trainer: trains"][0] == pytest.approx(1.5)
    assert spans["engine_lost"] == [0.0, False, "first"]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"trackers": ["comet:x"]}, "comet"),
        ({"trackers": ["mlflow"]}, "KIND:NAME"),
        *(({"trackers": [f"{kind}:x"]}, rf"shoal\[{kind}\]") for kind in KINDS if find_spec(kind) is None),
    ],
)
def test_a_tracker_that_cannot_be_had_is_named_before_the_run(
    settings: dict[str, object], named: str, tmp_path: Path
) -> None:
    config = parse({"tasks": [{"name": "chain_sum"}], "run_dir": str(tmp_path / "run"), "metrics": settings})
    with pytest.raises(ConfigError, match=named):
        check_start(config)


def test_no_tracker_is_opened_unless_it_is_asked_for(tmp_path: Path) -> None:
    trackers_of(MetricsConfig(), tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]
