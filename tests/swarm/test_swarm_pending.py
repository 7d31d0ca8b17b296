"""Offers that wait for verification: places and turns go by author, and copies come after what they copy."""

import random
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import wire
from shoal.swarm.strategy.pending import MOST, MOST_PER_AUTHOR, PendingOffers
from shoal.swarm.trust.ingress import VerifiedMessage
from shoal.swarm.verification import Rounds
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout


class Waiting(PendingOffers):
    """Pending offers of authors that are known or new."""

    def __init__(self, *newcomers: str) -> None:
        super().__init__()
        self.newcomers = newcomers

    def says(self, author: str, question: str = "", *answers: str) -> list[str]:
        """Adds an offer, of a question of its own if none is given."""
        id_ = f"{author}/{random.random()}"
        rollouts = tuple(OfferedRollout(text) for text in answers or ("a", "b"))
        content = Offer(Claim("t", question or id_, "1"), rollouts, GeneratorKind.RULE, "m", 1.0)
        return self.add(VerifiedMessage(author, id_, 1.0, content), content, self.newcomers.__contains__)

    def authors(self) -> Counter[str]:
        return Counter(message.peer_id for message, _ in self.values())

    def taken(self, rng: random.Random, *, newcomers: bool = True) -> str | None:
        """Author of the next offer, which leaves."""
        key = self.next(self.newcomers.__contains__, newcomers, rng)
        return None if key is None else self.remove(key)[0].peer_id


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 60), st.booleans())
def test_no_number_of_offers_displaces_another_author_s_only_one(floods: Sequence[int], honest: int, new: bool) -> None:
    """However many come after it, of however many authors with several, established or new."""
    quiet, loud = [f"quiet{i}" for i in range(honest)], [f"loud{i}" for i in range(len(floods))]
    waiting = Waiting(*(quiet + loud if new else []))
    for author in quiet:
        waiting.says(author)
    for author, count in zip(loud, floods, strict=True):
        for _ in range(count):
            waiting.says(author)
    kept = waiting.authors()
    assert all(kept[author] == 1 for author in quiet)
    assert max(kept.values()) <= MOST_PER_AUTHOR
    assert len(waiting) <= MOST


@pytest.mark.parametrize("new", [False, True])
def test_long_offers_take_a_bounded_memory_and_displace_no_short_one(new: bool) -> None:
    authors = ["quiet", *(f"loud{i}" for i in range(100))]
    waiting, crowded_out = Waiting(*(authors if new else ())), set[str]()
    waiting.says("quiet", "", "a" * 1000)
    for author in authors[1:] * 3:
        crowded_out.update(waiting.says(author, "", "b" * 300_000))
    assert sum(len(wire.encode(offer)) for _, offer in waiting.values()) <= 16 << 20
    assert len(waiting) > 50
    assert waiting.authors()["quiet"] == 1
    assert "quiet" not in crowded_out


def test_a_crowd_of_newcomers_displaces_no_established_author_and_has_half_of_the_turns() -> None:
    crowd = [f"new{i}" for i in range(3 * MOST)]
    waiting, rng = Waiting(*crowd), random.Random(0)
    for _ in range(MOST_PER_AUTHOR):
        assert waiting.says("known") == []
    for author in crowd:
        waiting.says(author)
    assert len(waiting) == MOST + MOST_PER_AUTHOR
    turns = [waiting.taken(rng) for _ in range(MOST_PER_AUTHOR)]
    assert turns.count("known") > MOST_PER_AUTHOR / 4
    assert waiting.taken(rng, newcomers=False) == "known"


def test_an_author_with_many_offers_has_one_turn_among_authors_with_one() -> None:
    rng, turns = random.Random(0), list[str | None]()
    for _ in range(40):
        waiting = Waiting()
        for author in ["loud"] * MOST_PER_AUTHOR + [f"quiet{i}" for i in range(9)]:
            waiting.says(author)
        turns.append(waiting.taken(rng))
    assert turns.count("loud") < 10


@given(st.permutations(["original", *(f"copier{i}" for i in range(5))]), st.integers(0, 99))
def test_an_original_is_read_before_its_copies_in_whatever_order_authors_are_drawn(
    names: Sequence[str], seed: int
) -> None:
    """A copy has the question and one of the answers."""
    waiting, rng = Waiting(), random.Random(seed)
    waiting.says("original", "what?", "so it is four", "so it is five")
    for name in names:
        if name != "original":
            waiting.says(name, "what?", "so it is four", f"junk of {name}")
    assert waiting.taken(rng) == "original"


@pytest.mark.parametrize("counts", [{"a": 1000}, {"a": 40, "b": 40, "c": 40}, {"a": 4, "b": 4, "c": 400}])
def test_a_few_authors_can_hasten_no_rounds(counts: Mapping[str, int]) -> None:
    """An author counts with so many offers of a round, accepted or refused."""
    rounds = Rounds(offers=40, per_author=4)
    for author, count in counts.items():
        for _ in range(count):
            rounds.read(author)
    assert not rounds.whole
    for peer in range(10):
        for _ in range(4):
            rounds.read(f"honest{peer}")
    assert rounds.whole
    rounds.next()
    assert not rounds.whole


def test_long_offers_of_one_question_are_joined_once_however_often_others_are_picked() -> None:
    """Strangers' turns beside them would otherwise keep the run's event loop busy."""
    joined = Counter[str]()

    class Long(OfferedRollout):
        """An answer that counts how often its text is made of its parts."""

        @property
        def said(self) -> str:
            joined[self.text] += 1
            return self.text

    waiting, rng = Waiting(), random.Random(0)
    for i in range(MOST_PER_AUTHOR):
        content = Offer(Claim("t", "2 + 2", "4"), (Long(f"{i}"), Long(f"{i}!")), GeneratorKind.RULE, "m", 1.0)
        waiting.add(VerifiedMessage(f"a{i}", f"{i}", 1.0, content), content, lambda _: False)
    while waiting:
        waiting.taken(rng)
    assert set(joined.values()) == {1}
