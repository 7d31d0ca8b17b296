"""Identity, envelope, offer: what is said is signed, bounded and exactly what was meant."""

import stat
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from shoal import wire
from shoal.errors import ConfigError, WireError
from shoal.net.identity import Identity, peer_id_of
from shoal.swarm.wire import envelope as env
from shoal.swarm.wire.envelope import Signer, is_genuine, opened, payload_of, signed
from shoal.swarm.wire.offer import Claim, GeneratorKind, Offer, OfferedRollout, offer_of
from shoal.types import (
    Completion,
    FinishReason,
    Group,
    Message,
    Receipt,
    Reward,
    Role,
    Rollout,
    RolloutStatus,
    Task,
    ToolCall,
    Turn,
)

ME = Identity.fresh()
CLAIM = Claim("gcd", "gcd of 4 and 6?", "2", Receipt("gcd", "0.1", "{}", 7, 0))
QUESTION = Message(Role.USER, "gcd of 4 and 6?")


def rollout(*messages: Message, status: RolloutStatus = RolloutStatus.FINISHED, **changes: object) -> Rollout:
    turn = Turn((1, 2), Completion((3, 4), (-0.5, -0.25), (5, 5), FinishReason.STOP))
    values = {"id": "r", "messages": messages, "turns": (turn,), "reward": Reward(1.0), "status": status, **changes}
    return Rollout(**values)


def test_an_identity_is_made_once_and_only_its_owner_can_read_it(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "identity.pem"
    first = Identity.load(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert Identity.load(path).peer_id == first.peer_id == peer_id_of(first.public_key)
    assert Identity.load(tmp_path / "other.pem").peer_id != first.peer_id
    assert list(path.parent.iterdir()) == [path]


def test_an_identity_that_others_can_read_or_that_is_no_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "identity.pem"
    Identity.load(path)
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        Identity.load(path)
    path.write_text("nothing")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match="expected a private key in PEM"):
        Identity.load(path)
    with pytest.raises(ConfigError, match="cannot be read or made"):
        Identity.load(Path("/proc/nowhere/identity.pem"))


@given(st.binary(max_size=5000), st.floats(0, 2**33))
def test_a_payload_comes_out_as_it_went_in_and_sequences_count_up(payload: bytes, now_s: float) -> None:
    seal = Signer(ME, "reef", session=3)
    for sequence in range(2):
        frame = seal.frame(payload, now_s)
        envelope = opened(frame)
        assert is_genuine(frame, envelope)
        assert payload_of(envelope) == payload
        assert (envelope.peer_id, envelope.swarm, envelope.session) == (ME.peer_id, "reef", 3)
        assert (envelope.sequence, envelope.sent_s) == (sequence, now_s)


@given(st.data())
def test_a_frame_with_any_byte_changed_is_not_genuine(data: st.DataObject) -> None:
    frame = bytearray(Signer(ME, "reef", session=3).frame(b"payload", 1.0))
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    try:
        envelope = opened(bytes(frame))
    except WireError:
        return
    assert not is_genuine(bytes(frame), envelope)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_envelope_or_a_wire_error(data: bytes) -> None:
    for frame in (data, bytes(64) + data, bytes(64) + b"\x01" + data):
        with pytest.raises(WireError):
            opened(frame)


def unsigned(**changes: object) -> bytes:
    """A correctly signed frame of an envelope that nobody checked."""
    fields = {
        **{"schema": 1, "swarm": "reef", "author": ME.public_key, "session": 1, "sequence": 0, "sent_s": 1.0},
        **{"body": b"", **changes},
    }
    return signed(ME, bytes([wire.FORMAT]) + msgspec.msgpack.encode(fields))


def nested(depth: int) -> bytes:
    """A frame with one field too many, whose lists are as deep as that: to skip it a parser has to go down there."""
    deep = b"\x91" * depth + b"\xc0"
    fields = unsigned()[64 + 1 :]
    assert fields[0] == 0x87  # a map of seven
    return signed(ME, bytes([wire.FORMAT, 0x88]) + fields[1:] + msgspec.msgpack.encode("more") + deep)


@pytest.mark.parametrize("depth", [1_000, 5_000, 200_000])
def test_lists_in_lists_are_a_wire_error(depth: int) -> None:
    with pytest.raises(WireError):
        opened(nested(depth))


@pytest.mark.parametrize(
    "changes",
    [
        *({"schema": 2}, {"author": b"short"}, {"sequence": -1}, {"session": 2**53}, {"sent_s": float("nan")}),
        *({"sent_s": -1.0}, {"body": "text"}, {"swarm": None}, {"sequence": 2**70 // 2**8}),
    ],
)
def test_an_envelope_with_a_wrong_field_is_a_wire_error(changes: dict[str, object]) -> None:
    assert opened(unsigned()).swarm == "reef"
    with pytest.raises(WireError):
        opened(unsigned(**changes))


def test_frames_over_the_limit_are_refused_before_they_are_parsed() -> None:
    frame = unsigned(body=bytes(env.MAX_FRAME_BYTES))
    with pytest.raises(WireError, match=f"at most {env.MAX_FRAME_BYTES - 64} bytes"):
        opened(frame)
    with pytest.raises(WireError, match="payload: expected at most"):
        Signer(ME, "reef", session=0).frame(bytes(env.MAX_PAYLOAD_BYTES + 1), 0.0)


def bomb(stated: bool) -> bytes:
    """A gigabyte of zeros in a few dozen KB."""
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=stated).compressobj(
        size=1 << 30 if stated else -1
    )
    zeros = bytes(1 << 24)
    return b"".join(compressor.compress(zeros) for _ in range(64)) + compressor.flush()


def test_a_zip_bomb_is_refused_by_its_stated_size_and_without_one() -> None:
    for body in (bomb(stated=True), bomb(stated=False)):
        assert len(body) < env.MAX_FRAME_BYTES // 2
        with pytest.raises(WireError, match="expected a stated size"):
            payload_of(opened(unsigned(body=body)))


def test_a_body_that_lies_about_its_size_or_has_something_behind_it_is_refused() -> None:
    honest = zstandard.ZstdCompressor(level=1).compress(b"x" * 100)
    lying = bytearray(honest)
    at = honest.index(100)
    lying[at] = 50
    for body in (bytes(lying), honest + b"behind", honest[:-1], b"", b"no zstd"):
        with pytest.raises(WireError):
            payload_of(opened(unsigned(body=body)))


def test_an_offer_comes_out_as_it_went_in() -> None:
    made = Offer(CLAIM, (OfferedRollout("2"), OfferedRollout("3", complete=False)), "frozen", "qwen", 1.0)
    assert wire.decode(wire.encode(made), Offer) == Offer(CLAIM, made.rollouts, GeneratorKind.FROZEN, "qwen", 1.0)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rollouts", ()),
        ("rollouts", (OfferedRollout("x"),) * 65),
        ("claim", Claim("s", "", None)),
        ("model", "m" * 201),
        ("made_s", float("inf")),
    ],
)
def test_an_offer_with_a_wrong_field_cannot_be_made_or_decoded(field: str, value: object) -> None:
    fields: dict[str, object] = {
        "claim": CLAIM, "rollouts": (OfferedRollout("x"),), "generator": GeneratorKind.RULE, "model": "", "made_s": 0.0
    }  # fmt: skip
    if field in ("claim", "model"):  # own ones may be wrong, and are then not sent
        with pytest.raises(ValueError):  # noqa: PT011
            Offer(**{**fields, field: value})
    with pytest.raises(WireError):
        wire.decode(wire.encode({**fields, field: value}), Offer)


def test_a_group_is_shared_as_text_and_only_what_others_can_read_of_it() -> None:
    answer = Message(Role.ASSISTANT, "2")
    task = Task("t", "gcd", (QUESTION,), "2")
    cut = Turn((1,), Completion((3,), (-2.0,), (5,), FinishReason.LENGTH))
    group = Group(
        "g",
        task,
        (
            rollout(QUESTION, answer),
            rollout(QUESTION, Message(Role.ASSISTANT, "two thousand"), turns=(cut,)),
            rollout(QUESTION, answer, status=RolloutStatus.FAILED),
            rollout(QUESTION, answer, Message(Role.USER, "sure?"), answer),
            rollout(QUESTION, Message(Role.ASSISTANT, "", (ToolCall("1", "f", "{}"),))),
            rollout(QUESTION, Message(Role.ASSISTANT, "2", reasoning="hm")),
            rollout(QUESTION),
        ),
        0,
    )
    made = offer_of(group, CLAIM, "tiny", 9.0)
    assert made.rollouts == (
        OfferedRollout("2", complete=True),
        OfferedRollout("two thousand", complete=False),
        OfferedRollout("<think>\nhm\n</think>\n\n2", complete=True),
    )
    nothing = Group("g", task, tuple(one for i, one in enumerate(group.rollouts) if i not in (0, 1, 5)), 0)
    with pytest.raises(ValueError, match="expected a question and an answer"):
        offer_of(nothing, CLAIM, "tiny", 9.0)
