"""A node shares groups of its training run with a swarm, and takes groups of peers.

    listen   consumes frames of the exchange; the ingress filter admits them; fills `pending`
    verify   consumes `pending`: matches an own task, encodes the text, scores the answers; fills `ready`
    share    consumes own groups chosen for sharing; waits for the exchange; drops the oldest while it is away
    report   sends this node's wants now and then, and writes status.json

The training run waits for groups only as long as `swarm.wait_s` says, not at all by default. Ready offers are chosen at
once, and only their logprobs under the node's own weights remain to be computed.

Each loop is bounded in memory and time. `listen` reads `INTAKE_PER_S` frames a second at most. `verify` rests as long
as it works, and newcomers wait longer for their next turn. Answers taken before are not taken again. An offer counts
with at most as many answers as own groups have, so an external group costs a step no more than an own one. Neither bad
data from peers nor a lost connection ends a run.
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from shoal import wire
from shoal.errors import WireError
from shoal.interfaces import Logprobs, Renderer, Scorer
from shoal.swarm.contents import Contents
from shoal.swarm.encoding import ReadyOffer, rollouts_of
from shoal.swarm.envelope import Kind
from shoal.swarm.offer import MAX_WANTED, Offer, Want
from shoal.swarm.offer_reading import OfferReader, limits_of
from shoal.swarm.peer import BANNED_FILE, RETRY_S, Joined, NodeCounts, Peer, ban_in, read_lines
from shoal.swarm.pending import PendingOffers
from shoal.swarm.rates import Recent
from shoal.swarm.ready_pool import ReadyPool
from shoal.swarm.refusals import LIES, Reason
from shoal.swarm.rounds import Rounds
from shoal.swarm.sharing import Outbox
from shoal.swarm.strategy import Candidate, differ, sharer_of, taker_of
from shoal.swarm.trust import VerifiedMessage
from shoal.types import Group, Origin, seed_for

NEWCOMER_REST = 4.0
"""Rest of newcomers after a newcomer's offer, relative to its time: a crowd of liars takes a fifth of the time.

None with `take = "uniform"`, which knows no newcomers."""
LATE_REST: Mapping[Reason, float] = {Reason.HANGS: 150.0, Reason.TIMED_OUT: 30.0}
"""Rest used instead of `NEWCOMER_REST` when scoring or drawing an offer hit its deadline. A hanging answer costs its
author nothing, and this node all of `SCORE_S`; a late draw may be this machine's fault."""
MOST_TAKEN = 1 << 17
"""Messages remembered as taken. The ingress filter refuses older messages."""
KNOWN_FILE = "known.txt"
"""File in a node's folder with the established peers, for its next process; people may add to it in between."""
READY_PER_GROUP = 8
"""Verified offers per group that a step wants: enough to choose from, few enough to be fresh."""
NEED_DECAY = 0.95
"""Weight of the past in a task's mean reward, per own group."""
STATUS_PEERS = 256
"""Peers in the status: the most taken."""


class Node(Peer):
    """Peer that shares and takes groups; implements `interfaces.Swarm`. One event loop."""

    report_every_s = 10.0

    def __init__(
        self,
        joined: Joined,
        scorer: Scorer,
        renderer: Renderer,
        max_model_len: int,
        *,
        threads: bool = True,
        trained: Sequence[Group] = (),
    ) -> None:
        """Raises `ConfigError`.

        `trained` lists external groups of this run's earlier process: the exchange sends its kept frames again. Without
        `threads` long texts are encoded on the event loop: a virtual clock knows nothing of threads.
        """
        super().__init__(joined)
        config, settings = joined.config, joined.config.swarm
        self.tally: NodeCounts = NodeCounts()
        self._settings = settings
        self._newcomer_rest = 0.0 if settings.take == "uniform" else NEWCOMER_REST
        self._rng = random.Random(seed_for("swarm", config.seed, self.peer_id))
        self._reader = OfferReader(joined.own, scorer, renderer, limits_of(config, max_model_len), self._rng, threads)
        model = Path(config.model.path).name or "model"
        self._outbox = Outbox(joined.own, sharer_of(settings.share), model)
        self._taker = taker_of(settings.take)
        self._pending = PendingOffers()
        self._newcomers_from_s = -math.inf  # of the loop's time: when it is newcomers' turn again
        self._pool = ReadyPool(
            max(READY_PER_GROUP * settings.external_groups, settings.round_offers), self._is_newcomer
        )
        self._taken: Recent[str, None] = Recent(MOST_TAKEN)
        """Ids of messages that are or were ready, newest last; none is taken twice."""
        self._taken.update((group.origin.message_id, None) for group in trained if group.origin)
        self._contents = Contents(trained)
        self._rewards: dict[str, float] = {}  # mean of each task, over this node's groups
        self._rounds = Rounds(settings.round_offers, config.train.groups_per_step)
        self._work, self._arrived = asyncio.Event(), asyncio.Event()
        self._before = self._totals()
        for peer_id in self.remembered(KNOWN_FILE).split():
            self.ingress.vouch(peer_id)

    def offer(self, group: Group) -> None:
        """Takes a finished own group, which may be shared. Returns at once."""
        service, rewards = group.task.service, [rollout.reward.value for rollout in group.finished]
        if rewards:
            mean = fmean(rewards)
            self._rewards[service] = NEED_DECAY * self._rewards.get(service, mean) + (1 - NEED_DECAY) * mean
        self._contents.own(group)
        self.tally.unsent += self._outbox.put(group, self._wanted(), self._clock())

    async def take(self, version: int, logprobs: Logprobs) -> list[Group]:
        """Encodes chosen offers as groups under the weights being trained; `version` is their newest Version."""
        if self._settings.wait_s:
            await self._enough()
        chosen = self._choose()
        if not chosen:
            return []
        own = iter(await logprobs([row for one in chosen for row in one.source.rows]))
        groups = []
        for ready in chosen:
            message, source = ready.message, ready.source
            rollouts = rollouts_of(source, ready.rewards, own, version)
            origin = Origin(message.peer_id, message.id)
            groups.append(Group(f"{message.id}/{ready.uses}", source.task, rollouts, version, origin))
        self.tally.taken += len(groups)
        return groups

    def stepped(self, external: Sequence[Group]) -> dict[str, float]:
        """Records a step and returns its metrics."""
        before, self._before = self._before, self._totals()
        rewards = [rollout.reward.value for group in external for rollout in group.finished]
        return {
            "external": len(external),
            **({"reward_external": fmean(rewards)} if rewards else {}),
            **{name: count - before[name] for name, count in self._before.items()},
            "peers": len(self.ingress.peers),
        }

    @property
    def ready(self) -> int:
        """Number of verified offers that are ready."""
        self._drop_useless()
        return len(self._pool)

    def _is_newcomer(self, peer_id: str) -> bool:
        """Whether an author counts as a newcomer; SAPO's uniform taker knows none."""
        return self._settings.take != "uniform" and self.ingress.is_newcomer(peer_id)

    def _totals(self) -> dict[str, int]:
        return {
            "external_missing": self.tally.missing,
            "offers_shared": self.tally.shared,
            "offers_admitted": self.ingress.admitted,
            "offers_refused": self.ingress.refused.total() - self.ingress.refused[Reason.OWN],
        }

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        peers = {
            peer_id: {
                "trust": round(self.ingress.trust(peer_id), 3),
                "newcomer": author.newcomer,
                "taken": self._pool.uses.get(peer_id, 0),
                "gaps": author.gaps,
            }
            for peer_id, author in sorted(
                self.ingress.peers.items(),
                key=lambda one: (self._pool.uses.get(one[0], 0), one[1].good),
                reverse=True,
            )[:STATUS_PEERS]
        }
        return {
            **super().status(),
            "admitted": self.ingress.admitted,
            "pending": len(self._pending),
            "ready": self.ready,
            "known_peers": len(self.ingress.peers),
            "peers": peers,
        }

    async def run(self) -> None:
        """Listens, verifies and shares until cancelled."""
        await self.beside(verifying=self._verify(), sharing=self._share())

    def _receive(self, message: VerifiedMessage, offer: Offer) -> None:
        if not self._settings.external_groups:
            return  # this node only gives
        if message.id in self._taken or message.id in self._pending:
            self.ingress.refuse(message.peer_id, Reason.REPLAYED)  # a resumed run, or a forgotten author
            return
        for crowded_out in self._pending.add(message, offer, self._is_newcomer):
            self.ingress.refuse(crowded_out, Reason.CROWDED)
            self._rounds.read(crowded_out)
        self._work.set()

    async def _verify(self) -> None:
        """Verifies pending offers until enough are ready."""
        loop = asyncio.get_running_loop()
        while True:
            self._drop_useless()
            rest_s = self._newcomers_from_s - loop.time()
            key = self._pending.next(self._is_newcomer, rest_s <= 0, self._rng, self._pool.wants)
            if key is None:
                self._work.clear()
                wait_s = min(self.report_every_s, rest_s) if rest_s > 0 else self.report_every_s
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(wait_s):
                        await self._work.wait()
                continue
            message, content = self._pending.remove(key)
            was_newcomer, began_s = self.ingress.is_newcomer(message.peer_id), loop.time()
            found = await self._verify_offer(message, content)
            took_s = loop.time() - began_s
            self._settle(message, found)
            if was_newcomer:
                rest = LATE_REST.get(found, self._newcomer_rest) if isinstance(found, Reason) else self._newcomer_rest
                self._newcomers_from_s = loop.time() + rest * took_s
            await asyncio.sleep(took_s)

    def _settle(self, message: VerifiedMessage, found: ReadyOffer | Reason) -> None:
        """Keeps an offer that can be trained on, and adds the result to its author's record."""
        if isinstance(found, Reason):
            self.ingress.refuse(message.peer_id, found)
            if found in LIES:
                with self._file(BANNED_FILE):
                    written = set(read_lines(self._folder / BANNED_FILE))
                    ban_in(self._folder, sorted(self.ingress.lasting_bans - written))
        elif message.peer_id not in self.ingress.banned and message.id not in self._taken:
            self._taken[message.id] = None
            source, now_s = found.source, asyncio.get_running_loop().time()
            if self._contents.take(source.task, source.answers, message.peer_id, now_s):
                self.ingress.praise(message.peer_id, now_s)
            self._pool.add(found)
        self._rounds.read(message.peer_id)
        self._arrived.set()

    async def _verify_offer(self, message: VerifiedMessage, content: Offer) -> ReadyOffer | Reason:
        """Checks in order of cost; what is read and scored is this node's own account of the offer."""
        if message.peer_id in self.ingress.banned:
            return Reason.BANNED
        if message.sent_s < self._clock() - self.fresh_s:
            return Reason.STALE
        read = await self._reader.read(content)
        if isinstance(read, Reason):
            return read
        source, refused = read
        if len(source.kept) < 2:
            return max(refused, key=refused.__getitem__, default=Reason.UNINFORMATIVE)
        self.ingress.refused.update(refused)
        since_s = asyncio.get_running_loop().time() - self.fresh_s
        if self._contents.repeats(source.task, source.answers, message.peer_id, since_s):
            return Reason.REPEATED
        rewards = await self._reader.score(source)
        if isinstance(rewards, Reason):
            return rewards
        if not differ([reward.value for reward in rewards]):
            return Reason.UNINFORMATIVE
        return ReadyOffer(message, source, rewards)

    async def _enough(self) -> None:
        """Waits until a step has the offers that it wants, for `swarm.wait_s` at most."""
        try:
            async with asyncio.timeout(self._settings.wait_s):
                while not self._is_whole():
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            self._rounds.short()

    def _is_whole(self) -> bool:
        """Whether all offers of the round were read; without rounds, whether as many are ready as a step wants."""
        if self._settings.round_offers:
            return self._rounds.whole
        return self.ready >= self._settings.external_groups

    def _choose(self) -> list[ReadyOffer]:
        """Chooses a step's offers by the taker; those used up leave the pool."""
        wanted = self._settings.external_groups
        self._drop_useless()
        chosen = self._pool.choose(self._taker, wanted, self._rng, self._candidate)
        self._rounds.next()
        once = self._settings.round_offers > 0
        self._pool.offers = [one for one in self._pool.offers if not once and one.uses < self._settings.reuse]
        self._work.set()
        self.tally.missing += wanted - len(chosen)
        return chosen

    def _candidate(self, ready: ReadyOffer) -> Candidate:
        peer_id = ready.message.peer_id
        return Candidate(
            peer_id=peer_id,
            service=ready.source.task.service,
            rewards=tuple(reward.value for reward in ready.rewards),
            age_s=max(0.0, self._clock() - ready.message.sent_s),
            uses=ready.uses,
            author_uses=self._pool.uses.get(peer_id, 0),
            trust=self.ingress.trust(peer_id),
            newcomer=self.ingress.is_newcomer(peer_id),
        )

    def _drop_useless(self) -> None:
        """Drops ready offers that are too old or of banned peers."""
        for author in self._pool.drop(self._clock() - self.fresh_s, self.ingress.banned):
            self.ingress.refuse(author, Reason.STALE)

    async def _share(self) -> None:
        while True:
            offer = await self._outbox.next()
            try:
                if offer is None:
                    self.tally.unsent += 1
                else:
                    await self._share_offer(offer)
            except WireError:
                self.tally.unsent += 1

    async def _periodic(self) -> None:
        """Sends this node's wants, and writes down who is established."""
        if established := self.ingress.established:
            self.remember(KNOWN_FILE, "\n".join(established))
        needs = tuple((name, round(min(max(1 - mean, 0.0), 1.0), 3)) for name, mean in self._rewards.items())
        if needs and self.connected:
            want = wire.encode(Want(needs[:MAX_WANTED]))
            await self._send(Kind.WANT, want, self._clock() + RETRY_S)
