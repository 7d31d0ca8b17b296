"""Which bytes are let in, and what is known of who sent them. No I/O; both clocks come in as arguments.

Rates are kept by a clock that never goes back, ages by Unix time: who sets a clock silences nobody.

A frame goes from cheap checks to dear ones and is refused at the first that fails:

    size -> schema -> swarm -> ban -> signature -> time -> sequence -> rate -> decompression -> payload

After the door the node asks whether the claim is one of its own tasks; a receipt that gives another question or another
truth on the same libraries is a signed lie, and its author is banned. Everything refused is counted by reason, and
nothing that anybody else could have done (replaying, forging, flooding with a stolen name) is held against an author.

Identities cost nothing, so nothing is given to new ones that a thousand of them could take together: newcomers share
one rate and one share of the processor; the memory kept for them is bounded, and they push out each other, never the
established. The established, at most `TrustLimits.authors`, push out who was silent longest.
"""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.errors import WireError
from shoal.interfaces import NotOurs
from shoal.swarm import offer
from shoal.swarm.envelope import MAX_FRAME_BYTES, Envelope, Kind, is_genuine, opened, payload_of
from shoal.swarm.offer import Offer, Want

PRIOR = 1.0
"""Of both counts of a Beta reputation: nothing is known of a newcomer."""
DECAY = 0.98
"""Of what was, with every new piece of evidence: about the last 50 count."""
ESTABLISHED = 8.0
"""Decayed good evidence above which an author is no newcomer."""
LIARS = 1024
"""Newcomers whose ban is remembered: to come back under a new name costs less than to wait."""
FALLEN = 4096
"""Established authors whose ban is remembered: each cost somebody the evidence that made it established."""
WINDOW = 256
"""Sequence numbers below the highest that may still come, out of order."""


class Reason(StrEnum):
    """Why something was refused."""

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
    """The author itself signed a body that cannot be decompressed or is no payload."""
    UNKNOWN_TASK = NotOurs.UNKNOWN_TASK.value
    HELD_OUT = NotOurs.HELD_OUT.value
    NOT_DRAWN = NotOurs.NOT_DRAWN.value
    TIMED_OUT = NotOurs.TIMED_OUT.value
    OUT_OF_BOUNDS = NotOurs.OUT_OF_BOUNDS.value
    OTHER_LIBRARIES = NotOurs.OTHER_LIBRARIES.value
    WRONG_QUESTION = NotOurs.WRONG_QUESTION.value
    WRONG_TRUTH = NotOurs.WRONG_TRUTH.value
    UNREADABLE = "not readable with this tokenizer"
    TOO_LONG = "too long for the context"
    UNSCORED = "not scored"
    HANGS = "no verdict in time"
    REPEATED = "said before"
    """All its answers to the question were taken before, whoever signed them, or the author's last is not long ago."""
    UNINFORMATIVE = "nothing to learn"
    STALE = "not fresh any more"
    CROWDED = "no room"


LIES = frozenset({Reason.WRONG_QUESTION, Reason.WRONG_TRUTH})
"""Each is proven by the author's own signature, and banned at once."""
BLAMED = frozenset({Reason.BAD_BODY, Reason.NOT_DRAWN, Reason.OTHER_LIBRARIES, Reason.HANGS, Reason.TIMED_OUT})
"""Held against the author: an honest node does not send them, or seldom."""
STANDING_KEPT = {Reason.HANGS: 0.0, Reason.TIMED_OUT: 0.5, Reason.OTHER_LIBRARIES: 0.5}
"""Share of the good evidence that an author keeps who sent what is dear to refuse: a hanging answer makes it a newcomer
again; a receipt that was not drawn in time, which may be this machine's fault, does so after some."""


@dataclass(frozen=True, slots=True)
class TrustLimits:
    """What the door lets through. Rates are envelopes per second; a burst is what a late joiner may read at once."""

    max_age_s: float = 3600.0
    skew_s: float = 300.0
    """How far the clock of an author may be ahead."""
    rate_per_s: float = 8.0
    burst: float = 128.0
    newcomers_rate_per_s: float = 50.0
    """Of all newcomers together."""
    newcomers_burst: float = 512.0
    author_share: float = 0.02
    """Of a core's time, for decompressing and decoding what one author signs; all newcomers together have as much."""
    author_burst_s: float = 1.0
    authors: int = 4096
    """Newcomers remembered, and established ones; the ones that were silent for longest are forgotten."""


@dataclass(frozen=True, slots=True)
class VerifiedMessage:
    """What came through the door."""

    peer_id: str
    id: str
    """Unique among all letters that are ever let in."""
    sent_s: float
    content: Offer | Want


@dataclass(slots=True)
class Bucket:
    """A token bucket: `rate_per_s` on average, `burst` at once."""

    rate_per_s: float
    burst: float
    left: float = field(init=False)
    filled_s: float = 0.0

    def __post_init__(self) -> None:
        self.left = self.burst

    def take(self, now_s: float, amount: float = 1.0) -> bool:
        """Whether there was enough; if so, it is gone. A clock that goes back fills nothing."""
        self.left = min(self.burst, self.left + max(0.0, now_s - self.filled_s) * self.rate_per_s)
        self.filled_s = max(self.filled_s, now_s)
        if self.left < amount:
            return False
        self.left -= amount
        return True

    def spend(self, amount: float) -> None:
        """Takes what was used already, more than is there if need be."""
        self.left -= amount


@dataclass(slots=True)
class PeerRecord:
    """What is known of one peer."""

    bucket: Bucket
    processor: Bucket
    """Seconds of a core."""
    session: int = -1
    highest: int = -1
    """Sequence number, in that session."""
    seen: int = 0
    """Bit i: `highest - i` has come."""
    gaps: int = 0
    """Sequence numbers that were passed over and have not come since: lost, or never sent."""
    good: float = 0.0
    bad: float = 0.0

    @property
    def trust(self) -> float:
        """Mean of the Beta reputation, 0..1; one half when nothing is known."""
        return (self.good + PRIOR) / (self.good + self.bad + 2 * PRIOR)

    @property
    def newcomer(self) -> bool:
        """Whether too little good is known of it."""
        return self.good < ESTABLISHED

    def is_new(self, session: int, sequence: int) -> bool:
        """Whether this number has not come yet and still may."""
        if session != self.session:
            return session > self.session
        behind = self.highest - sequence
        return behind < 0 or (behind < WINDOW and not self.seen >> behind & 1)

    def mark(self, session: int, sequence: int) -> None:
        """Records a number that is new."""
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

    def learn(self, *, good: float = 0.0, bad: float = 0.0) -> None:
        """Adds evidence."""
        self.good = self.good * DECAY + good
        self.bad = self.bad * DECAY + bad


class IngressFilter:
    """Lets envelopes in, and remembers their authors.

    Invariant: each letter it returns was signed by its author, for this swarm, and was never returned before, as long
    as its author is remembered; an author is forgotten only when more than `limits.authors` newcomers came after it.
    """

    def __init__(
        self,
        swarm: str,
        own_id: str,
        limits: TrustLimits | None = None,
        *,
        banned: Iterable[str] = (),
        timer: Callable[[], float] = time.thread_time,
    ) -> None:
        """`own_id` is this node's own peer id; its letters come back to it and are set aside.

        `timer` says how many seconds of a core this thread has used.
        """
        self._swarm = swarm
        self._own_id = own_id
        self._limits = limits or TrustLimits()
        self._timer = timer
        self._newcomers: OrderedDict[str, PeerRecord] = OrderedDict()
        self._established: OrderedDict[str, PeerRecord] = OrderedDict()
        self._newcomer_bucket = Bucket(self._limits.newcomers_rate_per_s, self._limits.newcomers_burst)
        self._newcomer_processor = self._processor()
        self.banned = set(banned)
        self._liars: OrderedDict[str, None] = OrderedDict()
        self._fallen: OrderedDict[str, None] = OrderedDict()
        self.refused: Counter[Reason] = Counter()
        self.admitted = 0

    @property
    def peers(self) -> dict[str, PeerRecord]:
        """Everybody who is remembered, by peer id."""
        return {**self._established, **self._newcomers}

    def admit(self, frame: bytes, now_s: float, steady_s: float | None = None) -> VerifiedMessage | Reason:
        """What a frame says, or why it is not heard.

        `now_s` is Unix time. `steady_s` is of a clock that is never set; without it `now_s` counts as one.
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
            content = _content(found)
        except WireError:
            self.refuse(found.peer_id, Reason.BAD_BODY)
            return Reason.BAD_BODY
        finally:
            self._spend(self._record(found.peer_id), self._timer() - began_s)
        self.admitted += 1
        peer_id = found.peer_id
        return VerifiedMessage(peer_id, f"{peer_id}/{found.session}-{found.sequence}", found.sent_s, content)

    def refuse(self, peer_id: str, reason: Reason) -> None:
        """Counts what turned out unusable behind the door, and holds it against its author where that is right."""
        self.refused[reason] += 1
        if reason in LIES:
            self._ban(peer_id)
        if reason in LIES | BLAMED:
            author = self._remember(peer_id, self._record(peer_id))
            author.learn(bad=1.0)
            author.good *= STANDING_KEPT.get(reason, 1.0)

    @property
    def lasting_bans(self) -> set[str]:
        """Whom to hear no more in later runs either: whoever was banned by people, or as an established author."""
        return self.banned - self._liars.keys()

    def _ban(self, peer_id: str) -> None:
        if peer_id in self.banned:
            return
        table, most = (self._fallen, FALLEN) if peer_id in self._established else (self._liars, LIARS)
        table[peer_id] = None
        if len(table) > most:
            self.banned.discard(table.popitem(last=False)[0])
        self.banned.add(peer_id)

    def praise(self, peer_id: str) -> None:
        """An offer of this author was true, and there was something to learn from it."""
        author = self._remember(peer_id, self._record(peer_id))
        author.learn(good=1.0)
        if not author.newcomer and peer_id in self._newcomers:
            self._established[peer_id] = self._newcomers.pop(peer_id)
            if len(self._established) > self._limits.authors:
                self._established.popitem(last=False)

    def trust(self, peer_id: str) -> float:
        """0..1; 0 of the banned."""
        return 0.0 if peer_id in self.banned else self._record(peer_id).trust

    def is_newcomer(self, peer_id: str) -> bool:
        """Whether too little good is known of a peer."""
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
        if not self._within_rate(author, steady_s):
            return Reason.FLOODING
        self._remember(peer_id, author)
        author.mark(envelope.session, envelope.sequence)
        return envelope

    def _within_rate(self, author: PeerRecord, steady_s: float) -> bool:
        if not (author.processor.take(steady_s, 0.0) and author.bucket.take(steady_s)):
            return False
        if not author.newcomer:
            return True
        return self._newcomer_processor.take(steady_s, 0.0) and self._newcomer_bucket.take(steady_s)

    def _spend(self, author: PeerRecord, seconds: float) -> None:
        author.processor.spend(seconds)
        if author.newcomer:
            self._newcomer_processor.spend(seconds)

    def _processor(self) -> Bucket:
        return Bucket(self._limits.author_share, self._limits.author_burst_s)

    def _record(self, peer_id: str) -> PeerRecord:
        """What is known of a peer; a new record, which nobody remembers yet, of one that is not known."""
        known = self._established.get(peer_id) or self._newcomers.get(peer_id)
        return known or PeerRecord(Bucket(self._limits.rate_per_s, self._limits.burst), self._processor())

    def _remember(self, peer_id: str, author: PeerRecord) -> PeerRecord:
        """Only who passed the newcomers' rate gets here: else a crowd would push out everybody in a moment."""
        if peer_id in self._established:
            self._established.move_to_end(peer_id)
        else:
            self._newcomers[peer_id] = author
            self._newcomers.move_to_end(peer_id)
            if len(self._newcomers) > self._limits.authors:
                self._newcomers.popitem(last=False)
        return author


def _content(envelope: Envelope) -> Offer | Want:
    """Raises `WireError`."""
    payload = payload_of(envelope)
    return offer.decode(payload) if envelope.kind is Kind.OFFER else offer.decode_want(payload)
