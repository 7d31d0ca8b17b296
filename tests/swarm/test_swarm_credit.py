"""What foreign answers are reinforced with."""

from dataclasses import fields

from shoal import wire
from shoal.swarm.strategy.choice import external_rows
from shoal.swarm.wire.offer import OfferedRollout, OfferedTurn
from shoal.types import Sample


def row(advantage: float) -> Sample:
    return Sample((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, advantage, advantage))


def test_negative_advantages_of_peers_are_kept_or_dropped() -> None:
    both = [row(0.5), row(-0.5)]
    assert external_rows(both, "group") == (row(0.5), row(-0.5))
    assert external_rows(both, "group_drop") == (row(0.5), row(0.0))


def test_nothing_that_an_offer_claims_beside_its_texts_reaches_what_is_trained() -> None:
    """The size of a gradient comes of the node's own rewards, logprobs and means."""
    assert {field.name for field in fields(OfferedRollout)} == {"text", "complete", "turns"}
    said = {"role", "content", "tool_calls", "tool_call_id", "sampled", "complete"}
    assert {field.name for field in fields(OfferedTurn)} == said
    claimed = wire.encode({"text": "a", "logprob": -1e30, "advantage": 9.0})
    assert wire.decode(claimed, OfferedRollout) == OfferedRollout("a")
