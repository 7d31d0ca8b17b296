"""A commitment fixes questions before anybody asks for them, and everybody can draw them afterwards. Pure.

Before a round the judge publishes the hash of a random seed, and afterwards the seed. The questions of a challenge
follow from the seed, the taker and the attempt. The judge cannot pick them, and the taker can neither foresee them nor
use another's answers. Questions are held out, so no node trains on them by accident.
"""

import hashlib
import hmac

from shoal.types import seed_for

SEED_BYTES = 32


def commitment_of(seed: bytes) -> bytes:
    """Hash of a seed, 32 bytes, from which a random seed of 32 bytes cannot be found."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"seed: expected {SEED_BYTES} bytes, got {len(seed)}")
    return hashlib.blake2b(seed, digest_size=32, person=b"shoal-commit").digest()


def opens(seed: bytes, commitment: bytes) -> bool:
    """Tells whether a seed belongs to a commitment."""
    return len(seed) == SEED_BYTES and hmac.compare_digest(commitment_of(seed), commitment)


def question_index(seed: bytes, peer_id: str, model: str, attempt: int, dataset: str, position: int) -> int:
    """Index of a challenge's question among the held-out questions of its dataset.

    `attempt` counts the challenges of this peer and model in this round, from 0.
    """
    return seed_for("judge", seed.hex(), peer_id, model, attempt, dataset, position)
