"""Rollouts on the page of `shoal view`: found by what they are, read as text, never executed."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest
from pyarrow import parquet

from payloads import PAYLOADS
from shoal import wire
from shoal.experience.audit import audit
from shoal.experience.log import BODY_BYTES
from shoal.observe.view.index import Filter, RolloutIndex, Row
from shoal.observe.view.reading import MOST_CHARACTERS, glances, shortened, shown
from shoal.observe.view.server import SCALES
from shoal.observe.view.tokens import Token, shades
from shoal.types import Message, Role, Rollout
from until import until
from view_pages import found, made, seen, viewing
from view_run import GROUPS, SIZE, MadeRun


def indexed(run_dir: Path, folder: Path) -> RolloutIndex:
    """The table of a run that was read to the end."""
    index = RolloutIndex(run_dir, folder / "index.sqlite")
    asyncio.run(until(lambda: index.complete or bool(index.problem)))
    assert index.problem == ""
    return index


@pytest.fixture
def index(tmp_path: Path):
    opened = indexed(asyncio.run(made(tmp_path / "run", 5)), tmp_path)
    yield opened
    opened.close()


def test_the_filters_find_what_they_name(index: RolloutIndex) -> None:
    each = GROUPS * SIZE
    assert index.search(Filter()).total == 5 * each
    assert index.search(Filter(step=3)).total == each
    assert index.search(Filter(reward_from=0.5)).total == 5 * GROUPS
    assert index.search(Filter(reward_to=0.5, version=2)).total == each - GROUPS
    assert index.search(Filter(task="other")).total == 0
    assert index.search(Filter(status="unscored")).total == 0
    assert index.search(Filter(tokens_from=6)).total == 0
    assert index.search(Filter(tokens_from=5, tokens_to=5)).total == 5 * each
    assert {row.reward for row in index.search(Filter(sort="best")).rows[: 5 * GROUPS]} == {1.0}
    assert index.search(Filter(sort="worst", step=5)).rows[0].reward == 0.0
    text = index.search(Filter(text="thinking of g2-1/3"))
    assert [(row.step, row.position) for row in text.rows] == [(3, 3)]
    assert [(one.question, one.truth) for one in glances(text.rows)] == [("question g2-1/3", "truth of g2-1")]
    assert index.search(Filter(text="'; DROP TABLE rollouts; --%_")).rows == []


def test_pages_of_a_list_hold_each_rollout_once(index: RolloutIndex) -> None:
    pages = [index.search(Filter(page=page)) for page in (1, 2)]
    keys = [(row.seq, row.position) for page in pages for row in page.rows]
    assert len(set(keys)) == len(keys) == 5 * GROUPS * SIZE
    assert [page.more for page in pages] == [False, False] if len(keys) <= 50 else [True, False]


def test_what_was_moved_to_the_archive_is_found_like_the_rest(tmp_path: Path) -> None:
    async def archived() -> Path:
        run = MadeRun(tmp_path / "run")
        for _ in range(6):
            await run.step()
        await run.buffer.archive(3)
        await run.close()
        return run.run_dir

    run_dir = asyncio.run(archived())
    assert list((run_dir / "archive").iterdir())
    index = indexed(run_dir, tmp_path)
    try:
        assert index.search(Filter()).total == 6 * GROUPS * SIZE
        (row,) = index.search(Filter(text="thinking of g1-1/2")).rows
        assert (row.step, row.position) == (2, 2)
        group = index.group(row.seq)
        assert (group.step, len(group.bodies)) == (1, SIZE)
        assert b"truth of g1-1" in group.task
    finally:
        index.close()


async def two_shards(run_dir: Path) -> Path:
    """A run with steps 0-1 and 2-3 in the archive and 4-5 in the log; the file of 2-3."""
    run = MadeRun(run_dir)
    for through in (1, 3):
        for _ in range(3):
            await run.step()
        await run.buffer.archive(through)
    await run.close()
    return run_dir / "archive" / "steps-2-3.parquet"


def damage_bodies(file: Path) -> None:
    """Changes bytes in the rollouts' bodies of an archive file, whose list of parts stays right."""
    metadata, data = parquet.read_metadata(file), bytearray(file.read_bytes())
    column = metadata.row_group(metadata.num_row_groups - 1).column(metadata.num_columns - 1)
    assert column.path_in_schema == "body"
    end = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size
    data[end - 9 : end - 5] = b"junk"
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"junk"), damage_bodies, Path.unlink])
async def test_a_broken_file_of_the_archive_is_named_and_all_else_is_shown(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file = await two_shards(tmp_path / "run")
    damage(file)
    index = RolloutIndex(tmp_path / "run", tmp_path / "index.sqlite")
    try:
        await until(lambda: index.complete, 20)
        assert {row.step for row in index.search(Filter()).rows} == {1, 2, 5, 6}
        assert [row.step for row in index.search(Filter(text="thinking of g1-1/2")).rows] == [2]
    finally:
        index.close()
    async with viewing(tmp_path / "run") as url, aiohttp.ClientSession() as http:

        async def names_it() -> bool:
            async with http.get(f"{url}/rollouts") as answer:
                return file.name in await answer.text()

        await until(names_it, 20)


@pytest.mark.parametrize("damage", [lambda file: file.write_bytes(b"junk"), damage_bodies, Path.unlink])
async def test_a_file_of_the_archive_that_breaks_under_the_page_costs_its_own_texts(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    file = await two_shards(tmp_path / "run")
    index = RolloutIndex(tmp_path / "run", tmp_path / "index.sqlite")
    try:
        await until(lambda: index.complete, 20)
        damage(file)
        rows = index.search(Filter()).rows
        assert {row.step for row in rows if row.body} == {1, 2, 5, 6}
        assert {row.step for row in rows} == set(range(1, 7))
        assert any(str(file) in why for why in index.broken)
    finally:
        index.close()


async def test_a_run_that_goes_on_is_read_on_and_what_it_archives_is_still_found(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    await run.step()
    index = RolloutIndex(run.run_dir, tmp_path / "index.sqlite")
    try:
        await until(lambda: index.count() == GROUPS * SIZE)
        for _ in range(4):
            await run.step()
        await until(lambda: index.search(Filter(step=5)).total == GROUPS * SIZE)
        await run.buffer.archive(3)
        moved = index.search(Filter(text="thinking of g0-0/0")).rows  # before anybody read the file of the archive
        assert [row.step for row in moved] == [1]
        assert b"truth of g0-0" in index.group(moved[0].seq).task
        await run.step()
        await until(lambda: index.count() == 6 * GROUPS * SIZE)
    finally:
        index.close()
    await run.close()
    assert audit(run.run_dir).ok


async def test_a_log_that_cannot_be_read_for_a_while_is_read_whole_afterwards(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 3)

    def rename(before: str, after: str) -> None:
        with closing(sqlite3.connect(run_dir / "log.sqlite")) as log, log:
            log.execute(f"ALTER TABLE {before} RENAME TO {after}")

    rename("rollouts", "aside")
    index = RolloutIndex(run_dir, tmp_path / "index.sqlite")
    try:
        await until(lambda: "no such table" in index.problem)
        rename("aside", "rollouts")
        await until(lambda: index.complete)
        assert index.search(Filter()).total == 3 * GROUPS * SIZE
    finally:
        index.close()


async def test_the_keyboard_alone_leads_to_a_group_with_truth_parts_and_evidence_and_to_its_tokens(
    tmp_path: Path,
) -> None:
    run_dir = await made(tmp_path / "run", 2)
    async with seen(run_dir) as (page, url):
        await page.goto(url)
        await page.tab_to("at.textContent == 'Worst answers of step 2'")
        await page.press("Enter")
        # They appear by themselves when the log has been read.
        answers = "document.querySelector('td a') !== null"
        await page.until(f"location.pathname == '/rollouts' && document.readyState == 'complete' && {answers}")
        await page.tab_to("at.matches('td a')")
        await page.press("Enter")
        await page.until("location.pathname == '/group' && document.readyState == 'complete'")
        text = await page.value("document.body.textContent")
        for part in ("truth of g1-", "judged g1-", "reward 1.000", "thinking of g1-", "right", "add"):
            assert part in text
        assert await page.value("document.querySelectorAll('article').length") == SIZE
        assert not await page.value("document.querySelector('article details').open")  # thoughts are folded
        await page.tab_to("at.matches('article summary')")
        await page.press("Enter")
        await page.until("document.activeElement.parentNode.open")
        await page.tab_to("at.matches('article a')")
        await page.press("Enter")
        await page.until("location.pathname == '/tokens' && document.readyState == 'complete'")
        await page.tab_to("at.matches('.tokens')")
        for _ in range(4):  # the prompt has three tokens
            await page.press("ArrowRight")
        assert "logprob" in await page.until("document.getElementById('token').textContent")


async def test_arrow_keys_on_the_slider_go_from_step_to_step(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 4)
    async with seen(run_dir) as (page, url):
        await found(page, url, "/rollouts?step=2", "document.querySelector('td a') !== null")
        await page.tab_to("at.id == 'steps'")
        for step in (3, 4):
            await page.press("ArrowRight")
            there = f"new URL(location).searchParams.get('step') == '{step}' && document.readyState == 'complete'"
            await page.until(f"{there} && document.activeElement.id == 'steps'")
        assert "shoal why run --step 4" in await page.value("document.body.textContent")
        cells = await page.value("[...document.querySelectorAll('td:nth-child(6)')].map(one => one.textContent)")
        assert cells
        assert set(cells) == {"4"}


@pytest.mark.parametrize("path", ["/group?seq=1#answer-3", "/question?id=held-out-0"])
@pytest.mark.parametrize("width", [1440, 390])
async def test_the_question_stays_in_sight_beside_each_answer(tmp_path: Path, width: int, path: str) -> None:
    run = MadeRun(tmp_path / "run")
    for _ in range(6):
        await run.step(["long\n\n" * 60])
    async with seen(run.run_dir, width=width) as (page, url):
        await found(page, url, path, "document.querySelector('article') !== null")
        last = "[...document.querySelectorAll('article')].at(-1)"
        if "question" in path:
            await page.value(f"{last}.scrollIntoView()")
        asked = "document.querySelector('.asked').getBoundingClientRect()"
        places = f"[{asked}.top >= 0, scrollY > 0, {asked}.bottom <= {last}.getBoundingClientRect().top]"
        assert await page.until(f"{places}.every(one => one) && {places}") == [True] * 3
    await run.close()


async def test_a_token_shows_its_numbers_when_it_is_pointed_at(tmp_path: Path, tiny_model_dir: Path) -> None:
    run_dir = await made(tmp_path / "run", 2, model=tiny_model_dir)
    async with seen(run_dir) as (page, url):
        for by in ("logprob", "version", "ratio", "advantage", "entropy", "gradient", "fate"):
            place = f"/tokens?seq=1&position=0&by={by}"
            await found(page, url, place, "document.querySelector('.tokens') !== null")
            fifth = "document.querySelectorAll('.tokens span')[4]"
            await page.value(f"{fifth}.dispatchEvent(new Event('click', {{bubbles: true}}))")
            numbers = await page.until("document.getElementById('token').textContent")
            assert "4: trained, logprob -0.1000 (probability 0.9048), version 0, advantage 1.5000" in numbers
            # The trainer's numbers, and the sum that became the gradient: 0.01 x 1.5 x e^0.05.
            assert "ratio 1.0513, entropy 0.500; gradient +0.0158 (more likely)" in numbers
            assert "weight 0.01 x advantage 1.5 x 1.051 (what the loss makes of ratio 1.051)" in numbers
            await page.command("Input.dispatchKeyEvent", type="rawKeyDown", key="ArrowRight", code="ArrowRight")
            clipped = await page.value("document.querySelectorAll('.tokens span')[5].dataset.says")
            assert "5: clipped" in clipped
            assert "gradient +0 (left alone)" in clipped
            shades_used = "new Set([...document.querySelectorAll('.tokens span')].map(one => one.className)).size"
            assert await page.value(shades_used) > 1
        top = await page.value("document.querySelector('main > .bar').innerText")
        assert [part in top for part in ("reward 1.000", "step 1", "truth of g0-")] == [True] * 3
        before = await page.value("[...document.querySelectorAll('.tokens span')].map(one => one.className)")
        await page.value("by.value = 'logprob', by.dispatchEvent(new Event('change'))")
        after = await page.value("[...document.querySelectorAll('.tokens span')].map(one => one.className)")
        assert after != before  # no button, no new page
        assert await page.value("location.search.includes('by=logprob') && scale.textContent") == SCALES["logprob"]
        assert await page.value("document.querySelector('[rel=prev]')") is None
        await page.goto(await page.value("document.querySelector('[rel=next]').href"))
        assert await page.value("document.querySelector('h1').innerText") == f"Tokens of answer 2 of {SIZE}"
        assert await page.value("[by.value, document.querySelector('[rel=prev]') != null]") == ["logprob", True]
        # Without the trainer's numbers the log's are left, and advantages where a group's own rewards give them:
        # of four rewards 1, 0, 0, 0 the first lies 0.75 above the mean, and their standard deviation is 0.5.
        shutil.rmtree(run_dir / "tokens")
        await page.goto(f"{url}/tokens?seq=1&position=0")
        said = await page.value("document.querySelectorAll('.tokens span')[4].dataset.says")
        assert said == "4: trained, logprob -0.1000 (probability 0.9048), version 0, advantage 1.5000"
        assert "made room for newer ones" in await page.value("document.body.innerText")


async def test_nothing_that_a_model_says_is_executed(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run", task=PAYLOADS[0])
    for at in range(0, len(PAYLOADS), SIZE):
        await run.step(PAYLOADS[at : at + SIZE])
    await run.close()
    async with seen(run.run_dir) as (page, url):
        await found(
            page, url, f"/rollouts?task={quote(PAYLOADS[0])}&sort=best", "document.querySelector('td a') !== null"
        )
        paths = ["/", "/rollouts", f"/rollouts?text={quote(PAYLOADS[2])}", f"/rollouts?run={quote(PAYLOADS[0])}"]
        paths += [f"/group?seq={seq}" for seq in range(1, GROUPS * run.steps + 1)]
        paths += [f"/group?seq={seq}&raw=true" for seq in range(1, GROUPS * run.steps + 1)]
        paths += ["/heldout", "/question?id=held-out-0", "/question?id=held-out-0&raw=true", "/cost", "/waits"]
        paths += [f"/heldout?text={quote(PAYLOADS[3])}", f"/question?id={quote(PAYLOADS[4])}"]
        paths += [f"/tokens?seq=1&position={position}" for position in range(SIZE)]
        for path in paths:
            await page.goto(url + path)
            await page.value("document.querySelectorAll('details').forEach(one => one.open = true)")
            assert await page.value("document.title") != "owned", path
            foreign = (
                "document.querySelectorAll('main :is(script, img, iframe, svg, style, object, base, meta)').length"
            )
            if path not in ("/", "/waits"):  # where the charts are
                assert await page.value(foreign) == 0, path
            links = await page.value("[...document.querySelectorAll('[href], [src]')].map(one => one.href || one.src)")
            assert all(link.startswith((url, "data:,")) for link in links), links
        await page.goto(f"{url}/group?seq=1")
        await page.goto(f"{url}/group?seq=1&raw=true")
        shown = await page.value("document.querySelector('main').textContent")
        assert all(payload in shown for payload in PAYLOADS[:SIZE])
        wide = await page.value("document.documentElement.scrollWidth - innerWidth")
        assert wide <= 0


async def test_an_answer_that_cannot_be_read_is_shown_as_such_beside_the_others(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 1)
    with closing(sqlite3.connect(run_dir / "log.sqlite")) as log, log:
        log.execute("UPDATE rollouts SET body = x'01ff' WHERE finished_seq = 1 AND position = 0")
    index = RolloutIndex(run_dir, tmp_path / "index.sqlite")
    try:
        await until(lambda: index.complete)
        (row,) = index.search(Filter(status="unreadable")).rows
        answers = [shown(position, body, ()) for position, body in enumerate(index.group(1).bodies)]
    finally:
        index.close()
    (line,) = glances([row])
    assert (row.seq, row.position, line.question, line.answer) == (1, 0, "", answers[0].broken)
    assert [answer.rollout is None for answer in answers] == [True, *[False] * (SIZE - 1)]
    async with viewing(run_dir) as url, aiohttp.ClientSession() as http, asyncio.timeout(120):
        text = ""
        while "<article" not in text:  # the log is read in the background
            async with http.get(f"{url}/group?seq=1") as page:
                text = await page.text()
    assert text.count("<article") == SIZE
    assert text.count("unreadable") == 2
    assert "expected a RawRollout" in text


async def test_a_list_whose_step_was_not_read_yet_asks_again_by_itself_and_one_that_has_nothing_does_not(
    tmp_path: Path,
) -> None:
    run_dir = await made(tmp_path / "run", 2)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "step", "time_s": 9, "step": 3}\n')  # it ended, and the log's reader is behind
    async with viewing(run_dir) as url, aiohttp.ClientSession() as http:

        async def asks(path: str) -> bool:
            async with http.get(url + path) as page:
                return 'http-equiv="refresh"' in await page.text()

        async with asyncio.timeout(120):
            while await asks("/rollouts?reward_from=5"):  # the log is read in the background
                pass
        assert [await asks(f"/rollouts?step={step}") for step in (2, 3, 4)] == [False, True, False]


def test_a_list_shows_equal_answers_once_and_of_questions_what_differs(index: RolloutIndex) -> None:
    (right,) = index.search(Filter(text="question g0-0/0")).rows
    long = "An instruction that every question of the task begins with. "

    def asking(question: str) -> Row:
        one = wire.decode(right.body, Rollout, BODY_BYTES)
        messages = (Message(Role.USER, question), *one.messages[1:])
        return replace(right, body=wire.encode(replace(one, messages=messages)))

    rows = [asking(long + "What is 1 + 1?"), asking(long + "What is 2 + 2?"), asking(long + "What is 1 + 1?")]
    lines = [(one.question, one.answer, one.truth, one.count) for one in glances(rows)]
    assert lines == [("...1 + 1?", "right", "truth of g0-0", 2), ("...2 + 2?", "right", "truth of g0-0", 1)]
    others = [replace(rows[0], reward=0.5), replace(rows[0], step=9), replace(rows[0], task="other")]
    assert [one.count for one in glances([rows[0], *others])] == [1] * 4  # what differs in a column is no repeat


async def test_worst_answers_have_their_truth_and_their_count_beside_them(tmp_path: Path) -> None:
    run = MadeRun(tmp_path / "run")
    await run.step()
    async with seen(run.run_dir) as (page, url):
        await found(page, url, "/rollouts?step=1&sort=worst", "document.querySelector('td a') !== null")
        heads = await page.value("[...document.querySelectorAll('thead th')].map(one => one.innerText)")
        assert heads[:4] == ["Reward", "Question", "Answer", "Truth"]
        truths = await page.value("[...document.querySelectorAll('td.truth')].map(one => one.innerText)")
        assert set(truths) == {f"truth of g0-{at}" for at in range(GROUPS)}
    await run.close()


def test_a_huge_text_keeps_its_beginning_and_its_end() -> None:
    text = shortened("a" + "x" * 10**6 + "b")
    assert len(text) < MOST_CHARACTERS + 200
    assert (text[0], text[-1]) == ("a", "b")


async def test_an_address_with_a_wrong_value_is_answered_with_its_name(tmp_path: Path) -> None:
    run_dir = await made(tmp_path / "run", 1)
    async with seen(run_dir) as (page, url):
        for path, named in (
            ("/rollouts?step=three", "step"),
            ("/rollouts?colour=1", "colour"),
            ("/group?seq=99", "99"),
        ):
            await page.goto(url + path)
            assert named in await page.value("document.body.innerText"), path


def test_shades_of_advantages_are_symmetric_about_zero() -> None:
    tokens = [Token(i, "x", "trained", -1.0, 0, value) for i, value in enumerate((-0.5, 0.0, 1.0))]
    assert shades([*tokens, Token(3, "p", "given", None, None, None)], "advantage") == ["2", "4", "8", "n"]


def test_payloads_are_forty() -> None:
    assert len({json.dumps(payload) for payload in PAYLOADS}) == 40
