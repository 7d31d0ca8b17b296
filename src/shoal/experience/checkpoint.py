"""Checkpoints of a run, written atomically.

    <run_dir>/checkpoints/step-25/            what the trainer saved, and
    <run_dir>/checkpoints/step-25/files.json  size and checksum of each file

A checkpoint is written under another name, synced, and renamed. A crash leaves at most the unfinished directory, which
the next `begin` removes. The step in the name is the cursor: the log has the steps after it, and a resume replays them.
A checkpoint may therefore be sealed only after the log has its steps and was synced (`Buffer.sync`).
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import RunDirError
from shoal.files import checksum, has_checksum, sync

FOLDER = "checkpoints"
FILES = "files.json"
_UNFINISHED = ".unfinished"
_REPLACED = ".replaced"


@dataclass(frozen=True, slots=True, order=True)
class Checkpoint:
    """A whole checkpoint."""

    step: int
    """The last step of the checkpoint."""
    path: Path


def unfinished(run_dir: Path, step: int) -> Path:
    """Directory that `begin` makes."""
    return run_dir / FOLDER / f"step-{step}{_UNFINISHED}"


def begin(run_dir: Path, step: int) -> Path:
    """An empty directory to save into; `seal` makes it the checkpoint of `step`. One at a time. Blocks.

    Removes the leftovers of a crash. Raises `RunDirError`.
    """
    folder = run_dir / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        for leftover in folder.iterdir():
            if leftover.name.endswith((_UNFINISHED, _REPLACED)):
                shutil.rmtree(leftover)
        directory = unfinished(run_dir, step)
        directory.mkdir()
    except OSError as error:
        raise RunDirError(f"{folder} cannot be written: {error.strerror}") from error
    return directory


def seal(run_dir: Path, step: int, *, keep: int = 2) -> Checkpoint:
    """Seals the saved files as the checkpoint of `step`, durably; replaces an older checkpoint of the step.

    Then removes all but the newest `keep`. Blocks. Raises `RunDirError`.
    """
    folder, begun = run_dir / FOLDER, unfinished(run_dir, step)
    final = folder / f"step-{step}"
    try:
        files = [path for path in sorted(begun.rglob("*")) if path.is_file()]
        saved = {str(file.relative_to(begun)): (file.stat().st_size, checksum(file)) for file in files}
        if not saved:
            raise RunDirError(f"{begun} is empty: nothing was saved")
        (begun / FILES).write_text(json.dumps(saved))
        for path in [*begun.rglob("*"), begun]:
            sync(path)
        if final.exists():
            final.rename(folder / f"step-{step}{_REPLACED}")
        begun.rename(final)
        sync(folder)
        shutil.rmtree(folder / f"step-{step}{_REPLACED}", ignore_errors=True)
        for old in checkpoints(run_dir)[:-keep]:
            doomed = old.path.with_name(old.path.name + _REPLACED)  # so half of one never has a valid name
            old.path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)
    except OSError as error:
        raise RunDirError(f"{final} cannot be written: {error.strerror}") from error
    return Checkpoint(step, final)


def intact(run_dir: Path, on_damage: Callable[[str], None] = lambda damage: None) -> Checkpoint | None:
    """The newest checkpoint whose files have the saved bytes, or None. Blocks: reads all files.

    `on_damage` receives the place of the damage of each newer checkpoint.
    """
    for checkpoint in reversed(checkpoints(run_dir)):
        saved = [(checkpoint.path / name, digest) for name, (_, digest) in _saved(checkpoint.path).items()]
        damaged = next((file for file, digest in saved if not has_checksum(file, digest)), None)
        if damaged is None:
            return checkpoint
        on_damage(f"{damaged} has other bytes than were saved")
    return None


def checkpoints(run_dir: Path) -> list[Checkpoint]:
    """Every whole checkpoint, oldest first. A checkpoint with missing or cut files, as in a broken copy, is skipped."""
    steps = ((path.name.removeprefix("step-"), path) for path in (run_dir / FOLDER).glob("step-*"))
    return sorted(Checkpoint(int(step), path) for step, path in steps if step.isdecimal() and _is_whole(path))


def _is_whole(path: Path) -> bool:
    try:
        return all((path / name).stat().st_size == size for name, (size, _) in _saved(path).items())
    except (OSError, ValueError, TypeError, AttributeError):  # no list of files, or one that was damaged
        return False


def _saved(path: Path) -> dict[str, tuple[int, str]]:
    files: dict[str, tuple[int, str]] = json.loads((path / FILES).read_text())
    return files
