"""One turn's requests: what they ask of the engine."""

from dataclasses import dataclass, field

from shoal.clock import run_virtual
from shoal.interfaces import Purpose
from shoal.rollout.single_turn import SingleTurn, priority_of, sampled_for
from shoal.types import Completion, FinishReason, Message, Role, Sampling, Task

ASKED = Sampling(4, temperature=0.7, top_p=0.5, top_k=3, min_p=0.1, stop_token_ids=(2,), seed=5)
TASK = Task("t", "chain_sum", (Message(Role.USER, "1 + 1 ="),))


@dataclass
class Asked:
    """An engine that notes what it is asked."""

    asked: list[tuple[object, ...]] = field(default_factory=list)

    async def generate(self, prompt_ids, sampling, *, n=1, priority=0):
        self.asked.append((prompt_ids, sampling, n, priority))
        return [Completion((1,), (-0.5,), (0,), FinishReason.STOP)] * n


def test_a_greedy_rollout_keeps_of_the_settings_only_how_an_answer_ends() -> None:
    assert sampled_for(Purpose.GREEDY, ASKED) == Sampling(4, temperature=0.0, stop_token_ids=(2,), seed=5)
    assert sampled_for(Purpose.SAMPLED, ASKED) == sampled_for(Purpose.TRAIN, ASKED) == ASKED


def test_the_answers_of_a_group_are_one_request_and_evaluation_s_goes_before_training_s() -> None:
    engine, priority = Asked(), priority_of(Purpose.SAMPLED)
    turn = SingleTurn(engine, None, None, ASKED)  # type: ignore[arg-type]  # nothing is rendered or scored
    assert len(run_virtual(turn.completions(TASK, (7, 8), ASKED, 2, priority))) == 2
    assert engine.asked == [((7, 8), ASKED, 2, priority)]
    assert priority > priority_of(Purpose.TRAIN)
