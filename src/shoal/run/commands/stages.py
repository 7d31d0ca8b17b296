"""Stages of one configuration, in order: each begins with the model of the previous stage.

<run_dir>/stages/0-sft/            a stage's own run directory, with its model
<run_dir>/stages/0-sft/done.json   its figures, once it has ended
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from shoal.config import Config
from shoal.files import replaced
from shoal.run.commands.supervised import run_supervised
from shoal.run.prepare import check_run_dir
from shoal.run.run_dir import Listener, write_resolved

DONE = "done.json"


def run_stages(config: Config, *, resume: bool = False, listeners: Sequence[Listener] = ()) -> dict[str, object]:
    """Runs the stages that have not ended yet; returns the figures of all. Raises a `ShoalError`."""
    if not resume:
        check_run_dir(Path(config.run_dir), resume=False)
    Path(config.run_dir).mkdir(parents=True, exist_ok=True)
    write_resolved(config, Path(config.run_dir))
    figures: dict[str, object] = {}
    model = config.model
    for index, stage in enumerate(config.stages):
        settings = config.stage(index).model_copy(update={"model": model})
        run_dir = Path(settings.run_dir)
        if not (run_dir / DONE).is_file():
            _write(run_dir / DONE, _run(settings, stage.data, resume=resume, listeners=listeners))
        figures[run_dir.name] = json.loads((run_dir / DONE).read_text())
        model = model.model_copy(update={"path": str(run_dir / "model")})
    return {**figures, "model": model.path, "run_dir": config.run_dir}


def _run(config: Config, data: str | None, *, resume: bool, listeners: Sequence[Listener]) -> dict[str, object]:
    run_dir = Path(config.run_dir)
    if data is not None:
        return run_supervised(config, Path(data), resume=resume)
    from shoal.run.training import run_training

    begun = (run_dir / "log.sqlite").is_file()
    if not begun:
        shutil.rmtree(run_dir, ignore_errors=True)
    return run_training(config, resume=begun, listeners=listeners).figures


def _write(path: Path, figures: dict[str, object]) -> None:
    with replaced(path) as unfinished:
        unfinished.write_text(json.dumps(figures))
