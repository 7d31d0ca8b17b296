"""Offers of peers are verified before a step may take them: they wait in `pending` and end up in `pool`.

The loop rests as long as it works, and newcomers wait longer for their next turn. Answers taken before are not taken
again. Checks run in order of cost; the text that is read and the rewards are this node's own account of an offer.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shoal.swarm.strategy.choice import differ
from shoal.swarm.strategy.pending import PendingOffers
from shoal.swarm.strategy.ready_pool import ReadyPool
from shoal.swarm.trust.contents import Contents
from shoal.swarm.trust.encoding import OfferReader, ReadyOffer
from shoal.swarm.trust.ingress import IngressFilter, VerifiedMessage
from shoal.swarm.trust.rates import Recent
from shoal.swarm.trust.refusals import LIES, Reason
from shoal.swarm.wire.offer import Offer

LATE_REST: Mapping[Reason, float] = {Reason.HANGS: 150.0, Reason.TIMED_OUT: 30.0}
"""Rest used instead of `newcomer_rest` when scoring or drawing an offer hit its deadline. A hanging answer costs its
author nothing, and this node all of `SCORE_S`; a late draw may be this machine's fault."""
MOST_TAKEN = 1 << 17
"""Messages remembered as taken. The ingress filter refuses older messages."""
IDLE_S = 10.0
"""Seconds after which ready offers are looked through for stale ones although nothing arrived."""


MOST_COUNTED = 4096
"""Authors whose offers are counted for a round."""


class Rounds:
    """Rounds of a swarm: one is whole once `offers` more were read, with a bounded number of each author. Pure."""

    def __init__(self, offers: int, per_author: int) -> None:
        """An author counts with `per_author` offers per round, and with twice as many after a silent one."""
        self._offers, self._per_author = offers, per_author
        self._read, self._awaited = 0, offers
        self._left: Recent[str, int] = Recent(MOST_COUNTED)

    def read(self, author: str) -> None:
        """Counts an offer of an author, accepted or refused."""
        left = self._left.get(author, self._per_author)
        self._left[author] = max(0, left - 1)
        self._read += left > 0

    @property
    def whole(self) -> bool:
        """Whether all offers of the round were read."""
        return self._read >= self._awaited

    def short(self) -> None:
        """Ends a round with offers missing, so a lost group shortens one round and not all later ones."""
        self._awaited = min(self._awaited, self._read)

    def next(self) -> None:
        """Begins the next round."""
        self._awaited += self._offers
        for author, left in self._left.items():
            dict.__setitem__(self._left, author, min(left + self._per_author, 2 * self._per_author))


@dataclass(slots=True)
class Verification:
    """The way of an offer from the ingress filter to the ready pool. One event loop."""

    ingress: IngressFilter
    reader: OfferReader
    pool: ReadyPool
    rounds: Rounds
    contents: Contents
    rng: random.Random
    clock: Callable[[], float]
    """Unix time."""
    fresh_s: float
    newcomer_rest: float
    """Rest of newcomers after a newcomer's offer, relative to the time that the offer took."""
    on_lie: Callable[[], None]
    refuses_repeats: bool = True
    """Whether answers given before are refused."""
    pending: PendingOffers = field(default_factory=PendingOffers)
    taken: Recent[str, None] = field(default_factory=lambda: Recent(MOST_TAKEN))
    """Ids of messages that are or were ready, newest last; none is taken twice."""
    verified: asyncio.Event = field(default_factory=asyncio.Event)
    """Set after each verified or refused offer."""
    wanted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when an offer arrived or the pool has room again."""

    def receive(self, message: VerifiedMessage, offer: Offer) -> None:
        """Queues an offer for verification. Returns at once."""
        if message.id in self.taken or message.id in self.pending:
            self.ingress.refuse(message.peer_id, Reason.REPLAYED)  # a resumed run, or a forgotten author
            return
        for crowded_out in self.pending.add(message, offer, self.pool.is_newcomer):
            self.ingress.refuse(crowded_out, Reason.CROWDED)
            self.rounds.read(crowded_out)
        self.wanted.set()

    def drop_useless(self) -> None:
        """Drops ready offers that are too old or of banned peers."""
        for author in self.pool.drop(self.clock() - self.fresh_s, self.ingress.banned):
            self.ingress.refuse(author, Reason.STALE)

    async def run(self) -> None:
        """Verifies pending offers until enough are ready; never ends."""
        loop, newcomers_from_s = asyncio.get_running_loop(), -math.inf
        while True:
            self.drop_useless()
            rest_s = newcomers_from_s - loop.time()
            key = self.pending.next(self.pool.is_newcomer, rest_s <= 0, self.rng, self.pool.wants)
            if key is None:
                self.wanted.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(IDLE_S, rest_s) if rest_s > 0 else IDLE_S):
                        await self.wanted.wait()
                continue
            message, content = self.pending.remove(key)
            was_newcomer, began_s = self.ingress.is_newcomer(message.peer_id), loop.time()
            found = await self._read(message, content)
            took_s = loop.time() - began_s
            self._settle(message, found)
            if was_newcomer:
                rest = LATE_REST.get(found, self.newcomer_rest) if isinstance(found, Reason) else self.newcomer_rest
                newcomers_from_s = loop.time() + rest * took_s
            await asyncio.sleep(took_s)

    def _settle(self, message: VerifiedMessage, found: ReadyOffer | Reason) -> None:
        """Keeps an offer that can be trained on, and adds the result to its author's record."""
        if isinstance(found, Reason):
            self.ingress.refuse(message.peer_id, found)
            if found in LIES:
                self.on_lie()
        elif message.peer_id not in self.ingress.banned and message.id not in self.taken:
            self.taken[message.id] = None
            source, now_s = found.source, asyncio.get_running_loop().time()
            if self.contents.take(source.task, source.answers, message.peer_id, now_s):
                self.ingress.praise(message.peer_id, now_s)
            self.pool.add(found)
        self.rounds.read(message.peer_id)
        self.verified.set()

    async def _read(self, message: VerifiedMessage, content: Offer) -> ReadyOffer | Reason:
        if message.peer_id in self.ingress.banned:
            return Reason.BANNED
        if message.sent_s < self.clock() - self.fresh_s:
            return Reason.STALE
        read = await self.reader.read(content)
        if isinstance(read, Reason):
            return read
        source, refused = read
        if len(source.kept) < 2:
            return max(refused, key=refused.__getitem__, default=Reason.UNINFORMATIVE)
        self.ingress.refused.update(refused)
        since_s = asyncio.get_running_loop().time() - self.fresh_s
        if self.refuses_repeats and self.contents.repeats(source.task, source.answers, message.peer_id, since_s):
            return Reason.REPEATED
        rewards = await self.reader.score(source)
        if isinstance(rewards, Reason):
            return rewards
        if not differ([reward.value for reward in rewards]):
            return Reason.UNINFORMATIVE
        return ReadyOffer(message, source, rewards)
