"""Questions that nobody chose once it was known who would ask, and that everybody can draw again afterwards. Pure.

Before a sitting the judge publishes the hash of a random seed, and afterwards the seed. Which questions a challenge has
is a function of the seed and of who asks for it, how often: the judge cannot pick them, the taker cannot foresee them
and cannot use another's answers. They are held-out questions: no node trains on them by accident.
"""

import hashlib
import hmac

from shoal.types import seed_for

SEED_BYTES = 32


def commitment_of(seed: bytes) -> bytes:
    """What is published before the sitting: 32 bytes, from which a random seed of 32 bytes cannot be found."""
    if len(seed) != SEED_BYTES:
        raise ValueError(f"seed: expected {SEED_BYTES} bytes, got {len(seed)}")
    return hashlib.blake2b(seed, digest_size=32, person=b"shoal-commit").digest()


def opens(seed: bytes, commitment: bytes) -> bool:
    """Whether a seed is the one that was committed to."""
    return len(seed) == SEED_BYTES and hmac.compare_digest(commitment_of(seed), commitment)


def question_index(seed: bytes, peer_id: str, model: str, attempt: int, dataset: str, position: int) -> int:
    """Index, among the held-out questions of a dataset, of the one at a position of a challenge.

    `attempt` counts the challenges of this peer and model in this sitting, from 0.
    """
    return seed_for("judge", seed.hex(), peer_id, model, attempt, dataset, position)
