"""Held-out questions, waits and costs on the page of `shoal view`, and every view of a live run and of a long one."""

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path

import aiohttp

from benchmarks.view_run import write_run
from browser import Page, chromium
from shoal.observe.metrics import read_run
from shoal.observe.status import influence, swarm_status
from shoal.observe.view.cost import Prices, cost
from shoal.observe.view.reading import MOST_EVALUATIONS, Questions, answers, questions, spaced
from shoal.observe.view.waits import bottleneck, other_waits, timeline
from shoal.types import Group, Message, Role, Task
from until import until
from view_pages import DRAWN, found, made, seen, viewing
from view_run import MadeRun, rollout

VIEWS = ("/", "/rollouts", "/group?seq=1", "/tokens?seq=1", "/heldout", "/waits", "/swarm", "/cost")
NAMELESS = """[...document.querySelectorAll('main :is(input, select):not([type=hidden])')]
    .filter(one => !one.labels.length && !one.ariaLabel).length"""


async def read(run_dir: Path, path: str) -> str:
    """A page as it comes over HTTP, once the log was read."""
    async with viewing(run_dir) as url, aiohttp.ClientSession() as http:

        async def shown() -> bool:
            async with http.get(url + path) as answer:
                page.append(await answer.text())
            return "was not read yet" not in page[-1]

        page = list[str]()
        await until(shown)
        return page[-1]


async def assert_readable(page: Page, url: str, width: int, views: tuple[str, ...]) -> None:
    """Opens views; none is refused or wider than the window, and each control has a name."""
    await found(page, url, "/rollouts", "!document.body.textContent.includes('still being read')")
    for view in views:
        await page.goto(url + view)
        assert await page.value("document.querySelector('h1').textContent") != "This cannot be shown", view
        assert await page.value("document.documentElement.scrollWidth") <= width, view
        assert await page.value(NAMELESS) == 0, view


async def test_every_view_of_a_live_run_opens_at_both_widths_and_follows_it(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "live")
    for _ in range(6):
        await run.step(["so \\(\\frac{a}{b}\\)\n\n```\n" + "long " * 60 + "\n```", "wrong"])
    async with seen(run.run_dir) as (page, url), chromium(width=1440, height=900, scale=1) as overview:
        for width in (1440, 390):
            await page.resize(width, 900)
            await assert_readable(page, url, width, (*VIEWS, "/question?id=held-out-0"))
        await overview.goto(url)
        await overview.until(DRAWN)
        await page.goto(f"{url}/waits")
        await page.until("document.querySelector('#timeline .main-svg') !== null")
        await run.step()
        await page.until("document.querySelector('#timeline .plot').data[0].x.length == 6")
        await overview.until("document.querySelector('.plot').data[0].x.length == 7")
        await overview.until("document.querySelector('dd').textContent.startsWith('7 of')")
    await run.close()


def test_every_view_of_a_finished_run_of_30000_rollouts_opens(tmp_path: Path) -> None:
    async def check() -> None:
        async with seen(tmp_path / "long") as (page, url):
            await assert_readable(page, url, 1440, VIEWS)
            assert "30,000 of 30,000" in await page.value("fetch('/rollouts').then(one => one.text())")

    assert write_run(tmp_path / "long", 30_000) == 30_000
    asyncio.run(check())


async def test_a_held_out_question_is_followed_across_time(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 11)
    async with seen(run_dir) as (page, url):
        await page.goto(f"{url}/heldout?sort=better")
        row = await page.value("document.querySelector('tbody tr').innerText")
        assert row.split() == ["held-out", "question", "1", "chain_sum", "+0.5", "0.05", "0.3", "0.55"]
        await page.goto(await page.value("document.querySelector('tbody a').href"))
        cards = await page.value("[...document.querySelectorAll('article')].map(one => one.innerText)")
        assert [f"after {step} steps" in card for step, card in zip((11, 6, 1), cards, strict=True)] == [True] * 3
        assert "truth 1" in await page.value("document.querySelector('main').innerText")


def test_questions_are_found_by_text_and_ordered_by_their_change(tmp_path: Path) -> None:
    run_dir = asyncio.run(made(tmp_path / "run", 6))
    steps, found, pages = questions(run_dir, Questions())
    assert (steps, pages) == ([1, 6], 1)
    assert [(one.text, round(one.change, 2)) for one in found] == [
        ("held-out question 0", 0.0),
        ("held-out question 1", 0.25),
    ]
    assert [one.id for one in questions(run_dir, Questions(text="QUESTION 1"))[1]] == ["held-out-1"]
    assert [one.step for one in answers(run_dir, "held-out-1")] == [6, 1]


async def test_two_runs_answer_the_same_held_out_questions_side_by_side(tmp_path: Path) -> None:
    early, late = await made(tmp_path / "early", 6), await made(tmp_path / "late", 11)
    _, (first, second), _ = questions(early, Questions(sort="behind"), late)
    assert [(one.id, one.other, round(one.lead, 2)) for one in (first, second)] == [
        ("held-out-1", 0.55, -0.25),
        ("held-out-0", 0.5, 0.0),
    ]
    async with viewing(early, late) as url, aiohttp.ClientSession() as http:

        async def page(path: str, status: int = 200) -> str:
            async with http.get(url + path) as answer:
                assert answer.status == status, path
                return await answer.text()

        shown = await page("/heldout?run=early&other=late&sort=behind")
        assert '<td>0.55</td><td class="bad">-0.25</td>' in shown
        (link,) = re.findall(r'href="(/question\?[^"]*other=late[^"]*id=held-out-1)"', shown)
        both = await page(link.replace("&amp;", "&"))
        heads = re.findall(r"<h2>(.*?)</h2>", both)
        assert heads == ["early: 2 answers, newest first", "late: 3 answers, newest first"]
        assert both.index("after 6 steps") < both.index("late: 3 answers") < both.index("after 11 steps")
        alone = await page("/question?run=early&id=held-out-1")
        assert re.findall(r"<h2>(.*?)</h2>", alone) == ["2 answers, newest first"]
        assert "run: expected one of early, late" in await page("/heldout?run=early&other=nothing", 404)


def test_of_many_evaluations_the_first_and_the_newest_are_read() -> None:
    files = [Path(str(step)) for step in range(1000)]
    chosen = spaced(files)
    assert (len(chosen), chosen[0], chosen[-1]) == (MOST_EVALUATIONS, files[0], files[-1])
    assert spaced(files[:3]) == files[:3]


def test_work_in_a_workspace_is_a_terminals_session_with_the_changes_of_the_tree(tmp_path: Path) -> None:
    async def check() -> str:
        run = MadeRun(tmp_path)
        one = rollout("made", "I look.\n```bash\nls *\n```", 1.0, 0)
        output = Message(Role.USER, "*a* <b>\n    indented")
        course = "command 1: 0.1 s\n--- a/f.py\n+++ b/f.py\n@@ -1 +1 @@\n-<old>\n+new\nverdict: 1 in 0.2 s"
        one = replace(one, messages=(*one.messages, output), reward=replace(one.reward, evidence=course))
        admitted = await run.buffer.admit("g", "chain_sum")
        await run.buffer.add(Group("g", Task("t", "chain_sum", one.messages[:1]), (one,), admitted))
        await run.close()
        return await read(tmp_path, "/group?seq=1")

    page = asyncio.run(check())
    assert '<div class="words" tabindex="0">*a* &lt;b&gt;\n    indented</div>' in page
    assert "<details open><summary>evidence</summary>" in page
    assert '<span class="removed">-&lt;old&gt;</span>\n<span class="added">+new</span>\n<span class="">verdict' in page


def test_the_timeline_lays_the_trainers_seconds_one_after_the_other(tmp_path: Path) -> None:
    run = read_run(asyncio.run(made(tmp_path / "run", 4)))
    bars = timeline(run)
    trainer = [(bar.does, round(bar.took_s, 3), bar.is_wait) for bar in bars if bar.lane == "trainer"][:3]
    assert trainer == [("waits for groups", 0.6, True), ("trains", 0.3, False), ("writes a Version", 0.05, False)]
    starts = [bar.start_s for bar in bars if bar.lane == "trainer"]
    assert starts == sorted(starts)
    assert {bar.lane for bar in bars} == {"trainer", "engine", "admission"}
    assert all(bar.took_s > 0 for bar in bars)


def test_the_sentence_says_how_long_the_trainer_waited_for_groups(tmp_path: Path) -> None:
    run = read_run(asyncio.run(made(tmp_path / "run", 4)))
    # The four steps took four seconds by the clock of the made run, and each waited for 0.6 s.
    assert "the trainer waits for groups 60% of the time" in bottleneck(run)
    assert other_waits(run) == []


def test_the_swarm_page_says_what_peers_brought(tmp_path: Path) -> None:
    run_dir = asyncio.run(made(tmp_path / "run", 2))
    assert (influence(read_run(run_dir)), swarm_status(run_dir)) == ("", None)
    with (run_dir / "metrics.jsonl").open("a") as file:
        for step in (3, 4):
            record = {"kind": "step", "time_s": 90 + step, "step": step, "reward": 0.25, "external": 2}
            file.write(json.dumps({**record, "reward_external": 0.5}) + "\n")
    sentence = influence(read_run(run_dir))
    assert sentence.startswith("Over the last 4 steps a step trained 2 groups of peers. Their answers earned 0.500")
    assert sentence.endswith("above the 0.163 that its answers earned.")
    (run_dir / "swarm").mkdir()
    peers = {"0123456789abcdef": {"trust": 0.875, "taken": 7, "newcomer": False, "gaps": 0}}
    written = {"time_s": 1.0, "admitted": 12, "refused": {"unverified": 3}, "peers": peers}
    (run_dir / "swarm" / "status.json").write_text(json.dumps(written))
    status = swarm_status(run_dir)
    assert status is not None
    assert "time_s" not in status
    assert status["refused"] == {"unverified": 3}
    page = " ".join(re.sub("<[^>]*>", " ", asyncio.run(read(run_dir, "/swarm"))).split())
    for shown in (
        sentence.replace("'", "&#39;"),
        "admitted 12",
        "refused unverified 3",
        "0123456789ab 0.875 7 False 0",
    ):
        assert shown in page


def test_a_cost_is_hours_tokens_and_a_price_per_point_of_held_out_reward(tmp_path: Path) -> None:
    run = read_run(asyncio.run(made(tmp_path / "run", 7)))
    rows = dict(cost("run", run, Prices(core_hour=2.0, gpu_hour=10.0)).rows)
    wall_h = max(float(step["time_s"]) for step in (*run.steps, *run.evals)) / 3600
    assert (rows["core-hours"], rows["GPU-hours"]) == (format(4 * wall_h, ".3g"), format(wall_h, ".3g"))
    assert rows["points of held-out reward"] == "+25.0"
    assert float(dict(cost("run", run, Prices(core_hour=1e-6)).rows)["price"]) > 0
    assert rows["price per point"] == format(18 * wall_h / 25, ".3g")


def test_a_run_that_does_not_say_its_machine_has_unknown_hours(tmp_path: Path) -> None:
    run_dir = asyncio.run(made(tmp_path / "run", 2))
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(line for line in lines if '"machine"' not in line))
    rows = dict(cost("run", read_run(run_dir), Prices(gpu_hour=1.0)).rows)
    assert (rows["core-hours"], rows["price"], rows["core-hours per point"]) == ("unknown", "unknown", "none gained")


NUMBERS = {
    "/rollouts": ("step", "version", "tokens_from", "tokens_to", "page"),
    "/group": ("seq", "position", "first"),
    "/tokens": ("seq", "position", "first"),
    "/heldout": ("page",),
}
"""Pages, and the fields of their addresses that are numbers."""


async def test_a_number_that_no_page_computes_with_is_refused_by_its_field(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    await run.step(["right", "wrong"])
    await run.close()
    async with viewing(run.run_dir) as url, aiohttp.ClientSession() as http:
        for page, fields in NUMBERS.items():
            needed = {"seq": 1} if "seq" in fields else {}
            for field in fields:
                for value in (2**53 + 1, -(2**63), 2**64, 10**30):
                    async with http.get(f"{url}{page}", params={**needed, field: value}) as answer:
                        text = await answer.text()
                        assert answer.status == 400, (page, field, value, text)
                    assert f"{field}: expected a number" in text or f"$.{field}" in text
                async with http.get(f"{url}{page}", params={**needed, field: 2**53}) as answer:
                    assert answer.status < 500, (page, field)
