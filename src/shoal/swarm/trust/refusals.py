"""Reasons for which a node refuses what peers send, and what each says of its author."""

from enum import StrEnum


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
    """The question is one of this node's held-out questions."""
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


LIES = frozenset({Reason.WRONG_QUESTION, Reason.WRONG_TRUTH})
"""Reasons proven by the author's own signature; each bans at once."""
BLAMED = frozenset({Reason.BAD_BODY, Reason.NOT_DRAWN, Reason.OTHER_LIBRARIES, Reason.HANGS, Reason.TIMED_OUT})
"""Reasons held against the author: an honest node sends such offers seldom or never."""
STANDING_KEPT = {Reason.HANGS: 0.5, Reason.TIMED_OUT: 0.8, Reason.OTHER_LIBRARIES: 0.5}
"""Share of the good evidence that an author keeps after an offer that is costly to refuse. An author of long standing
is a newcomer again after three hanging answers in a row, and after eight receipts that were not drawn in time."""
