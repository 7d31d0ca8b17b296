"""A report is a picture and a page of a run, from its run directory alone: report.png and report.html."""

from pathlib import Path

from shoal.errors import RunDirError
from shoal.experience.counts import task_counts
from shoal.experience.log import FILE
from shoal.files import replaced
from shoal.net.collection import uncollected
from shoal.observe.metrics import read_run


def result_html(run_dir: Path) -> str:
    """Draws a run for a notebook, as HTML without scripts. Raises `RunDirError`."""
    from shoal.observe.report.figure import figure_png
    from shoal.observe.report.figure import result_html as html_of

    run = read_run(run_dir)
    return html_of(run, figure_png(run))


def write_report(run_dir: Path) -> tuple[Path, Path]:
    """Writes report.png and report.html into `run_dir` and returns their paths.

    The report of a run without a step says so. A running run is not disturbed. Raises `RunDirError` for a directory
    that is not a run directory or cannot be written.
    """
    with uncollected():
        from shoal.observe.report.figure import figure_png, figures_svg, page_html

    run = read_run(run_dir)
    counts = task_counts(run_dir) if (run_dir / FILE).is_file() else {}
    png = figure_png(run)
    files = {
        run_dir / "report.png": png,
        run_dir / "report.html": page_html(run_dir, run, figures_svg(run), counts).encode(),
    }
    for path, data in files.items():
        try:
            with replaced(path) as unfinished:
                unfinished.write_bytes(data)
        except OSError as error:
            raise RunDirError(f"{path}: expected to write the report there, got {error.strerror}") from error
    picture, page = files
    return picture, page
