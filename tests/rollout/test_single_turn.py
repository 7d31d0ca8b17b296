"""One turn's requests: what they ask of the engine, first and again."""

from dataclasses import dataclass, field

import pytest

from shoal.clock import run_virtual
from shoal.errors import EngineUnavailable
from shoal.interfaces import Purpose
from shoal.rollout.single_turn import RETRIES, SingleTurn, priority_of, sampled_for
from shoal.types import Completion, FinishReason, Message, Role, Sampling, Task

ASKED = Sampling(4, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, stop_token_ids=(2,), seed=5)
TASK = Task("t", "chain_sum", (Message(Role.USER, "1 + 1 ="),))


@dataclass
class Busy:
    """An engine that is away for the first requests."""

    away: int
    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def generate(self, prompt_ids, sampling, *, n=1, priority=0):
        self.asked.append((prompt_ids, sampling, n, priority))
        if len(self.asked) <= self.away:
            raise EngineUnavailable("it starts")
        return [Completion((1,), (-0.5,), (0,), FinishReason.STOP)] * n


def test_a_greedy_rollout_keeps_of_the_settings_only_how_an_answer_ends() -> None:
    assert sampled_for(Purpose.GREEDY, ASKED) == Sampling(4, temperature=0.0, stop_token_ids=(2,), seed=5)
    assert sampled_for(Purpose.SAMPLED, ASKED) == sampled_for(Purpose.TRAIN, ASKED) == ASKED


@pytest.mark.parametrize("away", [0, 1, RETRIES])
def test_an_engine_that_is_away_is_asked_the_same_again(away: int) -> None:
    engine, priority = Busy(away), priority_of(Purpose.SAMPLED)
    turn = SingleTurn(engine, None, None, ASKED)  # nothing is rendered or scored
    assert len(run_virtual(turn.completions(TASK, (7, 8), ASKED, 2, priority))) == 2
    assert engine.asked == [((7, 8), ASKED, 2, priority)] * (away + 1)
    assert priority > priority_of(Purpose.TRAIN)
