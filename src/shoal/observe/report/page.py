"""The page of a run: the overview of `shoal view`, frozen into one HTML file that needs no network."""

import base64
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from shoal.experience.counts import TaskCounts
from shoal.observe.answers import changes
from shoal.observe.metrics import Record, number
from shoal.observe.progress import event_text
from shoal.observe.report.figure import subtitle
from shoal.observe.runs import RunRecords
from shoal.observe.status import warnings_of
from shoal.observe.view.prose import PAGES
from shoal.observe.view.standing import figures, lead


def page_html(
    run_dir: Path, run: RunRecords, drawings: Sequence[tuple[str, str, str]], counts: Mapping[str, TaskCounts]
) -> str:
    """Builds the page with charts (title, light SVG, dark SVG) and tables; every text of the run is escaped."""
    pictures = [
        (title, *(base64.b64encode(one.encode()).decode() for one in (light, dark))) for title, light, dark in drawings
    ]
    look = files("shoal.net").joinpath("look.css").read_text()
    look += files("shoal.observe.view").joinpath("static", "style.css").read_text()
    return PAGES.get_template("frozen.html").render(
        **_of(run),
        lead=lead(run_dir, run),
        subtitle=subtitle(run),
        warnings=warnings_of(run),
        pictures=pictures,
        counts=counts,
        events=[_event(event) for event in run.events],
        config_text=run.config_text,
        look=look,
    )


def result_html(run: RunRecords, png: bytes) -> str:
    """Builds a notebook's view of a finished run: the picture, the figures and the answers."""
    return PAGES.get_template("result.html").render(**_of(run), picture=base64.b64encode(png).decode())


def _of(run: RunRecords) -> dict[str, object]:
    found = changes(run)
    ends = [f"{number(one, 'step'):.0f}" for one in (found[0].before, found[0].after)] if found else []
    return {"name": run.name, "figures": figures(run), "answers": found, "ends": ends}


def _event(event: Record) -> tuple[str, str]:
    time_s = event.get("time_s")
    return f"{time_s:.1f} s" if isinstance(time_s, int | float) else "", event_text(event)
