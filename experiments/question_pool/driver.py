"""A synchronous run, in one process, whose questions a pool chooses, or the order of an epoch."""

import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.areal_staleness.driver import Driver
from experiments.grid import Record
from experiments.question_pool.asked import english
from shoal import checker
from shoal.config import Config, parse
from shoal.engine.compute.request import Draft, Request
from shoal.reward.worker import judge_of
from shoal.rollout.question_pool import QuestionPool
from shoal.run.prepare import Prepared, prepare
from shoal.trainer.advantage import is_informative, step_samples
from shoal.types import Completion, Group, Reward, Rollout, Split, Task, Turn

ROOT = Path(__file__).parents[2]
GROUP_SIZE, SAMPLES = 8, 4
HELD_OUT_SHARE = 0.2


def course(regime: Mapping[str, Any], arm: str, seed: int) -> Record:
    """Trains one cell; the file is a seed's own choice of words, or the regime's own file."""
    with tempfile.TemporaryDirectory(prefix="shoal-pool-") as folder:
        file = Path(folder) / "questions.jsonl"
        if "file" in regime:
            file = ROOT / regime["file"]
        else:
            lengths = regime["lengths"]
            dice, count = random.Random(f"question pool {seed}"), regime["training"] + regime["held_out"]
            of = [sorted(one for one in english() if len(one) == length) for length in lengths]
            chosen = [word for words in of for word in dice.sample(words, count // len(lengths))]
            rows = [{"prompt": f"reverse {word}", "answer": word[::-1]} for word in chosen]
            file.write_text("\n".join(map(json.dumps, rows)))
        asked = {"name": "asked", "service": "jsonl", "path": str(file), "eval_share": HELD_OUT_SHARE}
        tree = {
            "run_dir": str(Path(folder) / "run"),
            "seed": seed,
            "model": {"path": regime["model"], "dtype": regime.get("dtype", "float32")},
            "tasks": [{**asked, **regime.get("task", {})}],
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": regime["max_tokens"]},
            "train": {
                **{"steps": regime["steps"], "groups_per_step": regime["groups"]},
                **{"lr": regime["lr"], "warmup_steps": 5},
            },
            "eval": {"every_steps": regime["every_steps"], "questions": regime["held_out"], "samples": SAMPLES},
        }
        with prepare(parse(tree)) as prepared:
            return {"arm": arm, "seed": seed, **PoolDriver(prepared.config, prepared, pooled=arm == "pool").trained()}


class PoolDriver(Driver):
    """A run in which step s trains, as version s, on answers of version s.

    Its record has the held-out accuracy by rollouts, the share of each step's groups whose rewards differ, and the
    number of questions that were asked at all.
    """

    def __init__(self, config: Config, prepared: Prepared, *, pooled: bool) -> None:
        super().__init__(config, prepared, 0)
        (self._environment,) = prepared.environments.values()
        questions, size = self._environment.questions, config.rollout.group_size
        self._pool = QuestionPool(questions, size, config.seed) if pooled else None

    def trained(self) -> Record:
        """Trains to the end."""
        train, size = self._config.train, self._config.rollout.group_size
        accuracies, informative, asked = [(0, self._accuracy(0))], list[float](), set[str]()
        for step in range(train.steps):
            self._serve(self._ring[0])
            groups = self._groups(step)
            asked |= {group.task.id.rpartition("/")[0] for group in groups}
            informative.append(fmean(map(is_informative, groups)))
            self._trainer.step(step_samples(groups, train, self._config.rollout.max_tokens), step)
            self._trainer.count_push()
            self._ring.append(self._weights())
            if (step + 1) % self._config.eval.every_steps == 0:
                accuracies.append(((step + 1) * train.groups_per_step * size, self._accuracy(step + 1)))
        return {
            "accuracies": [[rollouts, round(share, 4)] for rollouts, share in accuracies],
            "informative": [round(share, 4) for share in informative],
            "distinct": len(asked),
        }

    def _groups(self, step: int) -> list[Group]:
        """A step's groups; the pool sees all of them before the next step, in their order."""
        count, draw = self._config.train.groups_per_step, self._pool.draw if self._pool else self._drawn
        tasks = [draw(step * count + i) for i in range(count)]
        answered = self._answers(tasks, self._config.rollout.group_size, 1.0, step)
        groups = [Group(task.id, task, rollouts, step) for task, rollouts in zip(tasks, answered, strict=True)]
        for group in groups if self._pool else ():
            self._pool.answered(group)
            self._pool.ended(group.task)
        return groups

    def _drawn(self, index: int) -> Task:
        return self._environment.draw(Split.TRAIN, index)

    def _accuracy(self, step: int) -> float:
        """The newest weights' sampled accuracy on the held-out questions."""
        self._serve(self._weights())
        answered = self._answers(self._held_out, self._config.eval.samples, 1.0, step)
        return fmean(rollout.reward.value for rollouts in answered for rollout in rollouts)

    def _rollout(self, task: Task, request: Request, draft: Draft, version: int) -> Rollout:
        assert draft.finish_reason is not None
        ids = tuple(draft.sampled)
        judge = judge_of(checker.spec_of(json.loads(task.info)["scorer"], task.id), task.answer)
        value, _ = judge(self._renderer.text(ids))
        completion = Completion(ids, tuple(draft.logprobs), (version,) * len(ids), draft.finish_reason)
        return Rollout(task.id, (), (Turn(tuple(request.prompt_ids), completion),), Reward(value))
