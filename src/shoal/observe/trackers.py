"""Trackers of other projects: TensorBoard, W&B and MLflow. Each gets numbers, settings and answers.

For any other tracker the user names a `module:function` that takes the `TrackedRun` and returns an `OtherTracker`.

A run keeps its id at each tracker in trackers.json, so that a resumed run continues there. Each tracker's own
environment variables set where it stores its data.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from shoal.errors import ConfigError, RunDirError, did_you_mean, expected_one_of
from shoal.files import replaced
from shoal.plugins import own_code

IDS = "trackers.json"
KNOWN = (bool, int, float, str)
"""Types of hyperparameters that TensorBoard accepts."""
Answer: TypeAlias = Mapping[str, int | float | str | None]


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """A run as trackers know it."""

    run_dir: Path
    settings: Mapping[str, Any]
    """Settings by dotted name, without credentials."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        return self.run_dir.resolve().name

    @property
    def ids(self) -> dict[str, str]:
        """The run's ids at its trackers, by kind. Raises `RunDirError`."""
        path = self.run_dir / IDS
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, str]) if path.is_file() else {}
        except (OSError, msgspec.MsgspecError) as error:
            raise RunDirError(f"{path}: expected the run's ids at its trackers: {error}") from error

    def keep(self, kind: str, run_id: str) -> None:
        """Keeps the run's id at a tracker."""
        with replaced(self.run_dir / IDS) as target:
            target.write_bytes(msgspec.json.encode({**self.ids, kind: run_id}))


class OtherTracker(Protocol):
    """A tracker of another project."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the numbers of one step."""

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Logs sampled answers to held-out questions, as a table."""

    def close(self) -> None:
        """Sends what is left."""


class TensorBoardTracker:
    """Tracker that writes TensorBoard event files into the run's folder, without torch.

    Settings become hyperparameters, and answers a table of texts. Files of a resumed run continue at its step.
    """

    def __init__(self, _: str, run: TrackedRun) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary
        self._metadata, self._tensor = create_summary_metadata("completions", ""), make_tensor_proto
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))
        known = {name: value if isinstance(value, KNOWN) else json.dumps(value) for name, value in run.settings.items()}
        self._write(0, hparams_pb(known, trial_id=run.name))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Writes one scalar per name."""
        scalars = [self._summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step, self._summary(value=scalars))

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Writes a table of texts."""
        columns, rows = _table(step, answers)
        cells = [columns, *(["" if cell is None else str(cell) for cell in row] for row in rows)]
        tensor = self._tensor([[cell.encode() for cell in row] for row in cells])
        table = self._summary.Value(tag="completions", metadata=self._metadata, tensor=tensor)
        self._write(step, self._summary(value=[table]))

    def close(self) -> None:
        """Writes all pending values."""
        self._writer.close()

    def _write(self, step: int, summary: Any) -> None:
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=summary))


class WandbTracker:
    """Tracker that logs to a Weights & Biases project; WANDB_MODE and other variables apply."""

    def __init__(self, project: str, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        before, options = run.ids.get("wandb"), {"project": project, "name": run.name, "dir": str(run.run_dir)}
        self._run = wandb.init(**options, id=before, resume="allow", config=dict(run.settings))
        run.keep("wandb", self._run.id)
        # An evaluation ends after later steps were logged, and W&B drops values under an earlier step of its counter.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of one step."""
        self._run.log({**values, "step": step})

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Logs a table."""
        columns, rows = _table(step, answers)
        self._run.log({"completions": self._wandb.Table(columns=columns, data=rows), "step": step})

    def close(self) -> None:
        """Sends all pending values."""
        self._run.finish()


class MlflowTracker:
    """Tracker that logs to an MLflow experiment at MLFLOW_TRACKING_URI."""

    def __init__(self, experiment: str, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric

        self._metric, self._client = Metric, MlflowClient()
        self._id = run.ids.get("mlflow", "")
        if self._id:
            self._client.update_run(self._id, status="RUNNING")
        else:
            found = self._client.get_experiment_by_name(experiment)
            into = found.experiment_id if found is not None else self._client.create_experiment(experiment)
            self._id = self._client.create_run(into, run_name=run.name).info.run_id
            run.keep("mlflow", self._id)
        self._client.log_dict(self._id, dict(run.settings), "config.json")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Logs the values of one step."""
        now_ms = round(time.time() * 1000)
        # MLflow's file store keeps each name as a file, and `reward` cannot also be the folder of `reward/<task>`.
        plain = {re.sub(r"[^\w. -]", ".", name): value for name, value in values.items()}
        metrics = [self._metric(name, value, now_ms, step) for name, value in plain.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def log_answers(self, step: int, answers: Sequence[Answer]) -> None:
        """Adds rows to a table."""
        columns, rows = _table(step, answers)
        data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        self._client.log_table(self._id, data, "completions.json")

    def close(self) -> None:
        """Marks the run as finished."""
        self._client.set_terminated(self._id)


KINDS: Mapping[str, Callable[[str, TrackedRun], OtherTracker]] = {
    "tensorboard": TensorBoardTracker,
    "wandb": WandbTracker,
    "mlflow": MlflowTracker,
}
"""Trackers by the name of their package, which is also the extra that installs it."""


def checked_tracker(text: str) -> str:
    """The kind in KIND:NAME; empty for a user's function. Raises `ConfigError` for any other text."""
    kind, _, name = text.partition(":")
    if kind not in KINDS:
        if not name or (did_you_mean(kind, KINDS) and find_spec(kind) is None):
            raise ConfigError(f"metrics.trackers: {expected_one_of(KINDS, kind, ' or module:function')}")
        own_code("metrics.trackers", text)
        return ""
    if not name and kind != "tensorboard":
        raise ConfigError(f"metrics.trackers: expected KIND:NAME, as in {kind}:my-project, got {text!r}")
    if find_spec(kind) is None:
        raise ConfigError(
            f"metrics.trackers: {text!r} needs the package {kind}, which is not installed; "
            f"pip install 'shoal[{kind}]' brings it"
        )
    return kind


def other_tracker(text: str, run: TrackedRun) -> OtherTracker:
    """Opens the tracker that a text of `metrics.trackers` names. Raises `ConfigError` and `RunDirError`."""
    if kind := checked_tracker(text):
        return KINDS[kind](text.partition(":")[2], run)
    opened = own_code("metrics.trackers", text)
    if not callable(opened):
        raise ConfigError(f"metrics.trackers: {text!r}: expected a function or class, got {type(opened).__name__}")
    tracker: OtherTracker = opened(run)
    return tracker


def _table(step: int, answers: Sequence[Answer]) -> tuple[list[str], list[list[int | float | str | None]]]:
    """Columns and rows of answers."""
    columns = list(answers[0]) if answers else []
    return ["step", *columns], [[step, *(answer.get(name) for name in columns)] for answer in answers]
