"""Runs as the page shows them: their records, read on as they are written, and what differs in their settings."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock

from shoal.errors import RunDirError
from shoal.experience.log import FILE
from shoal.observe.metrics import Record, records_in
from shoal.observe.report.records import RunRecords, run_of

METRICS = "metrics.jsonl"


class WatchedRun:
    """One run directory, which is only read. Its metrics.jsonl is read on from where it was last read to."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Raises `RunDirError` when it is no run directory."""
        if not any((run_dir / file).is_file() for file in (METRICS, "resolved.toml", FILE)):
            raise RunDirError(f"{run_dir}: expected a run directory, with {METRICS}, resolved.toml or {FILE}")
        self.run_dir, self.name = run_dir, name
        self._lock = Lock()
        self._records: list[Record] = []
        self._read_bytes = 0
        self._run: RunRecords | None = None

    @property
    def stamp(self) -> str:
        """Changes whenever there is more to show."""
        return f"{_size(self.run_dir / METRICS)}"

    def records(self) -> RunRecords:
        """All records so far."""
        path = self.run_dir / METRICS
        with self._lock:
            size = _size(path)
            if size < self._read_bytes:  # another run took its place
                self._records, self._read_bytes, self._run = [], 0, None
            if size > self._read_bytes or self._run is None:
                if size:
                    with path.open("rb") as file:
                        file.seek(self._read_bytes)
                        new = file.read()
                    whole = new[: new.rfind(b"\n") + 1]
                    self._records += records_in(whole)
                    self._read_bytes += len(whole)
                self._run = run_of(self.run_dir, self._records)
            return self._run


def watched(run_dirs: Sequence[Path]) -> dict[str, WatchedRun]:
    """Runs by names that differ: their folders', with as many of the folders above as it takes."""
    paths = list(dict.fromkeys(path.resolve() for path in run_dirs))
    for depth in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return {name: WatchedRun(path, name) for name, path in zip(names, paths, strict=True)}


def newest_run(folder: Path) -> Path:
    """The run below a folder that was written last. Raises `RunDirError` when there is none."""
    found = {file.parent: file.stat().st_mtime for name in (METRICS, FILE) for file in folder.glob(f"*/{name}")}
    if not found:
        raise RunDirError(f"{folder} holds no run; name one: shoal view RUN")
    return max(found, key=lambda run_dir: found[run_dir])


def differences(runs: Mapping[str, RunRecords]) -> list[tuple[str, list[str]]]:
    """The settings that are not the same in all runs, with their value in each."""
    settings = [dict(_flat("", _toml(run.config_text))) for run in runs.values()]
    names = dict.fromkeys(name for one in settings for name in one if name != "run_dir")
    rows = [(name, [one.get(name, "") for one in settings]) for name in names]
    return [(name, values) for name, values in rows if len(set(values)) > 1]


def _toml(text: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return {}


def _flat(prefix: str, value: object) -> list[tuple[str, str]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _flat(f"{prefix}.{key}" if prefix else key, inner)]
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        return [pair for i, inner in enumerate(value) for pair in _flat(f"{prefix}[{i}]", inner)]
    return [(prefix, str(value))]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
