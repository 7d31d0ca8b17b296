"""Admission: what is let in, what is refused and why, and what is held against whom."""

import contextlib
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal import wire
from shoal.errors import WireError
from shoal.net.identity import Identity
from shoal.swarm.peer import BANNED_FILE, SESSION_FILE, ban_in, next_session, read_lines
from shoal.swarm.trust.ingress import (
    ESTABLISHED,
    LIARS,
    REPEATING_BYTES,
    WINDOW,
    IngressFilter,
    PeerRecord,
    TrustLimits,
    VerifiedMessage,
)
from shoal.swarm.trust.rates import MOST_RATED, Bucket, Buckets
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.envelope import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, Envelope, Signer, signed
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout

ME, PEER, OTHER = (Identity.fresh() for _ in range(3))
NOW_S = 1.8e9
OFFER = Offer(Claim("gcd", "gcd of 4 and 6?", "2"), (OfferedRollout("2"),) * 2, GeneratorKind.RULE, "", NOW_S)
PAYLOAD = wire.encode(OFFER)


def ingress(limits: TrustLimits | None = None, **options: object) -> IngressFilter:
    return IngressFilter("reef", ME.peer_id, limits, **options)


def seal(identity: Identity = PEER, swarm: str = "reef", session: int = 1) -> Signer:
    return Signer(identity, swarm, session=session)


def test_what_an_honest_peer_says_comes_in_once() -> None:
    at, said = ingress(), seal()
    frame = said.frame(PAYLOAD, NOW_S)
    message = at.admit(frame, NOW_S)
    assert message == VerifiedMessage(PEER.peer_id, f"{PEER.peer_id}/1-0", NOW_S, OFFER)
    assert at.admit(frame, NOW_S) is Reason.REPLAYED
    assert isinstance(at.admit(said.frame(PAYLOAD, NOW_S), NOW_S), VerifiedMessage)
    assert (at.admitted, at.refused) == (2, {Reason.REPLAYED: 1})


def altered(**fields: object) -> bytes:
    """The payload of an offer that cannot be made here."""
    return wire.encode(msgspec.to_builtins(OFFER) | fields)


UNPRINTABLE_SERVICE = {"service": "gcd\n", "question": "?", "truth": "2", "receipt": None}


def forged() -> bytes:
    """PEER's envelope, signed by OTHER."""
    frame = seal().frame(PAYLOAD, NOW_S)
    return OTHER.sign(frame[64:]) + frame[64:]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (bytes(MAX_FRAME_BYTES + 1), Reason.TOO_LARGE),
        (b"", Reason.MALFORMED),
        (bytes(64) + b"\x01\xc1", Reason.MALFORMED),
        (bytes(64) + wire.encode(["not", "an", "envelope"]), Reason.MALFORMED),
        (seal(swarm="lagoon").frame(PAYLOAD, NOW_S), Reason.OTHER_SWARM),
        (seal(ME).frame(PAYLOAD, NOW_S), Reason.OWN),
        (seal(OTHER).frame(PAYLOAD, NOW_S), Reason.BANNED),
        (forged(), Reason.FORGED),
        (seal().frame(PAYLOAD, NOW_S + 301), Reason.FUTURE),
        (seal().frame(PAYLOAD, NOW_S - 3601), Reason.EXPIRED),
        (seal().frame(b"\x01nonsense", NOW_S), Reason.BAD_BODY),
        (seal().frame(altered(model="m\x1b[2J"), NOW_S), Reason.BAD_BODY),
        (seal().frame(altered(claim=UNPRINTABLE_SERVICE), NOW_S), Reason.BAD_BODY),
    ],
)
def test_what_is_refused_is_counted_by_its_reason(frame: bytes, reason: Reason) -> None:
    at = ingress()
    at.banned.add(OTHER.peer_id)
    assert at.admit(frame, NOW_S) is reason
    assert at.refused == {reason: 1}
    assert at.admitted == 0


def repeating(fields: list[tuple[str, object]]) -> bytes:
    """The payload of an offer with more fields before its own, whose names may be the same."""
    own = list(msgspec.to_builtins(OFFER).items())
    packed = [msgspec.msgpack.encode(part) for field in (*fields, *own) for part in field]
    return b"\x01\xde" + (len(fields) + len(own)).to_bytes(2, "big") + b"".join(packed)


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("name", ["rollouts", "claim", "model"])
def test_a_field_that_is_repeated_is_refused_before_it_costs_more_than_its_bytes(name: str, alike: bool) -> None:
    dice = random.Random(3)

    def value() -> object:
        text = "" if alike else dice.randbytes(20).hex()
        if name == "rollouts":
            return [{"text": text}] * 64
        return {"service": "gcd", "question": text, "truth": "2"} if name == "claim" else text

    one = len(msgspec.msgpack.encode({name: value()}))
    for times in (2 * REPEATING_BYTES // one, 8 * REPEATING_BYTES // one):
        frame = None
        with contextlib.suppress(WireError):  # so small a frame of so large a payload is not even signed
            frame = seal().frame(repeating([(name, value()) for _ in range(times)]), NOW_S)
        assert frame is None or ingress().admit(frame, NOW_S) is Reason.BAD_BODY
    alone = seal().frame(repeating([("later", "field")]), NOW_S)
    assert isinstance(ingress().admit(alone, NOW_S), VerifiedMessage), "a later version may have more fields"


def test_a_small_frame_takes_no_long_decoding() -> None:
    payload = altered(rollouts=[{"text": ""}] * 64, later="x" * 400_000)
    with pytest.raises(WireError, match="32 bytes of payload"):
        seal().frame(payload, NOW_S)
    body = zstandard.ZstdCompressor(write_content_size=True).compress(payload)
    envelope = Envelope(1, "reef", PEER.public_key, 1, 0, NOW_S, body)
    assert ingress().admit(signed(PEER, wire.encode(envelope)), NOW_S) is Reason.BAD_BODY


def test_only_what_an_author_itself_has_signed_is_held_against_it() -> None:
    at = ingress()
    honest = seal()
    first = honest.frame(PAYLOAD, NOW_S)
    at.admit(first, NOW_S)
    before = at.trust(PEER.peer_id)
    for frame in (first, forged(), first[:-1]):
        at.admit(frame, NOW_S)
    assert at.trust(PEER.peer_id) == before
    at.admit(honest.frame(b"nonsense", NOW_S), NOW_S)
    assert at.trust(PEER.peer_id) < before


def test_what_says_nothing_of_an_author_is_counted_and_not_held_against_it() -> None:
    at = ingress()
    for _ in range(10):
        at.refuse(PEER.peer_id, Reason.UNKNOWN_TASK)
    assert at.trust(PEER.peer_id) == 0.5
    assert at.refused == {Reason.UNKNOWN_TASK: 10}


def established(at: IngressFilter, peer_id: str) -> None:
    for _ in range(2 * int(ESTABLISHED)):
        at.praise(peer_id)


@pytest.mark.parametrize("reason", [Reason.TIMED_OUT, Reason.OTHER_LIBRARIES])
def test_receipts_that_are_dear_to_refuse_and_prove_no_lie_cost_their_author_its_standing_and_ban_nobody(
    reason: Reason,
) -> None:
    at = ingress()
    established(at, PEER.peer_id)
    at.refuse(PEER.peer_id, reason)
    assert not at.is_newcomer(PEER.peer_id) or at.peers[PEER.peer_id].good < ESTABLISHED
    for _ in range(8):
        at.refuse(PEER.peer_id, reason)
    assert at.is_newcomer(PEER.peer_id)
    assert at.trust(PEER.peer_id) < 0.5
    assert at.banned == set()


def test_no_more_of_the_established_are_remembered_than_the_limit_and_who_speaks_stays() -> None:
    at, said = ingress(TrustLimits(authors=16, first_established=1000)), seal()
    established(at, PEER.peer_id)
    for i in range(100):
        established(at, f"bought {i}")
        assert isinstance(at.admit(said.frame(PAYLOAD, NOW_S), NOW_S, float(i)), VerifiedMessage)
    assert len(at.peers) == 16
    assert not at.is_newcomer(PEER.peer_id)


def test_a_second_lie_of_a_banned_peer_takes_no_other_s_place_among_the_banned() -> None:
    at = ingress()
    for i in (*range(LIARS), 0):
        at.refuse(f"liar {i}", Reason.WRONG_TRUTH)
    assert at.banned == {f"liar {i}" for i in range(LIARS)}


def test_a_reader_whose_clock_was_set_for_one_frame_hears_everybody_afterwards() -> None:
    at, said = ingress(), seal()
    for tick in range(1200):
        now_s = NOW_S + tick + (3000.0 if tick == 100 else 0.0)
        at.admit(said.frame(PAYLOAD, NOW_S + tick), now_s, float(tick))
    assert at.admitted == 1200


def test_an_author_whose_clock_was_set_back_is_heard_in_its_next_life(tmp_path: Path) -> None:
    at = ingress()
    for now_s in (NOW_S, NOW_S - 3000.0, NOW_S - 3000.0):
        said = seal(session=next_session(tmp_path, now_s))
        assert isinstance(at.admit(said.frame(PAYLOAD, NOW_S), NOW_S), VerifiedMessage)
    (tmp_path / SESSION_FILE).write_text("what\n")
    assert next_session(tmp_path, NOW_S) == int(NOW_S * 1000)


class Costly:
    """A timer by which each look at it is a second later."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.mark.parametrize(
    "authors", [[PEER] * 100, [Identity.fresh() for _ in range(100)]], ids=["one established", "newcomers together"]
)
def test_who_sends_what_is_dear_to_decode_is_heard_as_seldom_as_it_is_dear(authors: list[Identity]) -> None:
    at = ingress(TrustLimits(author_share=0.1, author_burst_s=2.0), timer=Costly())
    established(at, PEER.peer_id)
    signers = {author.peer_id: seal(author) for author in authors}
    frames = [signers[author.peer_id].frame(PAYLOAD, NOW_S) for author in authors]
    heard = sum(isinstance(at.admit(frame, NOW_S, float(i)), VerifiedMessage) for i, frame in enumerate(frames))
    assert heard == pytest.approx(100 * 0.1 + 2, abs=1.5)
    assert at.refused[Reason.FLOODING] == 100 - heard


NOISE = random.Random(4).randbytes(17_000)
"""Makes a body so large that its payload may have any size."""


def longest(field: str, count: int, one: object) -> bytes:
    return wire.encode(
        {
            "noise": NOISE,
            "claim": msgspec.to_builtins(OFFER.claim),
            "generator": "rule",
            "model": "",
            "made_s": 1.0,
            field: [one] * count,
        }
    )


@pytest.mark.parametrize(
    "payload",
    [
        longest("rollouts", 149_000, {}),
        longest("rollouts", 70_000, {"text": ""}),
        longest("rollouts", 65, {"text": "x" * 7000}),
        longest("nothing", 249_000, {}),
    ],
)
def test_a_frame_of_few_bytes_builds_no_more_objects_than_an_offer_may_have(payload: bytes) -> None:
    frame = seal().frame(payload, NOW_S)
    tracemalloc.start()
    found = ingress().admit(frame, NOW_S)
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert isinstance(found, Reason)
    assert most_bytes < 2 * MAX_PAYLOAD_BYTES + 200_000


def test_a_file_of_people_in_any_encoding_is_read(tmp_path: Path) -> None:
    (tmp_path / BANNED_FILE).write_bytes("J\u00fcrgen abc\n".encode("latin-1"))
    assert read_lines(tmp_path / BANNED_FILE)[1:] == ["abc"]
    ban_in(tmp_path, ["d"])
    assert read_lines(tmp_path / BANNED_FILE)[1:] == ["abc", "d"]


def test_peers_are_banned_beside_those_that_people_wrote_down_without_a_last_newline(tmp_path: Path) -> None:
    (tmp_path / BANNED_FILE).write_text("a\nb")
    ban_in(tmp_path, ["c", "d"])
    ban_in(tmp_path, ["e"])
    assert read_lines(tmp_path / BANNED_FILE) == ["a", "b", "c", "d", "e"]


def test_an_offer_names_what_cannot_be_printed() -> None:
    with pytest.raises(ValueError, match=r"model: expected at most 200 printable characters, got 'm\\x1b'"):
        Offer(OFFER.claim, OFFER.rollouts, GeneratorKind.RULE, "m\x1b", NOW_S)
    with pytest.raises(ValueError, match=r"service: expected at most 200 printable characters"):
        Offer(Claim("gcd\u202e", "?", "2"), OFFER.rollouts, GeneratorKind.RULE, "m", NOW_S)


@pytest.mark.parametrize("reason", [Reason.HANGS, Reason.TIMED_OUT, Reason.OTHER_LIBRARIES])
def test_one_costly_offer_makes_no_author_of_long_standing_a_newcomer(reason: Reason) -> None:
    at = ingress()
    for _ in range(100):
        at.praise(PEER.peer_id)
    at.refuse(PEER.peer_id, reason)
    assert not at.is_newcomer(PEER.peer_id)


@given(keys=st.integers(7, 60), hours=st.integers(0, 12))
def test_keys_become_established_by_the_hour_and_those_who_are_keep_their_place(keys: int, hours: int) -> None:
    at, limits = ingress(), TrustLimits()
    for minute in range(60 * hours + 2):
        for key in range(keys):
            for _ in range(12 if not minute else 1):
                at.praise(f"key {key}", 60.0 * minute)
    assert min(keys, limits.first_established + 2 * hours) <= len(at.established)
    assert len(at.established) <= limits.first_established + 1 + 2 * hours


def test_a_stamp_ahead_of_time_makes_nothing_younger() -> None:
    message = ingress().admit(seal().frame(PAYLOAD, NOW_S + 299), NOW_S)
    assert isinstance(message, VerifiedMessage)
    assert message.sent_s == NOW_S


@pytest.mark.parametrize("lie", [Reason.WRONG_QUESTION, Reason.WRONG_TRUTH])
def test_a_proven_lie_bans_its_author_at_once(lie: Reason) -> None:
    at, said = ingress(), seal()
    assert isinstance(at.admit(said.frame(PAYLOAD, NOW_S), NOW_S), VerifiedMessage)
    at.refuse(PEER.peer_id, Reason.UNINFORMATIVE)
    assert PEER.peer_id not in at.banned
    at.refuse(PEER.peer_id, lie)
    assert at.admit(said.frame(PAYLOAD, NOW_S), NOW_S) is Reason.BANNED
    assert at.trust(PEER.peer_id) == 0.0


def test_what_is_held_against_a_peer_is_held_against_that_peer() -> None:
    at = ingress()
    at.refuse(PEER.peer_id, Reason.WRONG_TRUTH)
    assert list(at.peers) == [PEER.peer_id]
    assert at.peers[PEER.peer_id].bad == 1.0


def test_of_lying_newcomers_the_last_are_banned_and_only_bans_of_the_established_and_by_people_last() -> None:
    at = ingress()
    at.banned.add(OTHER.peer_id)
    for _ in range(2 * int(ESTABLISHED)):
        at.praise(PEER.peer_id)
    for i in range(LIARS + 10):
        at.refuse(f"liar {i}", Reason.WRONG_TRUTH)
    at.refuse(PEER.peer_id, Reason.WRONG_TRUTH)
    assert len(at.banned) == LIARS + 2
    assert "liar 9" not in at.banned
    assert "liar 10" in at.banned
    assert at.lasting_bans == {OTHER.peer_id, PEER.peer_id}


def test_a_gap_isolates_nobody_and_is_counted() -> None:
    at, said = ingress(), seal()
    frames = [said.frame(PAYLOAD, NOW_S) for _ in range(10)]
    assert isinstance(at.admit(frames[2], NOW_S), VerifiedMessage)  # a late joiner hears the middle first
    assert isinstance(at.admit(frames[9], NOW_S), VerifiedMessage)
    assert at.peers[PEER.peer_id].gaps == 6
    assert isinstance(at.admit(frames[5], NOW_S), VerifiedMessage)
    assert at.peers[PEER.peer_id].gaps == 5
    assert at.admit(frames[5], NOW_S) is Reason.REPLAYED


def test_an_author_that_restarts_goes_on_and_its_earlier_session_cannot_be_replayed() -> None:
    at = ingress()
    before, after = seal(session=1), seal(session=2)
    old = [before.frame(PAYLOAD, NOW_S) for _ in range(2)]
    assert isinstance(at.admit(old[0], NOW_S), VerifiedMessage)
    assert isinstance(at.admit(after.frame(PAYLOAD, NOW_S), NOW_S), VerifiedMessage)
    assert [at.admit(frame, NOW_S) for frame in old] == [Reason.REPLAYED] * 2


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2 * WINDOW)), max_size=60))
def test_no_order_of_numbers_is_accepted_twice(numbers: list[tuple[int, int]]) -> None:
    author = PeerRecord(Bucket(1.0, 1.0), Bucket(1.0, 1.0))
    accepted = set()
    for session, sequence in numbers:
        if author.is_new(session, sequence):
            assert (session, sequence) not in accepted
            author.mark(session, sequence)
            accepted.add((session, sequence))
    assert all(not author.is_new(*number) for number in accepted)


def test_an_author_above_its_rate_is_heard_at_its_rate() -> None:
    at, said = ingress(TrustLimits(rate_per_s=2.0, burst=4.0)), seal()
    heard = 0
    for tick in range(100):  # 10 s of 10 letters a second
        heard += isinstance(at.admit(said.frame(PAYLOAD, NOW_S), NOW_S + tick / 10), VerifiedMessage)
    assert heard == pytest.approx(4 + 2 * 9.9, abs=1)
    assert at.refused[Reason.FLOODING] == 100 - heard


def test_a_thousand_newcomers_share_one_rate_and_leave_the_established_alone() -> None:
    at = ingress(TrustLimits(newcomers_rate_per_s=10.0, newcomers_burst=20.0, authors=16))
    known = seal()
    at.admit(known.frame(PAYLOAD, NOW_S), NOW_S)
    while at.is_newcomer(PEER.peer_id):
        at.praise(PEER.peer_id)
    heard = 0
    for i in range(1000):
        frame = seal(Identity.fresh()).frame(PAYLOAD, NOW_S)
        heard += isinstance(at.admit(frame, NOW_S + i / 1000), VerifiedMessage)
        if i % 100 == 0:
            assert isinstance(at.admit(known.frame(PAYLOAD, NOW_S), NOW_S + i / 1000), VerifiedMessage)
    assert heard <= 20 + 10
    assert len(at.peers) == 17  # memory is bounded, and the established author is still there
    assert not at.is_newcomer(PEER.peer_id)


def test_newcomers_above_their_rate_make_nobody_be_forgotten_and_nothing_be_heard_again() -> None:
    at, said = ingress(TrustLimits(newcomers_rate_per_s=0.001, newcomers_burst=4.0, authors=8)), seal()
    frame = said.frame(PAYLOAD, NOW_S)
    assert isinstance(at.admit(frame, NOW_S), VerifiedMessage)
    for _ in range(20):
        stranger = Identity.fresh()
        at.admit(seal(stranger).frame(PAYLOAD, NOW_S), NOW_S)
        assert at.is_newcomer(stranger.peer_id)
    assert at.admit(frame, NOW_S + 3000) is Reason.REPLAYED


def test_reputation_grows_with_what_was_true_and_fades() -> None:
    at = ingress()
    assert at.trust("x") == 0.5
    assert at.is_newcomer("x")
    for _ in range(10):
        at.praise("x")
    assert at.trust("x") > 0.85
    assert not at.is_newcomer("x")
    assert ESTABLISHED < at.peers["x"].good < 10
    for _ in range(30):
        at.refuse("x", Reason.NOT_DRAWN)
    assert at.trust("x") < 0.5


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 5)), max_size=50), st.floats(0.1, 10), st.floats(0, 20))
def test_a_bucket_never_gives_more_than_its_burst_and_its_rate(
    takes: list[tuple[float, float]], rate_per_s: float, burst: float
) -> None:
    bucket, given_out = Bucket(rate_per_s, burst), 0.0
    for now_s, amount in takes:
        given_out += amount if bucket.take(now_s, amount) else 0.0
    assert given_out <= burst + rate_per_s * max((now_s for now_s, _ in takes), default=0.0) + 1e-6


def test_each_name_has_a_bucket_of_its_own_and_those_that_asked_long_ago_a_full_one() -> None:
    buckets = Buckets(rate_per_s=0.1, burst=1)
    assert [buckets.take(name, 0.0) for name in ("a", "b", "a")] == [True, True, False]
    for number in range(MOST_RATED):
        buckets.take(str(number), 0.0)
    assert not buckets.take("a", 0.0), "many names give no name its rate anew"
    assert buckets.take("a", 10.0)
    assert all(buckets.take(name, 10.0) for name in ("new", "newer")), "a name whose bucket is full makes room"


def test_random_damage_to_frames_never_raises_and_never_enters() -> None:
    rng, at = random.Random(0), ingress()
    frame = seal().frame(PAYLOAD, NOW_S)
    for _ in range(300):
        damaged = bytearray(frame)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        if bytes(damaged) != frame:
            assert isinstance(at.admit(bytes(damaged), NOW_S), Reason)
    assert at.admitted == 0


def test_who_is_vouched_for_twice_is_established_once() -> None:
    at = ingress()
    for _ in range(2):
        at.vouch(PEER.peer_id)
    assert at.established == (PEER.peer_id,)
