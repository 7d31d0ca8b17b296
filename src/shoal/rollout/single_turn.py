"""Runs the rollouts of one task: the question is rendered, answered, and scored."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shoal.errors import EngineUnavailable, RequestRefused
from shoal.interfaces import Engine, Purpose, Renderer, Runner, Scorer, TurnsOf
from shoal.model.answer import written
from shoal.types import (
    Completion,
    FinishReason,
    Message,
    Reward,
    RewardStatus,
    Rollout,
    RolloutStatus,
    Sampling,
    Task,
    Turn,
    seed_for,
)

EVAL_PRIORITY = 1
MOST_REASON = 1000
"""Characters of a rollout's reason."""


def sampled_for(purpose: Purpose, sampling: Sampling) -> Sampling:
    """Settings of sampling for a purpose, when `sampling` is training's."""
    if purpose is Purpose.GREEDY:
        return replace(sampling, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    return sampling


def priority_of(purpose: Purpose) -> int:
    """Priority of a request: evaluation goes before training's requests, so that it is short."""
    return 0 if purpose is Purpose.TRAIN else EVAL_PRIORITY


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Answers a task in one turn, `n` times from one prompt."""

    engine: Engine
    renderer: Renderer
    scorer: Scorer
    sampling: Sampling

    async def rollouts(
        self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN, turns: TurnsOf | None = None
    ) -> tuple[Rollout, ...]:
        """The `n` rollouts of a task. A failure is a rollout's status and reason, never an exception."""
        prompt_ids = tuple(self.renderer.prompt_ids(task.messages))
        seed = seed_for("rollout", self.sampling.seed or 0, task.id)
        sampling = replace(sampled_for(purpose, self.sampling), seed=seed)
        kept = [turns(i) for i in range(n)] if turns is not None else []
        completions = [completion for one in kept if (completion := one.take(prompt_ids, sampling)) is not None]
        try:
            if len(completions) < n:
                completions = await self.completions(task, prompt_ids, sampling, n, priority_of(purpose))
                for one, completion in zip(kept, completions, strict=False):
                    one.keep(prompt_ids, sampling, completion)
        except (RequestRefused, EngineUnavailable) as error:
            return tuple(failed(task, i, f"engine: {error}") for i in range(n))
        answers = [self.renderer.message(completion.token_ids, prompt_ids) for completion in completions]
        rewards = await self.scorer.score(task, [written(answer) for answer in answers])
        return tuple(
            _rollout(task, i, Turn(prompt_ids, completion), answer, reward)
            for i, (completion, answer, reward) in enumerate(zip(completions, answers, rewards, strict=True))
        )

    async def completions(
        self, task: Task, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, priority: int = 0
    ) -> list[Completion]:
        """The engine's answers to one prompt; the pool of engines waits for an engine that can take it."""
        return await self.engine.generate(prompt_ids, sampling, n=n, priority=priority)


@dataclass(frozen=True, slots=True)
class Runners:
    """Each task service's own runner, and one for the others."""

    by_service: Mapping[str, Runner]
    default: Runner

    async def rollouts(
        self, task: Task, n: int, purpose: Purpose = Purpose.TRAIN, turns: TurnsOf | None = None
    ) -> tuple[Rollout, ...]:
        """Runs a task's rollouts with the runner of its service."""
        return await self.by_service.get(task.service, self.default).rollouts(task, n, purpose, turns)


def _rollout(task: Task, i: int, turn: Turn, answer: Message, reward: Reward) -> Rollout:
    reason = ""
    if turn.completion.finish_reason is FinishReason.ABORT:
        reason = "engine: aborted"
    elif reward.status is not RewardStatus.SCORED:
        reason = unscored(reward)
    return Rollout(
        id=f"{task.id}#{i}",
        messages=(*task.messages, answer),
        turns=(turn,),
        reward=reward,
        status=RolloutStatus.FAILED if reason else RolloutStatus.FINISHED,
        reason=reason,
    )


def unscored(reward: Reward) -> str:
    """The reason of a rollout without a reward."""
    why = f"scorer: {reward.status.value.replace('_', ' ')}"
    return f"{why}: {reward.evidence}"[:MOST_REASON] if reward.evidence else why


def failed(task: Task, i: int, reason: str) -> Rollout:
    """A failed rollout, without turns."""
    return Rollout(
        id=f"{task.id}#{i}",
        messages=task.messages,
        turns=(),
        reward=Reward(0.0, RewardStatus.FAILED, evidence=reason),
        status=RolloutStatus.FAILED,
        reason=reason,
    )
