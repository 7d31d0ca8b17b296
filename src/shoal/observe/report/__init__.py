"""A run as a picture and as a page, from its run directory alone: report.png and report.html."""

import os
from pathlib import Path

from shoal.errors import RunDirError
from shoal.experience import task_counts
from shoal.experience.log import FILE
from shoal.observe.report.records import RunRecords, read_run

__all__ = ["RunRecords", "read_run", "write_report"]


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes report.png and report.html into `run_dir` and returns their paths.

    A run without a step gives a report that says so. A run that goes on is not disturbed. Raises `RunDirError` when
    `run_dir` is no run directory or cannot be written.
    """
    from shoal.observe.report.figure import figure_png
    from shoal.observe.report.page import page_html

    run = read_run(run_dir)
    counts = task_counts(run_dir) if (run_dir / FILE).is_file() else {}
    png = figure_png(run)
    return (
        _write(run_dir / "report.png", png),
        _write(run_dir / "report.html", page_html(run, png, counts).encode()),
    )


def _write(path: Path, data: bytes) -> Path:
    """Puts a whole file in place of an old one: whoever reads it meanwhile never sees half."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_bytes(data)
        os.replace(unfinished, path)
    except OSError as error:
        raise RunDirError(f"{path}: expected to write the report there, got {error.strerror}") from error
    return path
