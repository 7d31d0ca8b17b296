"""A node shares groups of its training run with a swarm, and takes groups of peers.

    listen   consumes frames of the exchange; the ingress filter admits them; fills `pending`
    verify   consumes `pending`: matches an own task, encodes the text, scores the answers; fills the pool
    share    consumes own groups chosen for sharing; waits for the exchange; drops the oldest while it is away
    report   writes known.txt and status.json

The training run waits for groups only as long as `swarm.wait_s` says, not at all by default. Ready offers are chosen at
once, and only their logprobs under the node's own weights remain to be computed.

Each loop is bounded in memory and time. `listen` reads `INTAKE_PER_S` frames a second at most. An offer counts with at
most as many answers as own groups have, so an external group costs a step no more than an own one. Neither bad data
from peers nor a lost connection ends a run.
"""

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import fmean

from shoal.errors import WireError
from shoal.interfaces import Logprobs, Renderer, Scorer
from shoal.swarm.peer import BANNED_FILE, KNOWN_FILE, Joined, NodeCounts, Peer, ban_in, read_lines
from shoal.swarm.strategy.choice import sharer_of, taker_of
from shoal.swarm.strategy.ready_pool import ReadyPool
from shoal.swarm.strategy.sharing import Outbox
from shoal.swarm.trust.contents import Contents
from shoal.swarm.trust.encoding import OfferReader, ReadyOffer, limits_of, rollouts_of
from shoal.swarm.trust.ingress import VerifiedMessage
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.verification import Rounds, Verification
from shoal.swarm.wire.invitation import known_peers
from shoal.swarm.wire.offer import Offer
from shoal.types import Group, Origin, seed_for

NEWCOMER_REST = 4.0
"""Rest of newcomers after a newcomer's offer, relative to its time: a crowd of liars takes a fifth of the time.

None with `take = "uniform"`, which knows no newcomers."""
READY_PER_GROUP = 8
"""Verified offers per group that a step wants: enough to choose from, few enough to be fresh."""
STATUS_PEERS = 256
"""Peers in the status: the most taken."""


class Node(Peer):
    """Peer that shares and takes groups. One event loop."""

    report_every_s = 10.0

    def __init__(
        self,
        joined: Joined,
        scorer: Scorer,
        renderer: Renderer,
        max_model_len: int,
        *,
        threads: bool = True,
        known: Callable[[], AbstractContextManager[Iterable[Group]]] = lambda: nullcontext(()),
    ) -> None:
        """Raises `ConfigError`.

        `known` opens the groups of this run's earlier process: the exchange sends its kept frames again, and strangers
        may copy own groups. Without `threads` long texts are encoded on the event loop: a virtual clock knows nothing
        of threads.
        """
        super().__init__(joined)
        config, settings = joined.config, joined.config.swarm
        self.tally: NodeCounts = NodeCounts()
        self.settings = settings
        rng, uniform = random.Random(seed_for("swarm", config.seed, self.peer_id)), settings.take == "uniform"
        self._outbox = Outbox(joined.own, sharer_of(settings.share), Path(config.model.path).name or "model")
        self._taker = taker_of(settings.take)
        self.verification = Verification(
            self.ingress,
            OfferReader(joined.own, scorer, renderer, limits_of(config, max_model_len), rng, threads),
            ReadyPool(
                max(READY_PER_GROUP * settings.external_groups, settings.round_offers),
                lambda peer_id: not uniform and self.ingress.is_newcomer(peer_id),  # SAPO's taker knows none
            ),
            Rounds(settings.round_offers, config.train.groups_per_step),
            Contents(),
            rng,
            self._clock,
            self.fresh_s,
            0.0 if uniform else NEWCOMER_REST,
            self._write_bans,
            refuses_repeats=not uniform,  # SAPO leaves out groups without an advantage, and no others
        )
        self._known = known
        self._before = self._totals()
        for peer_id in (*known_peers(), *self.remembered(KNOWN_FILE).split()):
            self.ingress.vouch(peer_id)

    async def _verify(self) -> None:
        """Verifies offers once the known groups are remembered: thousands take minutes, and half of the loop's time."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        with self._known() as groups:
            for group in groups:
                self.verification.contents.remember(group)
                if group.origin is not None:
                    self.verification.taken[group.origin.message_id] = None
                await asyncio.sleep(loop.time() - began_s)
                began_s = loop.time()
        await self.verification.run()

    def offer(self, group: Group) -> None:
        """Takes a finished own group, which may be shared. Returns at once."""
        self.verification.contents.remember(group)
        self.tally.unsent += self._outbox.put(group, self._clock())

    async def take(self, version: int, logprobs: Logprobs) -> list[Group]:
        """Encodes chosen offers as groups under the weights being trained; `version` is their newest Version."""
        if self.settings.wait_s:
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
        self.verification.drop_useless()
        return len(self.verification.pool)

    def _totals(self) -> dict[str, int]:
        return {
            "external_missing": self.tally.missing,
            "offers_shared": self.tally.shared,
            "offers_admitted": self.ingress.admitted,
            "offers_refused": self.ingress.refused.total() - self.ingress.refused[Reason.OWN],
        }

    def status(self) -> dict[str, object]:
        """State shown by `shoal swarm status`."""
        uses = self.verification.pool.uses
        peers = {
            peer_id: {
                "trust": round(self.ingress.trust(peer_id), 3),
                "newcomer": author.newcomer,
                "taken": uses.get(peer_id, 0),
                "gaps": author.gaps,
            }
            for peer_id, author in sorted(
                self.ingress.peers.items(),
                key=lambda one: (uses.get(one[0], 0), one[1].good),
                reverse=True,
            )[:STATUS_PEERS]
        }
        return {
            **super().status(),
            "admitted": self.ingress.admitted,
            "pending": len(self.verification.pending),
            "ready": self.ready,
            "known_peers": len(self.ingress.peers),
            "peers": peers,
        }

    async def run(self) -> None:
        """Listens, verifies and shares until cancelled."""
        await self.beside(verifying=self._verify(), sharing=self._share())

    def _receive(self, message: VerifiedMessage, offer: Offer) -> None:
        if self.settings.external_groups:  # else this node only gives
            self.verification.receive(message, offer)

    def _write_bans(self) -> None:
        with self._file(BANNED_FILE):
            written = set(read_lines(self._folder / BANNED_FILE))
            ban_in(self._folder, sorted(self.ingress.lasting_bans - written))

    async def _enough(self) -> None:
        """Waits until a step has the offers that it wants, for `swarm.wait_s` at most.

        With rounds these are all offers of the round, without as many ready ones as a step wants.
        """
        wanted, rounds = self.settings.external_groups, self.verification.rounds
        try:
            async with asyncio.timeout(self.settings.wait_s):
                while not (rounds.whole if self.settings.round_offers else self.ready >= wanted):
                    self.verification.verified.clear()
                    await self.verification.verified.wait()
        except TimeoutError:
            rounds.short()

    def _choose(self) -> list[ReadyOffer]:
        """Chooses a step's offers by the taker; those used up leave the pool."""
        wanted, verification = self.settings.external_groups, self.verification
        verification.drop_useless()
        reuse = 0 if self.settings.round_offers else self.settings.reuse
        chosen = verification.pool.choose(
            self._taker, wanted, verification.rng, self.ingress.trust, now_s=self._clock(), reuse=reuse
        )
        verification.rounds.next()
        verification.wanted.set()
        self.tally.missing += wanted - len(chosen)
        return chosen

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
        """Writes down who is established."""
        if established := self.ingress.established:
            self.remember(KNOWN_FILE, "\n".join(established))
