"""Runs an agent for each rollout of a task: a session, a deadline, and what became of it as a `Rollout`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from shoal.errors import EngineError, EngineUnavailable, ShoalError
from shoal.gateway.sessions import ContextOverflow
from shoal.gateway.token_tree import TokenTree
from shoal.interfaces import Purpose, Scorer
from shoal.model.answer import written
from shoal.plugins import described
from shoal.rollout.agents.host import AgentSession, Host
from shoal.rollout.single_turn import failed, unscored
from shoal.tasks.sdk import EnvironmentFailed, PolicyFailed
from shoal.types import Outcome, Reward, RewardStatus, Role, Rollout, RolloutStatus, Task, Turn

Play: TypeAlias = Callable[[Task, AgentSession], Awaitable[Outcome]]
"""Works on a task through its session until it is done. Any exception makes a failed rollout."""

OVERFLOW = "context: the conversation did not fit any more"
OVERFLOW_CODE = "context_length_exceeded"
"""Code of an overflow in the gateway's answer, and so in the errors of OpenAI's clients."""
ATTEMPTS = 4
"""Number of attempts at one rollout whose player is lost."""


class AgentFailed(Exception):
    """The rollout failed for a reason that the policy cannot cause; the text is the recorded reason."""


class AgentLost(AgentFailed):
    """The player of a rollout is gone: its tokens are given up, and the rollout begins again in a new session."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a play ended: with an outcome when that is the policy's doing, with a reason when it was cut off.

    Invariant: without an outcome nothing is trained. Only what is raised by type as the policy's has one.
    """

    outcome: Outcome | None
    reason: str = ""


class AgentRunner:
    """Implements `interfaces.Runner`: each rollout is a `play` in a session of its own.

    Invariant: a rollout's turns are exactly what the engine drew in its session, whatever the agent did or raised.
    """

    def __init__(
        self, host: Host, play: Play, scorer: Scorer, *, timeout_s: float, max_at_once: int | None = None
    ) -> None:
        """`timeout_s` is of one rollout, which counts from its begin; those beyond `max_at_once` wait before that."""
        self._host = host
        self._play = play
        self._scorer = scorer
        self._timeout_s = timeout_s
        self._places = asyncio.Semaphore(max_at_once) if max_at_once else contextlib.nullcontext()

    async def rollouts(self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN) -> tuple[Rollout, ...]:
        """The `n` rollouts of a task, side by side."""
        return tuple(await asyncio.gather(*(self._rollout(task, i, purpose) for i in range(n))))

    async def _rollout(self, task: Task, i: int, purpose: Purpose) -> Rollout:
        async with self._places:
            for attempts_left in reversed(range(ATTEMPTS)):
                try:
                    seat = self._host.seat(task, i, purpose, self._timeout_s)
                except EngineUnavailable as error:
                    return failed(task, i, f"gateway: {error}")
                try:
                    end = await self._played(task, seat)
                    break
                except AgentLost as error:
                    end = _End(None, str(error))
                    if not attempts_left:
                        break
                finally:
                    await self._host.gateway.sessions.end(seat.session)  # what is being drawn will be in the ledger
        return await self._judged(task, i, seat.session.tree, end)

    async def _played(self, task: Task, seat: AgentSession) -> _End:
        """Runs the agent and returns how it ended. Raises `AgentLost`."""
        try:
            async with asyncio.timeout(self._timeout_s) as deadline:
                return _End(await self._play(task, seat))
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is None or own.cancelling():
                raise
            return _End(None, "agent: cancelled from inside: something that it waited for was cancelled")
        except AgentLost:
            raise
        except AgentFailed as error:
            return _End(None, str(error))
        except EnvironmentFailed as error:
            if error.retry:
                raise AgentLost(f"environment: {error}") from error
            return _End(None, f"environment: {error}")
        except PolicyFailed as error:
            return _End(Outcome(reward=0.0), f"policy: {error}")
        except EngineError as error:
            return _End(None, f"engine: {error}")
        except Exception as error:  # an agent is anybody's code: its failure is a status, not the end of the run
            if isinstance(error, TimeoutError) and deadline.expired():
                return _End(None, f"deadline: the rollout took longer than {self._timeout_s:g} s")
            if seat.session.tree.truncated and _is_overflow(error):
                return _End(Outcome(reward=0.0), OVERFLOW)
            return _End(None, f"agent: {described(error)}")

    async def _judged(self, task: Task, i: int, tree: TokenTree, end: _End) -> Rollout:
        """The rollout of the token tree, with its reward and status."""
        turns, outcome, reason = tree.turns(), end.outcome, end.reason
        if outcome is not None and tree.truncated:
            reason = reason or OVERFLOW
        given = outcome.turn_rewards if outcome else ()
        if outcome is not None and not turns:
            outcome, reason = None, reason or "agent: it asked the model nothing"
        if len(given) > len(turns):
            outcome = None
            reason = f"agent: expected at most {len(turns)} turn rewards, one for each answer, got {len(given)}"
        reward = Reward(0.0, RewardStatus.FAILED, evidence=reason)
        status = RolloutStatus.FAILED
        if outcome is not None:
            reward = await self._reward(task, tree, outcome)
            status = RolloutStatus.TRUNCATED if reason else RolloutStatus.FINISHED
            if reward.status is not RewardStatus.SCORED:
                status, reason = RolloutStatus.FAILED, unscored(reward)
        return Rollout(f"{task.id}#{i}", tree.messages(), _rewarded(turns, given), reward, status, reason)

    async def _reward(self, task: Task, tree: TokenTree, outcome: Outcome) -> Reward:
        """The reward of the agent's outcome, or else the scorer's."""
        if outcome.reward is not None:
            return Reward(outcome.reward)
        answer = _answer(tree) if outcome.answer is None else outcome.answer
        try:
            (reward,) = await self._scorer.score(task, [answer])
        except ShoalError as error:  # the task says nothing of how to score it
            return Reward(0.0, RewardStatus.FAILED, evidence=str(error))
        return reward


def _is_overflow(error: BaseException) -> bool:
    """True for the refusal of a conversation that is too long, and for errors raised from it."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ContextOverflow) or getattr(cause, "code", None) == OVERFLOW_CODE:
            return True
        cause = cause.__cause__
    return False


def _rewarded(turns: tuple[Turn, ...], rewards: tuple[float, ...]) -> tuple[Turn, ...]:
    missing = len(turns) - len(rewards)
    return tuple(
        replace(turn, reward=reward) if reward else turn
        for turn, reward in zip(turns, rewards + (0.0,) * missing, strict=False)
    )


def _answer(tree: TokenTree) -> str:
    """The newest answer."""
    return next((written(message) for message in reversed(tree.messages()) if message.role is Role.ASSISTANT), "")
