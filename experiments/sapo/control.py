"""A node of a control: the parts of `shoal train`, one of them another. Arguments: configuration, control.

same       all nodes of a seed have the questions of its first node
shuffled   a peer's answers come with another peer's question; the node reads, scores and takes them so
chance     each question is of a specialty drawn by chance, as in the paper, and not in turn
"""

import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from shoal import wire
from shoal.config import Config, load
from shoal.net.identity import Identity
from shoal.net.process import die_with_parent
from shoal.run.blocking import run_blocking
from shoal.run.join_swarm import FOLDER
from shoal.run.prepare import Prepared, prepare
from shoal.run.training import train
from shoal.swarm.wire.envelope import Envelope, Signer, opened, payload_of
from shoal.swarm.wire.invitation import NatsOptions
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Offer

NODES_PER_SEED = 1000
"""Node i of seed s has the seed s * 1000 + i."""


class Misfits(NatsExchange):
    """An exchange that swaps the answers of each two offers of peers that come one after the other.

    Questions, truths and receipts stay as they are, so nothing is refused for them. As no author has signed the swapped
    offers, a key of this exchange stands in for that of each author.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(NatsOptions(config.swarm.servers, config.swarm.name))
        self._own = Identity.load(Path(config.run_dir) / FOLDER / "identity.pem").peer_id
        self._signers: dict[str, Signer] = {}
        self._held: list[Envelope] = []

    async def receive(self, most: int) -> list[bytes]:
        """Waits for frames and gives up to `most`, or one more; none while the first of two offers waits."""
        return [changed for frame in await super().receive(most) for changed in self._swapped(frame)]

    async def receive_from(self, authors: frozenset[str], most: int) -> list[bytes]:
        """Waits a moment and gives none: `receive` gives all."""
        return await super().receive_from(frozenset(), most)

    def _swapped(self, frame: bytes) -> list[bytes]:
        envelope = opened(frame)
        if envelope.peer_id == self._own:
            return [frame]
        self._held.append(envelope)
        if len(self._held) < 2:
            return []
        held, self._held = self._held, []
        first, second = (wire.decode(payload_of(one), Offer) for one in held)
        offers = replace(first, rollouts=second.rollouts), replace(second, rollouts=first.rollouts)
        return [self._signed(one, offer) for one, offer in zip(held, offers, strict=True)]

    def _signed(self, envelope: Envelope, offer: Offer) -> bytes:
        author = envelope.peer_id
        if author not in self._signers:
            self._signers[author] = Signer(Identity.fresh(), envelope.swarm, envelope.session)
        return self._signers[author].frame(wire.encode(offer), envelope.sent_s)


def main() -> None:
    """Trains the node to its end."""
    die_with_parent()
    path, control = sys.argv[1:]
    config = load(Path(path))
    first = config.seed - config.seed % NODES_PER_SEED
    asked = config.model_copy(update={"seed": first}) if control == "same" else config
    with prepare(asked) as prepared:
        run_blocking(trained(replace(prepared, config=config), shuffled=control == "shuffled"))


async def trained(prepared: Prepared, *, shuffled: bool) -> None:
    """Trains the node, with its own exchange if peers' answers are to be shuffled."""
    async with AsyncExitStack() as stack:
        exchange = await stack.enter_async_context(Misfits(prepared.config)) if shuffled else None
        await train(prepared, exchange=exchange)


if __name__ == "__main__":
    main()
