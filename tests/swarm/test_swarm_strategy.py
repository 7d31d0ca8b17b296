"""What is shared and what is taken."""

import random
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError
from shoal.swarm.strategy.choice import (
    HALF_LIFE_S,
    NEWCOMER_SHARE,
    TAKERS,
    Candidate,
    Own,
    apply_taker,
    by_trust,
    differ,
    sharer_of,
    taker_of,
    uniform,
)
from shoal.swarm.strategy.sharing import Outbox
from shoal.swarm.trust.claim_verification import OwnTasks
from shoal.types import Group, Message, Reward, Role, Rollout, Task

MIXED, EQUAL = (0.0, 1.0, 0.0, 1.0), (1.0, 1.0, 1.0, 1.0)


def candidate(**changes: object) -> Candidate:
    fields: dict[str, object] = {
        **{"peer_id": "a", "service": "gcd", "rewards": MIXED, "age_s": 0.0, "uses": 0, "author_uses": 0},
        **{"trust": 0.9, "newcomer": False, **changes},
    }
    return Candidate(**fields)


def own(rewards: tuple[float, ...], service: str = "gcd", size_bytes: int = 100) -> Own:
    return Own(service, rewards, size_bytes)


def test_sharers_share_what_their_names_say() -> None:
    assert sharer_of("all")(own(EQUAL), 0.0)
    assert not sharer_of("informative")(own(EQUAL), 0.0)
    assert sharer_of("informative")(own(MIXED), 0.0)


def test_a_budget_is_kept_on_average() -> None:
    share = sharer_of("budget:50")
    shared = sum(share(own(MIXED), float(second)) for second in range(1000))
    assert shared * 100 <= 50 * (1000 + 60)
    assert shared * 100 >= 50 * 950


async def test_the_size_of_an_own_group_is_that_of_its_offer() -> None:
    """Bytes, not characters, and all messages of a conversation, not its last one."""
    seen = list[Own]()

    def share(own: Own, now_s: float) -> bool:
        seen.append(own)
        return True

    asked = (Message(Role.SYSTEM, "Only the number."), Message(Role.USER, "3 + 4?"))
    said = (Message(Role.ASSISTANT, "ż" * 500), Message(Role.USER, "Sure?"), Message(Role.ASSISTANT, "no"))
    rollouts = (Rollout("r", (*asked, *said[:1]), (), Reward(1.0)), Rollout("s", (*asked, *said), (), Reward(0.0)))
    group = Group("g", Task("t", "sums", asked, "7"), rollouts, 0)
    Outbox(OwnTasks([]), share, "m").put(group, 0.0)
    assert 2 * 2 * 500 < seen[0].size_bytes < 2 * 2 * 500 + 500


groups = st.lists(
    st.builds(
        candidate,
        peer_id=st.sampled_from("abc"),
        service=st.sampled_from(["gcd", "lcm"]),
        rewards=st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0]), min_size=1, max_size=8).map(tuple),
        age_s=st.floats(0, 1e6),
        uses=st.integers(0, 3),
        author_uses=st.integers(0, 100),
        trust=st.floats(0, 1),
        newcomer=st.booleans(),
    ),
    max_size=12,
)


@given(st.sampled_from(TAKERS), groups, st.integers(0, 6), st.integers(0, 5))
def test_every_taker_takes_different_informative_groups_and_no_more_than_asked(
    name: str, candidates: list[Candidate], n: int, seed: int
) -> None:
    for chosen in (
        list(taker_of(name)(candidates, n, random.Random(seed))),
        apply_taker(taker_of(name), candidates, n, random.Random(seed)),
    ):
        assert len(set(chosen)) == len(chosen) <= n
        assert all(differ(candidates[i].rewards) for i in chosen)
    assert taker_of(name)(candidates, n, random.Random(seed)) == taker_of(name)(candidates, n, random.Random(seed))


def test_uniform_is_uniform_over_what_has_an_advantage_and_new_authors_are_like_others() -> None:
    candidates = [candidate(rewards=EQUAL), *(candidate(peer_id=peer, newcomer=peer > "b") for peer in "abcd")]
    counts = Counter(i for seed in range(2000) for i in uniform(candidates, 2, random.Random(seed)))
    assert counts[0] == 0
    assert all(abs(counts[i] - 1000) < 120 for i in range(1, 5))


def test_trusted_prefers_trust_freshness_and_what_was_used_less() -> None:
    base = candidate(trust=0.5, age_s=300.0)
    better = [candidate(trust=1.0, age_s=300.0), candidate(trust=0.5, age_s=0.0)]
    worse = [candidate(trust=0.5, age_s=300.0, uses=1), candidate(trust=0.5, age_s=300.0, author_uses=1)]
    worse = [replace(one, peer_id="b") for one in worse]
    better = [replace(one, peer_id="b") for one in better]
    for one, expected in [*((one, 2 / 3) for one in better), *((one, 1 / 3) for one in worse)]:
        first = sum(by_trust([one, base], 1, random.Random(seed)) == [0] for seed in range(3000))
        assert first / 3000 == pytest.approx(expected, abs=0.03)


def test_where_everybody_is_new_the_paper_s_taker_gives_all_that_a_first_step_wants_and_the_default_one() -> None:
    candidates = [candidate(peer_id=f"new{i % 4}", newcomer=True, author_uses=0) for i in range(28)]
    assert len(apply_taker(taker_of("uniform"), candidates, 4, random.Random(0))) == 4
    assert len(apply_taker(taker_of("trusted"), candidates, 4, random.Random(0))) == 1


@pytest.mark.parametrize(
    ("one", "other", "odds"),
    [
        ({}, {"trust": 0.3}, 3.0),
        ({}, {"uses": 2}, 3.0),
        ({}, {"author_uses": 2}, 3.0),
        ({}, {"age_s": HALF_LIFE_S}, 2.0),
        # The chance that a group with such a mean is informative: of 4 with mean 3/4, and of 2 with mean 1/2.
        ({"rewards": (0.0, 1.0, 1.0, 1.0)}, {"rewards": (0.0, 1.0)}, (1 - 0.75**4 - 0.25**4) / 0.5),
        ({"rewards": (0.0, 1.0)}, {"rewards": (0.25, 1.0, 1.0)}, 0.5 / (1 - 0.75**3 - 0.25**3)),
    ],
)
def test_by_trust_takes_in_proportion_to_trust_chance_age_and_uses(
    one: dict[str, object], other: dict[str, object], odds: float
) -> None:
    rng, pair = random.Random(0), [candidate(**one), candidate(peer_id="b", **other)]
    share = sum(by_trust(pair, 1, rng) == [0] for _ in range(5000)) / 5000
    assert share == pytest.approx(odds / (1 + odds), abs=0.025)


def test_newcomers_get_their_share_and_no_more_however_many_there_are() -> None:
    crowd = [candidate(peer_id=f"sybil{i}", newcomer=True) for i in range(1000)]
    candidates = [*crowd, *(candidate(peer_id="known") for _ in range(20))]
    taker, rng = taker_of("trusted"), random.Random(0)
    chosen = [i for _ in range(200) for i in apply_taker(taker, candidates, 4, rng)]
    assert len(chosen) == 800  # the established fill what newcomers may not have
    of_newcomers = sum(candidates[i].newcomer for i in chosen)
    assert 0 < of_newcomers <= NEWCOMER_SHARE * 800 + 1


@given(st.integers(1, 60), st.integers(0, 1000), st.integers(2, 8))
def test_an_author_with_any_number_of_offers_is_taken_again_only_after_all_others(many: int, seed: int, n: int) -> None:
    candidates = [candidate(peer_id="many")] * many + [candidate(peer_id=f"{i}") for i in range(n - 1)]
    chosen = by_trust(candidates, n, random.Random(seed))
    assert Counter(candidates[i].peer_id for i in chosen).most_common(1)[0][1] == 1


def test_own_code_is_called_by_name_and_held_to_the_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_strategy.py").write_text(
        "def greedy(candidates, n, rng):\n    return [0, 0, 99, -1, *range(len(candidates))]\n"
        "def large(own, now_s):\n    return own.size_bytes > 50\nnothing = 3\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    taker = taker_of("my_strategy:greedy")
    assert apply_taker(taker, [candidate()] * 5, 3, random.Random(0)) == [0, 1, 2]
    sharer = sharer_of("my_strategy:large")
    assert sharer(own(EQUAL), 0.0)
    assert not sharer(own(EQUAL, size_bytes=9), 0.0)
    with pytest.raises(ConfigError, match="expected a function"):
        taker_of("my_strategy:nothing")
    sys.modules.pop("my_strategy")


@pytest.mark.parametrize("name", ["infromative", "no_such_module:f", "math:no_such", ":", "budget:x", "budget:0"])
def test_a_wrong_name_is_a_sentence(name: str) -> None:
    with pytest.raises(ConfigError, match=r"swarm\.share"):
        sharer_of(name)
    if not name.startswith("budget"):
        with pytest.raises(ConfigError, match=r"swarm\.take"):
            taker_of(name)
