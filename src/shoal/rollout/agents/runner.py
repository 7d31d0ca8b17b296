"""Runs an agent for each rollout of a task: a session, a deadline, and the result as a `Rollout`."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from shoal.errors import ContextOverflow, EngineError, EngineUnavailable, ShoalError
from shoal.interfaces import FinishedTurns, Model, Purpose, Scorer, TurnsOf
from shoal.model.answer import written
from shoal.plugins import described
from shoal.rollout.single_turn import failed, priority_of, sampled_for, unscored
from shoal.tasks.sdk import BEGINNING, Beginning, EnvironmentFailed, PolicyFailed
from shoal.types import Message, Outcome, Reward, RewardStatus, Role, Rollout, RolloutStatus, Sampling, Task, seed_for
from shoal.wire import sendable

if TYPE_CHECKING:
    from shoal.gateway.host import Host, HostedSession

Play: TypeAlias = Callable[[Task, Model], Awaitable[Outcome]]
"""Works on a task with the model until it is done, as `Environment.rollout`. Any exception makes a failed rollout."""

OVERFLOW = "context: the conversation did not fit any more"
CUT = "policy: max_tokens cut its answer"
OVERFLOW_CODE = "context_length_exceeded"
"""Code of an overflow in the gateway's answer, and so in the errors of OpenAI's clients."""
SHOWN_EVIDENCE = 1 << 17
"""Characters of an outcome's evidence."""
ATTEMPTS = 4
"""Number of attempts at one rollout whose environment asks for another attempt."""


OUTSIDE = (EnvironmentFailed, OSError, EngineError)
"""Errors of the environment, the system and the engine, which no answer of the policy causes."""


class AgentFailed(Exception):
    """The rollout failed for a reason that the policy cannot cause; the text is the recorded reason."""


class CommandFailed(AgentFailed):
    """A command ended with an exit code, as it does where a function raises."""


@dataclass(frozen=True, slots=True)
class _End:
    """How a play ended: with an outcome when that is the policy's doing, with a reason when it was cut off.

    Invariant: without an outcome nothing is trained. Only what is raised by type as the policy's has one.
    """

    outcome: Outcome | None
    reason: str = ""
    again: bool = False
    """True if the rollout shall begin again in a new session; what was sampled is given up."""


@dataclass(eq=False)
class AgentRunner:
    """Implements `interfaces.Runner`: each rollout is a `play` in a separate session.

    Invariant: a rollout's turns are exactly what the engine sampled in its session, even if the agent raised.
    """

    host: "Host"
    play: Play
    scorer: Scorer
    sampling: Sampling
    """Sampling parameters of training."""
    _: KW_ONLY
    timeout_s: float
    """Seconds from a rollout's begin."""
    most_at_once: Callable[[], int | None] = lambda: None
    """Rollouts at once now; further ones wait."""

    def __post_init__(self) -> None:
        self._running, self._ended = 0, asyncio.Event()

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        while (most := self.most_at_once()) is not None and self._running >= most:
            self._ended.clear()
            await self._ended.wait()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self._ended.set()

    async def rollouts(
        self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN, turns: TurnsOf | None = None
    ) -> tuple[Rollout, ...]:
        """The `n` rollouts of a task, side by side."""
        kept = [None if turns is None else turns(i) for i in range(n)]
        async with contextlib.AsyncExitStack() as ended:
            if n == 1 or purpose is not Purpose.TRAIN:
                return tuple(await asyncio.gather(*(self._rollout(task, i, purpose, kept[i]) for i in range(n))))
            begun = Beginning(ended)
            return tuple(await asyncio.gather(*(self._branch(begun, task, i, kept[i]) for i in range(n))))

    async def _branch(self, begun: Beginning, task: Task, i: int, turns: FinishedTurns | None) -> Rollout:
        """The i-th rollout of a group that trains."""
        BEGINNING.set((begun, i == 0))
        try:
            return await self._rollout(task, i, Purpose.TRAIN, turns)
        finally:
            if i == 0:
                begun.ends()

    async def _rollout(self, task: Task, i: int, purpose: Purpose, turns: FinishedTurns | None) -> Rollout:
        seed = seed_for("rollout", self.sampling.seed or 0, task.id, i)
        sampling = replace(sampled_for(purpose, self.sampling), seed=seed)
        async with self._place():
            for attempts_left in reversed(range(ATTEMPTS)):
                try:
                    model = self.host.session(sampling, priority_of(purpose), self.timeout_s, turns)
                except EngineUnavailable as error:
                    return failed(task, i, f"gateway: {error}")
                try:
                    end = await self._played(task, model)
                finally:
                    await model.end()  # the answer in progress becomes a turn
                if not (end.again and attempts_left):
                    break
                if (group := BEGINNING.get()) and group[1]:
                    group[0].ends()  # another attempt may have to wait for the places of those that wait for it
                if turns is not None:
                    turns.forget()
        return await self._judged(task, i, model, end)

    async def _played(self, task: Task, model: "HostedSession") -> _End:
        """Runs the agent and returns how it ended."""
        try:
            async with asyncio.timeout(self.timeout_s) as deadline:
                return _End(await self.play(task, model))
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is None or own.cancelling():
                raise
            return _End(None, "agent: cancelled from inside: something that it waited for was cancelled")
        except CommandFailed as error:
            if model.tree.truncated:
                return _End(Outcome(reward=0.0), OVERFLOW)
            return (
                _End(Outcome(reward=0.0), f"{CUT}, and then {error}") if model.tree.is_cut else _End(None, str(error))
            )
        except AgentFailed as error:
            return _End(None, str(error))
        except EnvironmentFailed as error:
            return _End(None, f"environment: {error}", again=error.retry)
        except PolicyFailed as error:
            return _End(Outcome(reward=0.0), f"policy: {error}")
        except EngineError as error:
            return _End(None, f"engine: {error}")
        except (Exception, SystemExit) as error:  # an agent is user code: its failure is a status, not the run's end
            if isinstance(error, TimeoutError) and deadline.expired():
                return _End(None, f"deadline: the rollout took longer than {self.timeout_s:g} s")
            if model.tree.truncated and _is_overflow(error):
                return _End(Outcome(reward=0.0), OVERFLOW)
            if model.tree.is_cut and not _is_from_outside(error):  # frameworks raise for an answer that lacks its end
                return _End(Outcome(reward=0.0), f"{CUT}, and then {described(error)}")
            return _End(None, f"agent: {described(error)}")

    async def _judged(self, task: Task, i: int, model: "HostedSession", end: _End) -> Rollout:
        """The rollout of the conversation, with its reward and status."""
        turns, messages, outcome, reason = model.tree.turns(), model.tree.messages(), end.outcome, sendable(end.reason)
        if outcome is not None:
            reason = reason or (OVERFLOW if model.tree.truncated else CUT if model.tree.is_cut else "")
        given = outcome.turn_rewards if outcome else ()
        if outcome is not None and not turns:
            outcome, reason = None, reason or "agent: it asked the model nothing"
        if len(given) > len(turns):
            outcome = None
            reason = f"agent: expected at most {len(turns)} turn rewards, one for each answer, got {len(given)}"
        reward = Reward(0.0, RewardStatus.FAILED, evidence=reason)
        status = RolloutStatus.FAILED
        if outcome is not None:
            reward = await self._reward(task, messages, outcome)
            status = RolloutStatus.TRUNCATED if reason else RolloutStatus.FINISHED
            if reward.status is not RewardStatus.SCORED:
                status, reason = RolloutStatus.FAILED, unscored(reward)
        rewarded = [replace(turn, reward=own) if own else turn for turn, own in zip(turns, given, strict=False)]
        return Rollout(f"{task.id}#{i}", messages, (*rewarded, *turns[len(given) :]), reward, status, reason)

    async def _reward(self, task: Task, messages: tuple[Message, ...], outcome: Outcome) -> Reward:
        """The reward of the agent's outcome, or else the scorer's."""
        if outcome.reward is not None:
            return Reward(outcome.reward, evidence=sendable(outcome.evidence[:SHOWN_EVIDENCE]))
        answer = outcome.answer
        if answer is None:  # the newest one
            answer = next((written(one) for one in reversed(messages) if one.role is Role.ASSISTANT), "")
        try:
            (reward,) = await self.scorer.score(task, [sendable(answer)])
        except ShoalError as error:  # the task names no scorer
            return Reward(0.0, RewardStatus.FAILED, evidence=str(error))
        return reward


def _is_overflow(error: BaseException | None) -> bool:
    """True for the refusal of a conversation that is too long, and for errors raised from it.

    Errors of the environment or of the system are recognised by type, not by their cause.
    """
    while error is not None and not isinstance(error, OUTSIDE):
        if isinstance(error, ContextOverflow) or getattr(error, "code", None) == OVERFLOW_CODE:
            return True
        error = error.__cause__
    return False


def _is_from_outside(error: BaseException | None) -> bool:
    """True for an error of `OUTSIDE`, and for errors raised from it."""
    while error is not None and not isinstance(error, OUTSIDE):
        error = error.__cause__
    return error is not None
