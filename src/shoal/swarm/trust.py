"""The ingress filter admits frames of peers and keeps a record of each author. No I/O; both clocks come in as
arguments.

Rates follow a monotonic clock and ages follow Unix time, so a changed clock silences no peer.

Checks run in order of cost, and the first failure refuses the frame:

    size -> schema -> swarm -> ban -> signature -> time -> sequence -> rate -> decompression -> payload

After the filter, the node checks that the claim is one of its own tasks. A receipt with another question or truth on
the same libraries is a signed lie, and its author is banned. Refusals are counted by reason. Acts that another peer
could have committed (replay, forgery, floods under a stolen name) are never held against an author.

New identities are free, so a thousand newcomers together gain no more than one. They share one rate and one share of
the processor. Their records are bounded and push out each other, never an established author. Established authors, at
most `TrustLimits.authors`, push out the longest silent.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

from shoal import wire
from shoal.errors import WireError
from shoal.swarm.envelope import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, Envelope, Kind, is_genuine, opened, payload_of
from shoal.swarm.offer import Claim, Course, Offer, OfferedRollout, Want
from shoal.types import Task

PRIOR = 1.0
"""Evidence in both counts of a newcomer's Beta reputation."""
DECAY = 0.98
"""Weight of earlier evidence per new piece: about the last 50 count."""
ESTABLISHED = 8.0
"""Decayed good evidence above which an author is no newcomer."""
LIARS = 1024
"""Newcomers whose ban is remembered: a new name costs less than waiting."""
MOST_RATED = 4096
"""Names whose rates are remembered."""
WINDOW = 256
"""Sequence numbers below the highest that may still arrive, out of order."""

PAYLOADS: Mapping[Kind, type[Offer | Want]] = {Kind.OFFER: Offer, Kind.WANT: Want}
K = TypeVar("K")
V = TypeVar("V")


class Reason(StrEnum):
    """Reason of a refusal."""

    TOO_LARGE = "too large"
    MALFORMED = "malformed"
    OTHER_SWARM = "other swarm"
    OWN = "own"
    BANNED = "banned"
    FORGED = "forged"
    FUTURE = "from the future"
    EXPIRED = "expired"
    REPLAYED = "replayed"
    FLOODING = "over the rate"
    BAD_BODY = "bad body"
    """Body signed by its author that cannot be decompressed or decoded."""
    UNKNOWN_TASK = "unknown task"
    """This node has no such dataset, or not with these settings, or another release of it."""
    HELD_OUT = "held out"
    """The question is one that this node evaluates with."""
    OTHER_MODALITY = "of no modality that this node reads"
    NOT_SENT = "attachment not sent"
    """Nobody sends an attachment, or it has another hash or type."""
    OTHER_COURSE = "the environment goes on otherwise"
    """The conversation is not the one that its environment has with these answers."""
    NOT_DRAWN = "receipt gives no question"
    TIMED_OUT = "not drawn in time"
    """The process that draws took too long or died, for the claim's sake or for this machine's."""
    OUT_OF_BOUNDS = "outside this node's bounds"
    """The dataset or the size is outside the bounds that this node draws for others."""
    OTHER_LIBRARIES = "drawn otherwise by other libraries"
    """The receipt gives another question or truth here, where Python or a library is another one: no proof of a lie."""
    WRONG_QUESTION = "wrong question"
    """The receipt gives another question, with the same libraries: the claim is a lie."""
    WRONG_TRUTH = "wrong truth"
    """The question is right and the truth is not: the claim is a lie."""
    UNREADABLE = "not readable with this tokenizer"
    TOO_LONG = "too long for the context"
    UNSCORED = "not scored"
    HANGS = "no verdict in time"
    REPEATED = "said before"
    """Offer whose answers were all taken before under any name, or that follows its author's last too soon."""
    UNINFORMATIVE = "nothing to learn"
    STALE = "not fresh any more"
    CROWDED = "no room"


class Recogniser(Protocol):
    """Matcher of peers' claims with this node's own tasks. Nothing that a peer claims is believed."""

    async def claim(self, task: Task) -> Claim:
        """Builds the claim of an own task. Raises `TaskError` for a task that cannot be shared."""
        ...

    async def task(self, claim: Claim) -> Task | Reason:
        """Finds the own training task that asks the same, with this node's own prompt, truth and scorer."""
        ...

    async def course(self, claim: Claim, task: Task, rollout: OfferedRollout) -> Course | Reason:
        """Plays an offered rollout of the task again, where an environment holds or scores it."""
        ...


LIES = frozenset({Reason.WRONG_QUESTION, Reason.WRONG_TRUTH})
"""Reasons proven by the author's own signature; each bans at once."""
BLAMED = frozenset({Reason.BAD_BODY, Reason.NOT_DRAWN, Reason.OTHER_LIBRARIES, Reason.HANGS, Reason.TIMED_OUT})
"""Reasons held against the author: an honest node sends such offers seldom or never."""
STANDING_KEPT = {Reason.HANGS: 0.0, Reason.TIMED_OUT: 0.5, Reason.OTHER_LIBRARIES: 0.5}
"""Share of the good evidence that an author keeps after an offer that is costly to refuse. A hanging answer makes it a
newcomer again. A receipt that was not drawn in time, perhaps by this machine's fault, does so after several."""


@dataclass(frozen=True, slots=True)
class TrustLimits:
    """Limits of the ingress filter. Rates count envelopes per second; a burst is a late joiner's reading at once."""

    max_age_s: float = 3600.0
    skew_s: float = 300.0
    """Seconds that an author's clock may be ahead."""
    rate_per_s: float = 8.0
    burst: float = 128.0
    newcomers_rate_per_s: float = 50.0
    """Envelopes per second of all newcomers together."""
    newcomers_burst: float = 512.0
    author_share: float = 0.02
    """Share of a core for decompressing and decoding one author's bodies; all newcomers together have the same."""
    author_burst_s: float = 1.0
    authors: int = 4096
    """Records of newcomers, and of established authors; the longest silent are forgotten."""


@dataclass(frozen=True, slots=True)
class VerifiedMessage:
    """A message that passed the ingress filter."""

    peer_id: str
    id: str
    """Id, unique among all messages that are ever admitted."""
    sent_s: float
    content: Offer | Want


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate_per_s` on average, `burst` at once."""

    rate_per_s: float
    burst: float
    used: float = 0.0
    """Amount to be filled up again; more than `burst` after `spend`."""
    filled_s: float = 0.0

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Takes an amount if it is there, and returns whether it was. A clock that goes back fills nothing."""
        self.used = max(0.0, self.used - max(0.0, now_s - self.filled_s) * self.rate_per_s)
        self.filled_s = max(self.filled_s, now_s)
        if self.used + amount > self.burst:
            return False
        self.used += amount
        return True

    def spend(self, amount: float) -> None:
        """Adds an amount that was already used, above the burst if need be."""
        self.used += amount


class Recent(OrderedDict[K, V]):
    """Table of the `most` keys that were set last."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self._most:
            self.popitem(last=False)


class Buckets:
    """Token buckets of the `MOST_RATED` names that asked last."""

    def __init__(self, rate_per_s: float, burst: float) -> None:
        self._rate_per_s, self._burst = rate_per_s, burst
        self._of: Recent[str, Bucket] = Recent(MOST_RATED)

    def take(self, name: str, now_s: float) -> bool:
        """Takes one from the bucket of a name if it is there, and returns whether it was."""
        self._of[name] = bucket = self._of.get(name) or Bucket(self._rate_per_s, self._burst)
        return bucket.take(now_s)


@dataclass(slots=True)
class PeerRecord:
    """Evidence, rates and sequence numbers of one peer."""

    bucket: Bucket
    processor: Bucket
    """Bucket of seconds of a core."""
    session: int = -1
    highest: int = -1
    """Highest sequence number of that session."""
    seen: int = 0
    """Bits of arrived numbers: bit i stands for `highest - i`."""
    gaps: int = 0
    """Sequence numbers passed over that have not arrived since: lost, or never sent."""
    good: float = 0.0
    bad: float = 0.0

    @property
    def trust(self) -> float:
        """Mean of the Beta reputation, 0..1; one half without evidence."""
        return (self.good + PRIOR) / (self.good + self.bad + 2 * PRIOR)

    @property
    def newcomer(self) -> bool:
        """True while the author has too little good evidence."""
        return self.good < ESTABLISHED

    def is_new(self, session: int, sequence: int) -> bool:
        """Tells whether a sequence number has not arrived yet and still may."""
        if session != self.session:
            return session > self.session
        behind = self.highest - sequence
        return behind < 0 or (behind < WINDOW and not self.seen >> behind & 1)

    def mark(self, session: int, sequence: int) -> None:
        """Marks a new sequence number as arrived."""
        if session != self.session:
            self.session, self.highest, self.seen = session, sequence, 1
            return
        ahead = sequence - self.highest
        if ahead > 0:
            self.gaps += ahead - 1
            self.seen = (self.seen << min(ahead, WINDOW) | 1) & ((1 << WINDOW) - 1)
            self.highest = sequence
        else:
            self.gaps -= 1
            self.seen |= 1 << -ahead


class IngressFilter:
    """Filter of envelopes, with the records of their authors.

    Invariant: each returned message was signed by its author for this swarm. No message is returned twice while its
    author is remembered. An author is forgotten only after more than `limits.authors` later newcomers.
    """

    def __init__(
        self,
        swarm: str,
        own_id: str,
        limits: TrustLimits | None = None,
        *,
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """`own_id` is this node's own peer id, whose messages come back and are set aside.

        `timer` returns the seconds of a core that this thread has used.
        """
        self._swarm = swarm
        self._own_id = own_id
        self._limits = limits or TrustLimits()
        self._timer = timer
        self._newcomers: Recent[str, PeerRecord] = Recent(self._limits.authors)
        self._established: Recent[str, PeerRecord] = Recent(self._limits.authors)
        self._crowd = self._new(self._limits.newcomers_rate_per_s, self._limits.newcomers_burst)
        """Rates of all newcomers together."""
        self.banned = set[str]()
        self._liars: dict[str, None] = {}
        self.refused: Counter[Reason] = Counter()
        self.admitted = 0

    @property
    def peers(self) -> dict[str, PeerRecord]:
        """Records of all remembered peers, by peer id."""
        return {**self._established, **self._newcomers}

    def admit(self, frame: bytes, now_s: float, steady_s: float | None = None) -> VerifiedMessage | Reason:
        """Checks a frame; returns its message or the reason of refusal.

        `now_s` is Unix time and `steady_s` is monotonic; without the latter `now_s` serves for both.
        """
        try:
            found = self._checked(frame, now_s, now_s if steady_s is None else steady_s)
        except WireError:
            found = Reason.MALFORMED
        if isinstance(found, Reason):
            self.refused[found] += 1
            return found
        began_s = self._timer()
        try:
            content = wire.decode(payload_of(found), PAYLOADS[found.kind], MAX_PAYLOAD_BYTES)
        except WireError:
            self.refuse(found.peer_id, Reason.BAD_BODY)
            return Reason.BAD_BODY
        finally:
            took_s = self._timer() - began_s
            for one in self._rated(self._record(found.peer_id)):
                one.processor.spend(took_s)
        self.admitted += 1
        peer_id = found.peer_id
        return VerifiedMessage(peer_id, f"{peer_id}/{found.session}-{found.sequence}", found.sent_s, content)

    def refuse(self, peer_id: str, reason: Reason) -> None:
        """Counts a message that failed after the filter, and holds it against its author where that is fair."""
        self.refused[reason] += 1
        if reason in LIES:
            self._ban(peer_id)
        if reason in LIES | BLAMED:
            author = self._record(peer_id)
            self._remember(peer_id, author)
            author.good *= DECAY * STANDING_KEPT.get(reason, 1.0)
            author.bad = author.bad * DECAY + 1

    @property
    def lasting_bans(self) -> set[str]:
        """Bans that persist across runs: manual bans, and bans of established peers."""
        return self.banned - self._liars.keys()

    def _ban(self, peer_id: str) -> None:
        if peer_id not in self.banned and peer_id not in self._established:
            self._liars[peer_id] = None
            if len(self._liars) > LIARS:
                oldest = next(iter(self._liars))
                del self._liars[oldest]
                self.banned.discard(oldest)
        self.banned.add(peer_id)

    def praise(self, peer_id: str) -> None:
        """Credits an author with a true offer that had an advantage."""
        author = self._record(peer_id)
        self._remember(peer_id, author)
        author.good, author.bad = author.good * DECAY + 1, author.bad * DECAY
        if not author.newcomer and peer_id in self._newcomers:
            self._established[peer_id] = self._newcomers.pop(peer_id)

    def trust(self, peer_id: str) -> float:
        """Trust in a peer, 0..1; 0 for banned peers."""
        return 0.0 if peer_id in self.banned else self._record(peer_id).trust

    def is_newcomer(self, peer_id: str) -> bool:
        """Tells whether a peer has too little good evidence."""
        return self._record(peer_id).newcomer

    def _checked(self, frame: bytes, now_s: float, steady_s: float) -> Envelope | Reason:
        if len(frame) > MAX_FRAME_BYTES:
            return Reason.TOO_LARGE
        envelope = opened(frame)
        peer_id = envelope.peer_id
        if envelope.swarm != self._swarm:
            return Reason.OTHER_SWARM
        if peer_id == self._own_id:
            return Reason.OWN
        if peer_id in self.banned:
            return Reason.BANNED
        if not is_genuine(frame, envelope):
            return Reason.FORGED
        if envelope.sent_s > now_s + self._limits.skew_s:
            return Reason.FUTURE
        if envelope.sent_s < now_s - self._limits.max_age_s:
            return Reason.EXPIRED
        author = self._record(peer_id)
        if not author.is_new(envelope.session, envelope.sequence):
            return Reason.REPLAYED
        rated = self._rated(author)
        if not all(one.processor.take(steady_s, 0.0) and one.bucket.take(steady_s) for one in rated):
            return Reason.FLOODING
        self._remember(peer_id, author)
        author.mark(envelope.session, envelope.sequence)
        return envelope

    def _rated(self, author: PeerRecord) -> list[PeerRecord]:
        """Records with the rates that bound an author."""
        return [author, self._crowd] if author.newcomer else [author]

    def _new(self, rate_per_s: float, burst: float) -> PeerRecord:
        return PeerRecord(Bucket(rate_per_s, burst), Bucket(self._limits.author_share, self._limits.author_burst_s))

    def _record(self, peer_id: str) -> PeerRecord:
        """Looks up a peer's record; an unknown peer gets a new record that is not stored yet."""
        known = self._established.get(peer_id) or self._newcomers.get(peer_id)
        return known or self._new(self._limits.rate_per_s, self._limits.burst)

    def _remember(self, peer_id: str, author: PeerRecord) -> None:
        """Stores the record of an author that passed the newcomers' rate: a crowd would otherwise push out every
        author."""
        (self._established if peer_id in self._established else self._newcomers)[peer_id] = author
