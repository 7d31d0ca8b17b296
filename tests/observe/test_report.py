"""The picture and the page of a run, made from its run directory alone."""

import asyncio
import io
import math
import re
from base64 import b64decode
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from buffer_values import open_buffer, run_group, train
from shoal.config import parse, to_toml
from shoal.errors import RunDirError
from shoal.observe.metrics import JsonlTracker, moving_average, read_run
from shoal.observe.report import write_report
from shoal.observe.report.figure import INK, charts_of
from shoal.observe.status import figures

NASTY = "<script>alert('x')</script>$a_b^"


class Page(HTMLParser):
    """What a browser would make of a page: its text, the tags, and every address it would ask for."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.text, self.tags, self.addresses = "", [], []
        self.feed(path.read_text())

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "srcset", "href"}]


def write_run(run_dir: Path, steps: int, *, task: str = "chain_sum", max_staleness: int = 2) -> None:
    """A run directory as a run of `steps` steps leaves it, the reward rising from 0 to 1."""
    run_dir.mkdir(exist_ok=True)
    config = parse({"run_dir": "runs/x", "tasks": [{"name": task}], "asynchrony": {"max_staleness": max_staleness}})
    (run_dir / "resolved.toml").write_text(to_toml(config))
    tracker = JsonlTracker(run_dir / "metrics.jsonl", clock=iter(range(10**6)).__next__)
    tracker.write("eval", {"step": 0, "sampled": 0.25, "greedy": 0.5})
    for step in range(1, steps + 1):
        reward = (step - 1) / max(1, steps - 1)
        tracker.log(step, {"reward": reward, f"reward/{task}": reward, **OTHERS})
    tracker.write("eval", {"step": steps, "sampled": 0.75, "greedy": None})
    tracker.close()


OTHERS = {
    **{"version": 3, "staleness_mean": 0.5, "staleness_max": 2, "tokens_per_s": 1000.0, "samples_per_s": 100.0},
    **{"engine_busy": 0.9, "trainer_busy": 0.8, "loss": 0.1, "grad_norm": 0.5, "entropy": 1.0, "ratio_mean": 1.0},
    **{
        "ratio_share/0-0.5": 0.1,
        "ratio_share/0.5-2": 0.7,
        "ratio_share/2-inf": 0.2,
        "staleness/0": 5,
        "staleness/1": 3,
    },
    **{"clipped_share": 0.0, "mismatch": 1e-5, "dropped_late": 1, "failed": 0, "late_tokens": 0},
}


def test_the_figures_say_where_the_run_stands_and_what_it_came_to(tmp_path: Path) -> None:
    write_run(tmp_path, 100)
    shown = dict(figures(read_run(tmp_path)))
    assert (shown["step"], shown["held-out full marks"], shown["staleness"]) == ("100 of 100", "0.250 to 0.750", "0.50")
    assert float(shown["reward"]) == pytest.approx(89.5 / 99, abs=5e-4)  # mean of the last 20


def test_a_step_that_was_repeated_after_a_crash_counts_once_as_it_was_last(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step, reward in ((1, 0.1), (2, 0.2), (3, 0.3), (2, 0.5)):
        tracker.log(step, {"reward": reward})
    tracker.close()
    assert read_run(tmp_path).column("reward") == [0.1, 0.5, 0.3]


def test_the_report_is_a_picture_and_a_page_that_draws_each_chart_in_both_themes(tmp_path: Path) -> None:
    write_run(tmp_path, 30)
    png, html = write_report(tmp_path)
    page = Page(html)
    titles = [chart.title for chart in charts_of(read_run(tmp_path))]
    drawn = [re.findall(r"data:image/svg.xml;base64,([^\"]+)", one) for one in html.read_text().split("</picture>")]
    for title, (dark, light) in zip(titles, drawn[:-1], strict=True):
        texts = [b64decode(one).decode() for one in (dark, light)]
        assert [escape(title, quote=False) in text for text in texts] == [True] * 2
        assert [INK in text for text in texts] == [False, True]
    assert page.tags.count("img") == len(titles) > 3
    assert Image.open(io.BytesIO(png.read_bytes())).size[0] == 2080
    assert "demo on chain_sum" in page.text
    assert "max_staleness = 2" in page.text
    assert 'name = "chain_sum"' in page.text  # the configuration


def test_the_picture_of_a_run_in_a_swarm_shows_what_came_of_its_peers(tmp_path: Path) -> None:
    titles = []
    brought = {"peers": 3, "offers_shared": 5, "external": 2, "reward_external": 0.5}
    for name, peers in (("alone", {}), ("member", brought)):
        (tmp_path / name).mkdir()
        tracker = JsonlTracker(tmp_path / name / "metrics.jsonl")
        tracker.log(1, {"reward": 0.5, **peers})
        tracker.close()
        titles.append([chart.title for chart in charts_of(read_run(tmp_path / name))])
    theirs = ["Offers", "Peers' groups in a step", "Reward of own and of peers' answers", "Peers remembered"]
    assert titles == [["Reward"], ["Reward", *theirs]]


def test_the_page_needs_no_network_and_runs_no_script_whatever_a_run_contains(tmp_path: Path) -> None:
    run_dir = tmp_path / NASTY.replace("/", "|")
    write_run(run_dir, 5, task=NASTY)
    tracker = JsonlTracker(run_dir / "metrics.jsonl")
    tracker.write("event", {"name": NASTY, "reason": "</table><img src='http://example.org'>"})
    tracker.close()
    page = Page(write_report(run_dir)[1])
    assert "script" not in page.tags
    assert page.tags.count("img") == len(charts_of(read_run(run_dir)))
    assert all(address.startswith("data:") for address in page.addresses)
    assert NASTY in page.text
    assert "default-src 'none'" in (run_dir / "report.html").read_text()


def test_the_log_s_counts_are_in_the_page(tmp_path: Path) -> None:
    async def main() -> None:
        buffer = open_buffer(tmp_path)
        for name in ("a", "b", "c"):
            await run_group(buffer, name)
        await train(buffer, 0, 0)
        await buffer.close()

    write_run(tmp_path, 1)
    asyncio.run(main())
    text = write_report(tmp_path)[1].read_text()
    assert "<td>chain_sum</td><td>3</td><td>2</td><td>1</td><td>0</td><td>0</td><td>0</td>" in text


def test_a_run_without_a_step_gets_a_report_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    png, html = write_report(tmp_path)
    assert "has not finished a training step yet, so there is nothing to draw." in Page(html).text
    assert png.stat().st_size > 0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_of_few_steps_is_drawn(steps: int, tmp_path: Path) -> None:
    write_run(tmp_path, steps)
    _, html = write_report(tmp_path)
    assert f"{steps} step" in Page(html).text


def test_values_that_are_missing_or_all_zero_are_no_obstacle(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        tracker.log(step, {"reward": math.nan, "mismatch": 0.0, "clipped_share": 0.0, "staleness_max": 0})
    tracker.close()
    write_report(tmp_path)
    assert "reward" not in dict(figures(read_run(tmp_path)))


def test_more_tasks_than_colours_are_drawn(tmp_path: Path) -> None:
    tracker = JsonlTracker(tmp_path / "metrics.jsonl")
    for step in range(1, 4):
        tracker.log(step, {"reward": 0.5, **{f"solve_rate/task{i}": i / 12 for i in range(12)}})
    tracker.close()
    write_report(tmp_path)
    solved = next(chart for chart in charts_of(read_run(tmp_path)) if chart.title == "Solved, by task")
    assert len(solved.lines) == 12


def test_a_configuration_of_another_version_is_shown_as_it_is(tmp_path: Path) -> None:
    write_run(tmp_path, 2)
    (tmp_path / "resolved.toml").write_text("forgotten_setting = 1\n")
    assert read_run(tmp_path).config is None
    assert "forgotten_setting = 1" in Page(write_report(tmp_path)[1]).text


def test_what_is_no_run_directory_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="expected a run directory, with metrics"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RunDirError, match="expected a run directory"):
        write_report(tmp_path / "missing")


def test_a_report_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    (tmp_path / "report.png").mkdir()
    with pytest.raises(RunDirError, match="expected to write the report there"):
        write_report(tmp_path)


def test_a_moving_average_looks_back_only_and_ignores_gaps() -> None:
    assert moving_average([2.0, 4.0, 6.0], 2) == [2.0, 3.0, 5.0]
    assert moving_average([2.0, math.nan, 6.0], 2) == [2.0, 2.0, 6.0]
    assert math.isnan(moving_average([math.nan], 3)[0])
