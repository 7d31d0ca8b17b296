"""`python -m experiments.tito`: runs what is missing, then writes the tables and the plot.

--quick      a shortened grid, for --results in a folder of its own
--results D  where the results are
"""

import sys
import tempfile
from pathlib import Path
from statistics import fmean

import torch

from experiments.grid import Grid, Record
from experiments.tito.tables import write_results
from experiments.tito.talks import Talk, changed, hold, ledger_row, misaligned, spelling, text_row
from experiments.tito.words import Style, questions, tokenizer, warm_model
from shoal.config import ModelConfig
from shoal.config.training import GRPOLoss, TrainConfig
from shoal.engine.compute.options import EngineLimits
from shoal.engine.compute.step_engine import StepEngine
from shoal.engine.compute.weight_loading import StagedWeights
from shoal.model.loading import load_model
from shoal.trainer.advantage import advantages
from shoal.trainer.trainer import Trainer
from shoal.types import Sample, seed_for

HERE = Path(__file__).parent
QUICK = {"merges": [200], "seeds": [0], "paths": ["gateway", "text"], "warm_steps": 30, "steps": 2, "groups": 2}
FAR = 0.1


def main(arguments: list[str]) -> None:
    """Runs the experiment."""
    grid = Grid.asked(arguments, HERE, QUICK)
    plan = grid.plan
    keys = [
        f"{boundary}/{merges}/{path}/{seed}"
        for seed in plan["seeds"]
        for boundary in plan["boundaries"]
        for merges in plan["merges"]
        for path in plan["paths"]
    ]
    write_results(grid.results, grid.completed(keys, lambda key: _measured(key, plan)))


def _measured(key: str, plan: dict[str, int]) -> Record:
    boundary, merges, path, seed = key.split("/")
    style = Style(boundary == "marked", int(merges))
    with tempfile.TemporaryDirectory() as folder:
        model = warm_model(style, int(seed), plan["warm_steps"])
        model.save_pretrained(folder)
        tokenizer(style).save_pretrained(folder)
        run = _Run(Path(folder), style, path, int(seed), plan)
        curve = [run.step(step) for step in range(plan["steps"])]
    return {
        "boundary": boundary, "merges": int(merges), "path": path, "seed": int(seed),
        **{name: curve[0][name] for name in ("misaligned", "far", "log_ratio", "ess")},
        "reward": [figures["reward"] for figures in curve],
        "misaligned_end": curve[-1]["misaligned"],
    }  # fmt: skip


class _Run:
    """A short training run over one path."""

    def __init__(self, folder: Path, style: Style, path: str, seed: int, plan: dict[str, int]) -> None:
        self._style, self._path, self._seed, self._plan = style, path, seed, plan
        train = TrainConfig(loss=GRPOLoss(), lr=plan["lr"])
        self._trainer = Trainer(folder, ModelConfig(path=str(folder), device="cpu"), train, max_tokens=64)
        self._engine = StepEngine(load_model(folder), EngineLimits(max_model_len=512, max_running=128))

    def step(self, step: int) -> dict[str, float]:
        """Draws, measures and trains one batch."""
        weights = {name: tensor.clone() for name, tensor in self._trainer.tensors().items()}
        self._engine.update(StagedWeights(step + 1, "", weights))
        groups = [self._group(step, i) for i in range(self._plan["groups"])]
        talks = [talk for group in groups for talk in group]
        hold(self._engine, self._style, talks, gateway=self._path == "gateway")
        samples = [self._rows(group) for group in groups]
        figures = self._figures(talks, [row for rows in samples for row in rows])
        self._trainer.step(samples, step)
        return figures

    def _group(self, step: int, index: int) -> list[Talk]:
        numbers = questions("train", self._seed, step * self._plan["groups"] + index)
        return [Talk(numbers, seed_for(self._seed, step, index, member)) for member in range(self._plan["group_size"])]

    def _rows(self, group: list[Talk]) -> list[Sample]:
        values = advantages([talk.reward for talk in group], "grpo")
        if self._path == "gateway":
            return [ledger_row(talk, value) for talk, value in zip(group, values, strict=True)]
        rows = [text_row(spelling(self._style, talk), talk, value) for talk, value in zip(group, values, strict=True)]
        if self._path == "text":
            return rows
        return [
            Sample(row.tokens, row.mask, tuple(min(0.0, lp) * m for lp, m in zip([0.0, *own], row.mask, strict=True)),
                   row.versions, row.advantages)
            for row, own in zip(rows, self._trainer.logprobs([row.tokens for row in rows]), strict=True)
        ]  # fmt: skip

    def _figures(self, talks: list[Talk], rows: list[Sample]) -> dict[str, float]:
        """Of the weights that drew the talks: what is wrong with the rows."""
        drawn = sum(len(completion.token_ids) for talk in talks for completion in talk.drawn)
        if self._path == "gateway":
            wrong = sum(changed(row, talk) for row, talk in zip(rows, talks, strict=True))
        else:
            wrong = sum(misaligned(self._style, spelling(self._style, talk), talk) for talk in talks)
        own = self._trainer.logprobs([row.tokens for row in rows])
        logs = torch.tensor([
            new - old
            for row, again in zip(rows, own, strict=True)
            for new, old, m in zip([0.0, *again], row.logprobs, row.mask, strict=True)
            if m
        ])  # fmt: skip
        ratio = logs.exp()
        return {
            "reward": fmean(talk.reward for talk in talks),
            "misaligned": wrong / drawn,
            "far": float((logs.abs() > FAR).float().mean()),
            "log_ratio": float(logs.abs().mean()),
            "ess": float(ratio.sum() ** 2 / (ratio**2).sum() / len(ratio)),
        }


if __name__ == "__main__":
    main(sys.argv[1:])
