"""A training run whose staleness is exact: every batch is drawn with the weights of `eta` versions ago.

Engine and trainer are those of every run, in one process and taking turns, so that speed decides nothing: all runs of
one seed see the same questions in the same order, as many answers, and take as many updates.
"""

import math
import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor

from shoal.config import Config
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.request import Draft, Request
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.compute.weight_loading import StagedWeights
from shoal.interfaces import Environment
from shoal.model.chat_template import ChatRenderer
from shoal.model.loading import DTYPES, load_model
from shoal.run.prepare import Prepared
from shoal.trainer.advantage import step_samples
from shoal.trainer.messages import StepStats
from shoal.trainer.trainer import Trainer
from shoal.types import Completion, Group, Reward, Rollout, Sampling, Split, Task, Turn, seed_for

NEVER = math.inf
"""As `eta`: all data are drawn with the weights that the run began with."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Share of the held-out questions answered correctly by the newest weights."""

    step: int
    sampled: float
    greedy: float


@dataclass(frozen=True, slots=True)
class Course:
    """How a run went."""

    evaluations: tuple[Evaluation, ...]
    rewards: tuple[float, ...]
    """Of each step's answers, which older weights drew."""
    clipped_share: float
    masked_share: float
    capped_share: float
    ess: float
    """Means over the steps, as are those above."""
    ratio_max: float


class Driver:
    """One run. Invariant: step s is trained, as version s, on answers that version max(0, s - eta) drew."""

    def __init__(self, config: Config, prepared: Prepared, eta: float) -> None:
        self._config, self._eta = config, eta
        self._renderer: ChatRenderer = prepared.renderer
        self._service: Environment = prepared.service
        self._trainer = Trainer(prepared.model_dir, config.model, config.train, max_tokens=config.rollout.max_tokens)
        limits = EngineLimits(prepared.longest_prompt + 8 + config.rollout.max_tokens, config.engine.max_running)
        self._engine = StepEngine(load_model(prepared.model_dir, dtype=config.model.dtype), limits)
        self._ring: deque[dict[str, Tensor]] = deque(maxlen=1 if eta == NEVER else int(eta) + 1)
        self._ring.append(self._weights())
        self._held_out = [prepared.service.draw(Split.EVAL, index) for index in range(config.eval.questions)]

    def course(self) -> Course:
        """Trains to the end."""
        train, every = self._config.train, self._config.eval.every_steps
        stats: list[StepStats] = []
        rewards: list[float] = []
        evaluations = [self._evaluation(0)]
        for step in range(train.steps):
            self._serve(self._ring[0])
            groups = self._groups(step)
            rewards.append(fmean(rollout.reward.value for group in groups for rollout in group.rollouts))
            rows = step_samples(groups, train, self._config.rollout.max_tokens)
            stats.append(self._trainer.step(rows, step))
            self._trainer.count_push()
            if self._eta != NEVER:
                self._ring.append(self._weights())
            if (step + 1) % every == 0 or step + 1 == train.steps:
                evaluations.append(self._evaluation(step + 1))
        return Course(
            evaluations=tuple(evaluations),
            rewards=tuple(rewards),
            clipped_share=fmean(s.clipped_share for s in stats),
            masked_share=fmean(s.masked_share for s in stats),
            capped_share=fmean(s.capped_share for s in stats),
            ess=fmean(s.ess for s in stats),
            ratio_max=max(s.ratio_max for s in stats),
        )

    def _weights(self) -> dict[str, Tensor]:
        """As the engine computes with them."""
        dtype = DTYPES[self._config.model.dtype]
        return {name: tensor.to(dtype, copy=True) for name, tensor in self._trainer.tensors().items()}

    def _serve(self, weights: dict[str, Tensor]) -> None:
        """Has the engine draw with these weights."""
        self._engine.update(StagedWeights(self._engine.version + 1, "", weights))

    def _groups(self, step: int) -> list[Group]:
        """A step's groups, drawn and scored."""
        count, size = self._config.train.groups_per_step, self._config.rollout.group_size
        tasks = [self._service.draw(Split.TRAIN, step * count + i) for i in range(count)]
        version = 0 if self._eta == NEVER else max(0, step - int(self._eta))
        drawn = self._answers(tasks, size, 1.0, version)
        return [Group(task.id, task, rollouts, version) for task, rollouts in zip(tasks, drawn, strict=True)]

    def _evaluation(self, step: int) -> Evaluation:
        """Of the newest weights."""
        self._serve(self._weights())

        def share(temperature: float) -> float:
            drawn = self._answers(self._held_out, 1, temperature, step)
            return fmean(rollouts[0].reward.value for rollouts in drawn)

        return Evaluation(step, share(1.0), share(0.0))

    def _answers(self, tasks: Sequence[Task], n: int, temperature: float, version: int) -> list[tuple[Rollout, ...]]:
        """`n` answers to each task under the weights being served, which are those of `version`."""
        requests = []
        for task in tasks:
            sampling = Sampling(
                self._config.rollout.max_tokens,
                temperature=temperature,
                stop_token_ids=self._renderer.stop_token_ids,
                seed=seed_for("rollout", self._config.seed, task.id),
            )
            requests.append(Request(tuple(self._renderer.prompt_ids(task.messages)), sampling, n))
            self._engine.submit(requests[-1])
        while not self._engine.idle:
            self._engine.step()
        return [
            tuple(self._rollout(task, request, draft, version) for draft in request.drafts)
            for task, request in zip(tasks, requests, strict=True)
        ]

    def _rollout(self, task: Task, request: Request, draft: Draft, version: int) -> Rollout:
        assert task.answer is not None
        assert draft.finish_reason is not None
        ids = tuple(draft.sampled)
        text = self._renderer.text(ids).strip().lower()
        # Full marks of reasoning-gym's scorer of spell_backward; of a sum the last number counts.
        correct = (re.findall(r"\d+", text) or [text])[-1] == task.answer.lower()
        # The engine counts updates, which come for evaluations too; the version is that of the training run.
        completion = Completion(ids, tuple(draft.logprobs), (version,) * len(ids), draft.finish_reason)
        turn = Turn(tuple(request.prompt_ids), completion)
        return Rollout(task.id, (), (turn,), Reward(float(correct)))
