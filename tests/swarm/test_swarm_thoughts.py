"""A thought travels between nodes of different templates, and stays a thought."""

import pytest

from chat_templates import ANSWERING, renderer_of
from shoal.model.answer import parted
from shoal.swarm.trust.encoding import encode_offer
from shoal.swarm.wire.offer import Claim, Course, Offer, offer_of
from shoal.types import Completion, FinishReason, Group, Message, Reward, Role, Rollout, Task, Turn

TASK = Task("t", "sums", (Message(Role.USER, "3 + 4?"),), "7")
DRAWN = {
    "qwen3": "<think>\n3, then 4\n</think>\n\n7",
    "deepseek-r1": "3, then 4\n</think>\n\n7",
    "gpt-oss": "<|channel|>analysis<|message|>3, then 4<|end|><|start|>assistant<|channel|>final<|message|>7",
}


def offered(author: str) -> Offer:
    """What a node with the author's template shares of one answer."""
    made = renderer_of(ANSWERING[author])
    prompt_ids = tuple(made.prompt_ids(TASK.messages))
    ids = (*made.token_ids(DRAWN[author]), made.stop_token_ids[0])
    completion = Completion(ids, (-1.0,) * len(ids), (0,) * len(ids), FinishReason.STOP)
    messages = (*TASK.messages, made.message(ids, prompt_ids))
    group = Group("g", TASK, (Rollout("r", messages, (Turn(prompt_ids, completion),), Reward(1.0)),), 0)
    claim = Claim("sums", "3 + 4?", "7")
    return offer_of(group, claim, "m", 1.0)


@pytest.mark.parametrize("author", DRAWN)
@pytest.mark.parametrize("taker", ANSWERING)
def test_a_thought_is_rendered_with_the_marks_of_whoever_takes_it(author: str, taker: str) -> None:
    offer = offered(author)
    assert [parted(one.text).thought for one in offer.rollouts] == ["3, then 4"]
    rollouts = [(one, Course()) for one in offer.rollouts]
    source, refused = encode_offer(rollouts, TASK, made := renderer_of(ANSWERING[taker]), 1024, 1024)
    assert not refused
    (turn,) = source.kept[0].turns
    said = made.message(turn.completion.token_ids, turn.rendered_ids)
    if taker in DRAWN or taker == "magistral":
        assert (said.reasoning, said.content) == ("3, then 4", "7")
    else:  # its template knows no thoughts: they are text
        assert said.content == "<think>\n3, then 4\n</think>\n\n7"
    if taker in DRAWN:
        assert turn.completion.token_ids == (*made.token_ids(DRAWN[taker]), made.stop_token_ids[0])
