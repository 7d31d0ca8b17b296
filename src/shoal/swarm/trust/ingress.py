"""The ingress filter admits frames of peers and keeps a record of each author. No I/O; both clocks come in as
arguments.

Rates follow a monotonic clock and ages follow Unix time, so a changed clock silences no peer.

Checks run in order of cost, and the first failure refuses the frame:

    size -> schema -> swarm -> ban -> signature -> time -> sequence -> rate -> decompression -> payload

After the filter, the node matches the claim with its tasks. A receipt with another question or truth on
the same libraries is a signed lie, and its author is banned. Refusals are counted by reason. Acts that another peer
could have committed (replay, forgery, floods under a stolen name) are never held against an author.

New identities are free, so a thousand newcomers together gain no more than one. They share one rate and one share of
the processor. Their records are bounded and push out each other, never an established author. A newcomer with enough
good evidence becomes established when there is a place: some at once, then a few per hour, so an owner of many keys
needs hours. Established authors, at most `TrustLimits.authors`, push out the longest silent.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shoal import wire
from shoal.errors import WireError
from shoal.swarm.trust.rates import Bucket, Recent
from shoal.swarm.trust.refusals import BLAMED, LIES, STANDING_KEPT, Reason
from shoal.swarm.wire.envelope import MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, Envelope, is_genuine, opened, payload_of
from shoal.swarm.wire.offer import Claim, Course, Offer, OfferedRollout
from shoal.types import Task

REPEATING_BYTES = 16 * 1024
"""Size up to which a payload may repeat keys. Decoding it takes 3 ms at most, counted as its author's processor time;
looking for repeats costs a sixth of an admission."""
PRIOR = 1.0
"""Evidence in both counts of a newcomer's Beta reputation."""
DECAY = 0.98
"""Weight of earlier evidence per new piece: about the last 50 count."""
ESTABLISHED = 8.0
"""Decayed good evidence above which an author is no newcomer."""
LIARS = 1024
"""Newcomers whose ban is remembered: a new name costs less than waiting."""
WINDOW = 256
"""Sequence numbers below the highest that may still arrive, out of order."""


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
    first_established: int = 6
    """Newcomers that become established without a wait, in a swarm without established authors."""
    established_per_s: float = 2 / 3600
    authors: int = 4096
    """Records of newcomers, and of established authors; the longest silent are forgotten."""


@dataclass(frozen=True, slots=True)
class VerifiedMessage:
    """A message that passed the ingress filter."""

    peer_id: str
    id: str
    """Id, unique among all messages that are ever admitted."""
    sent_s: float
    content: Offer


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
    established: bool = False

    @property
    def trust(self) -> float:
        """Mean of the Beta reputation, 0..1; one half without evidence."""
        return (self.good + PRIOR) / (self.good + self.bad + 2 * PRIOR)

    @property
    def newcomer(self) -> bool:
        """True while the author has too little good evidence, or no place among the established."""
        return not self.established or self.good < ESTABLISHED

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
        self._unheard = set[str]()  # established before this process, and silent since
        self._promotions = Bucket(self._limits.established_per_s, 1.0)
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
            payload = payload_of(found)
            content = wire.decode(payload, Offer, MAX_PAYLOAD_BYTES)
            # Each repeat of a key is decoded, and only the last kept.
            if len(payload) > REPEATING_BYTES and 2 * len(wire.encode(content)) < len(payload):
                raise WireError("payload: expected no repeated keys")
        except WireError:
            self.refuse(found.peer_id, Reason.BAD_BODY)
            return Reason.BAD_BODY
        finally:
            took_s = self._timer() - began_s
            for one in self._rated(self._record(found.peer_id)):
                one.processor.spend(took_s)
        self.admitted += 1
        peer_id = found.peer_id
        sent_s = min(found.sent_s, now_s)  # a stamp ahead of time makes nothing younger
        return VerifiedMessage(peer_id, f"{peer_id}/{found.session}-{found.sequence}", sent_s, content)

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

    def praise(self, peer_id: str, steady_s: float = 0.0) -> None:
        """Credits an author with a true offer that had an advantage; `steady_s` is monotonic."""
        author = self._record(peer_id)
        self._remember(peer_id, author)
        author.good, author.bad = author.good * DECAY + 1, author.bad * DECAY
        if author.established or author.good < ESTABLISHED:
            return
        heard = len(self._established) - len(self._unheard)
        if heard < self._limits.first_established or self._promotions.take(steady_s):
            self._establish(peer_id, author)

    def vouch(self, peer_id: str) -> None:
        """Makes a peer established that people or an earlier process vouch for."""
        if peer_id not in self._established:
            author = self._record(peer_id)
            author.good = max(author.good, 2 * ESTABLISHED)
            self._establish(peer_id, author)
            self._unheard.add(peer_id)

    @property
    def established(self) -> tuple[str, ...]:
        """Ids of established peers that are not banned."""
        return tuple(one for one, author in self._established.items() if not author.newcomer and one not in self.banned)

    def _establish(self, peer_id: str, author: PeerRecord) -> None:
        author.established = True
        self._newcomers.pop(peer_id, None)
        self._established[peer_id] = author

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
        self._unheard.discard(peer_id)
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
