"""A listing shows people the offers of a swarm."""

import asyncio
import time
from collections.abc import Sequence

from shoal.errors import ExchangeUnavailable
from shoal.swarm.trust.ingress import IngressFilter, TrustLimits, VerifiedMessage
from shoal.swarm.wire.nats import NatsExchange
from shoal.swarm.wire.offer import Offer
from shoal.swarm.wire.options import NatsOptions

UNLIMITED = 1e9


async def listed(
    servers: Sequence[str], swarm: str, seconds: float
) -> tuple[list[dict[str, str | int | float]], dict[str, int]]:
    """Lists the offers received within some seconds, oldest first, and counts the refused frames by reason.

    Raises `ExchangeUnavailable` when no server was reached meanwhile.
    """
    limits = TrustLimits(burst=UNLIMITED, newcomers_burst=UNLIMITED, author_burst_s=UNLIMITED)
    ingress, found = IngressFilter(swarm, "", limits), list[dict[str, str | int | float]]()
    async with NatsExchange(NatsOptions(servers, swarm)) as exchange:
        try:
            async with asyncio.timeout(seconds):
                while True:
                    for frame in await exchange.receive(256):
                        message = ingress.admit(frame, time.time())
                        if isinstance(message, VerifiedMessage):
                            found.append(_line(message, message.content))
        except TimeoutError:
            if not exchange.connections:
                why = exchange.failure or f"no answer within {seconds:g} s"
                raise ExchangeUnavailable(f"none of the swarm's servers could be reached: {why}") from None
    return found, {reason.value: count for reason, count in ingress.refused.items()}


def _line(message: VerifiedMessage, content: Offer) -> dict[str, str | int | float]:
    return {
        "id": message.id,
        "peer": message.peer_id,
        "sent_s": message.sent_s,
        "service": content.claim.service,
        "question": content.claim.question[:200],
        "rollouts": len(content.rollouts),
        "generator": content.generator.value,
        "model": content.model,
    }
