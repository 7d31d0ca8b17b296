"""What foreign answers are reinforced with."""

import math
from dataclasses import fields

import pytest

from chat_templates import ANSWERING, renderer_of
from shoal import wire
from shoal.swarm.strategy.choice import LIKELY, external_rows
from shoal.swarm.trust.encoding import encode_offer
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.offer import AskedFor, Course, OfferedRollout, OfferedTurn
from shoal.types import Message, Role, Sample, Task


def row(advantage: float) -> Sample:
    return Sample((1, 2, 3), (0, 1, 1), (0.0, -1.0, -1.0), (-1, 0, 0), (0.0, advantage, advantage))


def test_negative_advantages_of_peers_are_kept_or_dropped() -> None:
    both = [row(0.5), row(-0.5)]
    assert external_rows(both, "group") == (row(0.5), row(-0.5))
    likely = [one.advantages[-1] for one in external_rows(both, "group_likely")]
    assert likely == pytest.approx([0.5 * math.exp(-1) / LIKELY, 0.0])


def test_nothing_that_an_offer_claims_beside_its_texts_reaches_what_is_trained() -> None:
    """The size of a gradient comes of the node's own rewards, logprobs and means."""
    assert {field.name for field in fields(OfferedRollout)} == {"text", "complete", "turns"}
    said = {"role", "content", "tool_calls", "tool_call_id", "sampled", "complete"}
    assert {field.name for field in fields(OfferedTurn)} == said
    claimed = wire.encode({"text": "a", "logprob": -1e30, "advantage": 9.0})
    assert wire.decode(claimed, OfferedRollout) == OfferedRollout("a")


@pytest.mark.parametrize("conversation", [False, True])
@pytest.mark.parametrize("text", ["4", "four", "", "and " * 9])
def test_the_end_of_an_answer_is_decided_by_its_room_and_not_by_what_its_author_says(
    text: str, conversation: bool
) -> None:
    renderer, task = renderer_of(ANSWERING["qwen3"]), Task("t", "s", (Message(Role.USER, "2 + 2"),))
    course = Course((AskedFor(task.messages),)) if conversation else Course()
    long = len(renderer.completion_ids(text, renderer.prompt_ids(task.messages)) or ())
    for room in (max(long, 1), long + 1, long + 9):
        trained = []
        for complete in (True, False):
            turns = (OfferedTurn(Role.ASSISTANT, text, sampled=True, complete=complete),) if conversation else ()
            rollout = OfferedRollout("" if conversation else text, complete, turns)
            encoded, refused = encode_offer([(rollout, course)], task, renderer, 512, room)
            assert not refused
            trained.append(encoded.kept[0].turns)
        assert trained[0] == trained[1]
        ids = trained[0][-1].completion.token_ids
        assert (ids[-1:] == renderer.stop_token_ids[:1]) == (len(ids) == long + 1) == (room > long)


@pytest.mark.parametrize("conversation", [False, True])
@pytest.mark.parametrize(("row", "answer"), [(512, 8), (64, 512), (512, 512)])
def test_what_is_longer_than_an_own_answer_or_row_is_refused(conversation: bool, row: int, answer: int) -> None:
    renderer, task = renderer_of(ANSWERING["qwen3"]), Task("t", "s", (Message(Role.USER, "2 + 2"),))
    course = Course((AskedFor(task.messages),)) if conversation else Course()
    for text in ("4", "and " * 60, "and " * 200):
        turns = (OfferedTurn(Role.ASSISTANT, text, sampled=True),) if conversation else ()
        rollout = OfferedRollout("" if conversation else text, True, turns)
        encoded, refused = encode_offer([(rollout, course)], task, renderer, row, answer)
        (whole,) = encode_offer([(rollout, course)], task, renderer, 10_000, 10_000)[0].kept
        fits = len(whole.rows[0]) <= row and len(whole.turns[0].completion.token_ids) - 1 <= answer
        assert (len(encoded.kept), refused[Reason.TOO_LONG]) == (fits, not fits)
