"""A new Version goes to a growing share of the users, and returns by itself when it is worse."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import openai
import pytest

from chat_templates import renderer
from gateway_engine import ScriptedEngine, served
from promotions import simulated, table
from shoal.errors import RunDirError, ShoalError
from shoal.gateway.promotion import BLOCKS, Promotion, Stage, Trial

ASK: list[Any] = [{"role": "user", "content": "what is 3 + 4?"}]
OLD, NEW = "the old one", "the new one"


@pytest.fixture
def promotion(tmp_path: Path) -> Iterator[Promotion]:
    with closing(Promotion(tmp_path / "outcomes.sqlite", "old -> new", Random(0))) as made:
        yield made


def named(session: int) -> str:
    """Name of a session; their order is not that of their numbers."""
    return f"{session * 0x9E3779B97F4A7C15 % 2**64:016x}"


def users(promotion: Promotion, sessions: range, *, old: float, new: float) -> list[bool]:
    """Sessions whose outcomes are those of their Version; returns which ones the new Version answered."""
    found = []
    for session in sessions:
        name = named(session)
        found.append(promotion.is_new(name))
        if promotion.stage is Stage.TRIAL:
            promotion.report(f"chatcmpl-{name}-0", new if found[-1] else old)
    return found


def test_a_bad_version_is_back_within_200_sessions_and_equal_ones_are_seldom_told_apart() -> None:
    bad = table(range(100), 0.8, 0.4, 1.0, 200)
    assert bad["returned_within_200"] >= 95  # type: ignore[operator]
    assert bad["promoted"] == 0
    equal = table(range(40), 0.6, 0.6, 1.0, 200)
    assert max(equal["promoted"], equal["returned"]) <= 4  # type: ignore[call-overload]


@pytest.mark.parametrize(("late", "good"), [(2000, (0.5, 0.5)), (200, (0.95, 0.05))])
def test_equal_versions_stay_equal_when_failures_come_late_or_an_outage_begins(
    late: int, good: tuple[float, float]
) -> None:
    ends = Counter[Stage]()
    for seed in range(10):
        with closing(Promotion(Path(":memory:"), "old -> new", Random(seed))) as promotion:
            rng, due = Random(-seed - 1), defaultdict[int, list[tuple[str, float]]](list)
            for now in range(2600):
                name, outcome = f"{now:016x}", float(rng.random() < good[now >= 1500])
                promotion.is_new(name)
                due[now + (200 if outcome else late)].append((name, outcome))
                for one in due.pop(now, ()):
                    if promotion.stage is Stage.TRIAL:
                        promotion.report(*one)
            ends[promotion.stage] += 1
    assert ends[Stage.TRIAL] >= 7  # each claim is wrong with 5 %


def test_a_better_version_is_promoted_and_half_of_the_outcomes_suffice() -> None:
    assert simulated(0.4, 0.8, 1.0, seed=0)["stage"] == Stage.PROMOTED
    assert simulated(0.4, 0.8, 0.5, seed=1)["stage"] == Stage.PROMOTED


def test_the_share_grows_in_blocks_until_all_or_none(promotion: Promotion) -> None:
    shares = {promotion.share}
    assert 0 < sum(users(promotion, range(16), old=0.5, new=0.5)) < 8
    for begin in range(16, 200, 8):
        users(promotion, range(begin, begin + 8), old=0.5, new=0.5)
        shares.add(promotion.share)
    assert shares == {1 / block for _, block in BLOCKS}
    users(promotion, range(200, 400), old=0.0, new=1.0)
    assert promotion.stage is Stage.PROMOTED
    assert promotion.share == 1
    assert all(users(promotion, range(500, 520), old=0.0, new=1.0))
    assert "promoted: the new Version is better by at least" in promotion.sentence


def test_a_session_keeps_its_version_while_the_trial_lasts(promotion: Promotion) -> None:
    names = [named(session) for session in range(40)]
    assert [promotion.is_new(name) for name in names] == [promotion.is_new(name) for name in names]


def test_the_next_process_has_the_sessions_the_outcomes_and_the_end(tmp_path: Path) -> None:
    file, sessions = tmp_path / "outcomes.sqlite", range(30)
    with closing(Promotion(file, "old -> new", Random(0))) as first:
        drawn, values = users(first, sessions, old=0.6, new=0.5), first.values
    ends = list[str]()
    with closing(Promotion(file, "old -> new", Random(9), ends.append)) as second:
        assert second.values == values
        assert [second.is_new(named(session)) for session in sessions] == drawn
        users(second, range(30, 400), old=1.0, new=0.0)
        assert second.stage is Stage.RETURNED
        assert ends == [second.sentence]
    with closing(Promotion(file, "old -> new", Random(3), ends.append)) as third:
        assert (third.stage, third.sentence) == (Stage.RETURNED, ends[0])
        assert not third.is_new("f" * 16)
    with closing(Promotion(file, "old -> newer", Random(0))) as another:
        assert (another.stage, another.values["old"]) == (Stage.TRIAL, {"outcomes": 0, "mean": None})
    assert len(ends) == 1


@pytest.mark.parametrize(
    ("id_", "outcome", "status", "why"),
    [
        ("chatcmpl-{}-0", 1.5, 400, "outcome: expected a number from 0 to 1, got 1.5"),
        ("{}", float("nan"), 400, "outcome: expected a number from 0 to 1, got nan"),
        ("{}", -0.1, 400, "got -0.1"),
        ("chatcmpl-0123456789abcdef-0", 1.0, 404, "id: expected the id of an answer or session of this trial, got"),
        ("x' OR 1=1 --", 1.0, 404, "got \"x' OR"),
    ],
)
def test_what_is_no_outcome_is_refused(promotion: Promotion, id_: str, outcome: float, status: int, why: str) -> None:
    promotion.is_new("a" * 16)
    with pytest.raises(ShoalError) as refused:
        promotion.report(id_.format("a" * 16), outcome)
    assert refused.value.http_status == status
    assert why in str(refused.value)
    assert promotion.values["old"] == promotion.values["new"] == {"outcomes": 0, "mean": None}


@pytest.mark.parametrize("id_", ["{}", "chatcmpl-{}-0", "cmpl-{}-3", "resp_{}-0", "msg_{}-12"])
def test_an_outcome_comes_once_under_any_id_of_its_session(promotion: Promotion, id_: str) -> None:
    promotion.is_new("b" * 16)
    promotion.report(id_.format("b" * 16), 1)
    with pytest.raises(ShoalError, match="expected one outcome per session") as refused:
        promotion.report("b" * 16, 0)
    assert refused.value.http_status == 409


def test_outcomes_after_the_end_are_refused_with_its_sentence(promotion: Promotion) -> None:
    promotion.is_new("c" * 16)
    promotion.lose("its engine ended")
    with pytest.raises(ShoalError, match="returned to the old Version: its engine ended") as refused:
        promotion.report("c" * 16, 1)
    assert refused.value.http_status == 410
    assert not any(promotion.is_new(named(session)) for session in range(50))


def test_an_acknowledged_outcome_survives_the_loss_of_power(promotion: Promotion) -> None:
    assert promotion._db.execute("PRAGMA synchronous").fetchone() == (2,)  # FULL


def test_a_file_that_cannot_be_written_ends_the_trial_and_users_are_answered(promotion: Promotion) -> None:
    promotion._db.execute("PRAGMA query_only = ON")
    assert not promotion.is_new("d" * 16)
    assert "the file of outcomes cannot be written" in promotion.sentence


def test_a_file_of_another_kind_or_process_is_refused(tmp_path: Path, promotion: Promotion) -> None:
    promotion.is_new("e" * 16)
    with pytest.raises(RunDirError, match="that no other process has open"):
        Promotion(tmp_path / "outcomes.sqlite", "old -> new", Random(0))
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(RunDirError, match="expected a file of outcomes"):
        Promotion(tmp_path / "text", "old -> new", Random(0))


def test_the_gateway_asks_one_version_per_session_and_takes_outcomes_of_its_clients(promotion: Promotion) -> None:
    made = renderer("qwen3")
    new = ScriptedEngine(made, [NEW] * 299)

    async def main() -> None:
        options: dict[str, Any] = {"trial": Trial(promotion, new, new), "admin_key": "secret", "is_open": True}
        async with (
            served(*[OLD] * 299, made=made, **options) as one,
            openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="secret", max_retries=0) as client,
            openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key="-", max_retries=0) as stranger,
        ):
            said = list[bool]()
            for at in range(16):
                answer = await client.chat.completions.create(model="m", messages=ASK, n=1 + at % 2, stop="#")
                texts = {choice.message.content for choice in answer.choices}
                assert len(texts) == 1
                said.append(texts == {NEW})
                state: Any = await client.post("/outcomes", body={"id": answer.id, "outcome": 0.5}, cast_to=object)
                assert state["stage"] == "trial"
            assert 0 < sum(said) < 8
            await in_sessions(client)
            with pytest.raises(openai.ConflictError, match="one outcome per session"):
                await client.post("/outcomes", body={"id": answer.id, "outcome": 1}, cast_to=object)
            for body in (
                {"id": answer.id},
                {"id": answer.id, "outcome": True},
                {"id": answer.id, "outcome": 1, "x": 0},
            ):
                with pytest.raises(openai.BadRequestError, match="body: "):
                    await client.post("/outcomes", body=body, cast_to=object)
            with pytest.raises(openai.AuthenticationError):
                await stranger.post("/outcomes", body={"id": answer.id, "outcome": 1}, cast_to=object)
            with pytest.raises(openai.AuthenticationError):
                await stranger.get("/promotion", cast_to=object)
            shown: Any = await client.get("/promotion", cast_to=object)
            assert shown["old"]["outcomes"] + shown["new"]["outcomes"] == 17
            await until_promoted(client)

    async def until_promoted(client: openai.AsyncOpenAI) -> None:
        while promotion.stage is Stage.TRIAL:
            answer = await client.chat.completions.create(model="m", messages=ASK)
            outcome = float(answer.choices[0].message.content == NEW)
            await client.post("/outcomes", body={"id": answer.id, "outcome": outcome}, cast_to=object)
        assert promotion.stage is Stage.PROMOTED
        for _ in range(5):
            assert (await client.chat.completions.create(model="m", messages=ASK)).choices[0].message.content == NEW
        with pytest.raises(openai.APIStatusError, match="after the trial, promoted: ") as gone:
            await client.post("/outcomes", body={"id": answer.id, "outcome": 1}, cast_to=object)
        assert gone.value.status_code == 410

    async def in_sessions(client: openai.AsyncOpenAI) -> None:
        """A trained session's turns are all of one Version, and its id names it."""
        opened: Any = await client.post("/sessions", body={}, cast_to=object)
        own = client.with_options(base_url=opened["openai_base_url"])
        turns = [await own.chat.completions.create(model="m", messages=ASK) for _ in range(4)]
        assert len({turn.choices[0].message.content for turn in turns}) == 1
        assert all(opened["session_id"] in turn.id for turn in turns)
        await client.post("/outcomes", body={"id": opened["session_id"], "outcome": 1}, cast_to=object)

    asyncio.run(main())
