"""`shoal view` in a real browser, on runs that have ended and on one that is still written."""

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from shoal.errors import RunDirError
from shoal.files import cache_directory
from shoal.model.quantised import name_of
from shoal.observe.charts import CHARTS, MOST_POINTS, drawn, thinned
from shoal.observe.export_extras import extras_of
from shoal.observe.metrics import differences, watched
from shoal.observe.view.prose import visible
from shoal.observe.view.waits import bottleneck
from view_pages import DRAWN, lines_of, made, seen, viewing
from view_run import MadeRun


async def test_the_overview_smooths_over_faint_steps_and_says_model_and_state_in_words(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", "owner/model")
    for _ in range(18):
        await run.step()
    async with seen(run.run_dir) as (page, url):
        await page.goto(url)
        await page.until(DRAWN)
        mean, steps = await page.value(
            """[...document.querySelector('.plot').data].map(one => [one.y.at(-1), one.showlegend, one.opacity])"""
        )
        assert mean == [pytest.approx(0.875), None, None]  # 18 steps / 12 windows: two in each
        assert steps == [pytest.approx(0.9), False, 0.3]
        assert await page.value(lines_of("Busy")) == ["engine", "engine", "trainer", "trainer"]
        titles = await page.value("[...document.querySelectorAll('.chart')].map(one => one.dataset.title)")
        assert not {"Solved, by task", "Held-out full marks"} & set(titles)  # rewards are only 0 or 1
        assert "full marks" not in await page.value("document.querySelector('.facts').innerText")
        lead = "document.querySelector('.lead').innerText"
        assert (await page.value(lead)).startswith("owner/model on chain_sum, running for ")
        await run.close()
        await page.goto(url)
        assert "stopped after" in await page.value(lead)
        (run.run_dir / "model").mkdir()
        await page.goto(url)
        assert "ended after" in await page.value(lead)


def test_a_chart_is_left_out_only_beside_the_chart_that_it_repeats(tmp_path: Path) -> None:
    run = next(iter(watched([asyncio.run(made(tmp_path / "run", 3))]).values())).records()
    titles = {one.title for one in drawn(CHARTS["overview"], {"run": run})}
    assert "Solved, by task" not in titles
    assert {"Mismatch of engine and trainer, nats", "Answers cut at max_tokens"} <= titles  # equal by chance: both 0
    other = replace(run, steps=tuple({**step, "reward": 0.5} for step in run.steps))
    assert "Solved, by task" in {one.title for one in drawn(CHARTS["overview"], {"run": other})}


def test_tokens_of_a_model_in_one_file_have_text(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    weights = tmp_path / "model.gguf"
    weights.write_bytes(b"GGUF")
    run_dir = asyncio.run(made(tmp_path / "run", 1, model=weights))
    assert extras_of(run_dir).text is None
    read = cache_directory() / name_of(weights)
    read.mkdir(parents=True)
    shutil.copy(tiny_model_dir / "tokenizer.json", read)
    assert extras_of(run_dir).text is not None


async def test_the_page_says_why_rollouts_failed_with_file_and_line(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    await run.step()
    await run.fail("scorer: failed: mine:boom: ZeroDivisionError: division by zero (mine.py:2 in boom)")
    await run.close()
    async with viewing(run.run_dir) as url, aiohttp.ClientSession() as http, asyncio.timeout(120):
        for path in ("/", "/rollouts?status=failed", "/group?seq=3"):
            text = ""
            while "division by zero (mine.py:2 in boom)" not in text:  # the log is read in the background
                async with http.get(url + path) as answer:
                    text = await answer.text()


async def test_a_run_that_is_viewed_is_not_written(tmp_path: Path) -> None:
    def files(folder: Path) -> dict[str, tuple[int, int]]:
        return {one.name: (one.stat().st_size, one.stat().st_mtime_ns) for one in folder.iterdir()}

    run_dir = await made(tmp_path / "run", 3)
    before = files(run_dir)
    async with viewing(run_dir) as url, aiohttp.ClientSession() as http:
        for path in ("/", "/waits", "/swarm", "/charts/overview", "/rollouts", "/rollouts?text=right", "/heldout"):
            async with http.get(url + path) as answer:
                assert answer.status == 200, path
    assert files(run_dir) == before


async def test_beyond_loopback_only_those_come_in_who_know_the_token(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 1)
    jar = aiohttp.CookieJar(unsafe=True)  # it keeps cookies of addresses too
    async with viewing(run_dir, token="secret") as url, aiohttp.ClientSession(cookie_jar=jar) as http:
        for path, status in (("/", 401), ("/charts/overview", 401), ("/?token=wrong", 401)):
            async with http.get(url + path) as answer:
                assert answer.status == status
        async with http.get(f"{url}/?token=secret") as answer:
            assert (answer.status, str(answer.url)) == (200, f"{url}/")
        async with http.get(f"{url}/waits") as answer:
            assert answer.status == 200


def test_the_bottleneck_names_the_slower_side_and_its_setting(tmp_path: Path) -> None:
    run_dir = asyncio.run(made(tmp_path / "run", 3))
    sentence = bottleneck(next(iter(watched([run_dir]).values())).records())
    assert sentence.startswith("Generation is the slower side (over the last 3 steps: engine busy 90%")
    assert "engine.max_running, now 128" in sentence


def test_settings_that_are_equal_do_not_differ(tmp_path: Path) -> None:
    runs = watched([asyncio.run(made(tmp_path / name, 1, train={"lr": lr})) for name, lr in (("a", 0.1), ("b", 0.2))])
    assert differences({name: run.records() for name, run in runs.items()}) == [("train.lr", ["0.1", "0.2"])]


def test_a_folder_that_is_no_run_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match=str(tmp_path)):
        watched([tmp_path])


def test_runs_of_the_same_name_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    runs = [asyncio.run(made(tmp_path / parent / "run", 0)) for parent in "ab" if (tmp_path / parent).mkdir() is None]
    assert list(watched(runs)) == ["a/run", "b/run"]


def test_a_long_line_keeps_its_last_step_and_its_mean() -> None:
    x, y = thinned(range(2501), [1.0] * 2501)
    assert len(x) <= MOST_POINTS
    assert x[-1] == 2500
    assert set(y) == {1.0}


def test_characters_that_turn_or_hide_text_are_shown() -> None:
    assert visible("\x1b[2J \u202eabc\u200b\r\n\x00") == "\\x1b[2J \\u202eabc\\u200b\n\\x00"
