"""TRL's side of `shoal bench trl`: a process of its own that runs GRPOTrainer as shipped and prints what it measured.

    python -m benchmarks.trl_side '[{"model_dir": ..., "threads": 2, ...}, ...]'

prints one line of JSON per run. Nothing of TRL is changed; what costs it time without being part of the work is
switched off: logging, saving, progress, gradient checkpointing, a reference model.
"""

import sys
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from benchmarks.work import GROUP_SIZE, coin, digits
from shoal.net.process import die_with_parent

if TYPE_CHECKING:
    from trl import GRPOConfig


class TrlRun(msgspec.Struct, frozen=True):
    """One training run of TRL."""

    model_dir: str
    threads: int
    rows_per_microbatch: int
    steps: int
    warmup_steps: int
    completions_per_step: int
    max_tokens: int
    lr: float
    ends: bool
    """Whether answers may end before `max_tokens`."""
    precision: str
    """`float32`, or `mixed`, which is TRL's `bf16` with float32 weights."""
    limit_s: float
    """After which no further step is begun, though at least one is measured."""


class TrlFigures(msgspec.Struct, frozen=True):
    """What one run measured."""

    samples_per_s: float
    steps: int
    """That were measured, after the warm-up."""
    length_mean: float
    """Tokens, of all answers, the one that ended them included."""
    length_max: int


def measured(run: TrlRun) -> TrlFigures:
    """Trains as the run says. Imports TRL, torch and datasets."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import GRPOTrainer

    torch.set_num_threads(run.threads)
    lengths: list[int] = []
    ended_s: list[float] = []
    began_s = time.perf_counter()

    class Clock(TrainerCallback):  # type: ignore[misc]
        """Notes when each step ended, and stops at the limit."""

        def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
            ended_s.append(time.perf_counter())
            if len(ended_s) > run.warmup_steps and ended_s[-1] - began_s > run.limit_s:
                control.should_training_stop = True  # type: ignore[attr-defined]

    def reward(completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(len(ids) for ids in completion_ids)
        return [coin(messages[0]["content"]) for messages in completions]

    questions = run.steps * run.completions_per_step // GROUP_SIZE
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(run.model_dir, dtype=torch.float32),
        processing_class=PreTrainedTokenizerFast.from_pretrained(run.model_dir),
        reward_funcs=reward,
        train_dataset=Dataset.from_list(
            [{"prompt": [{"role": "user", "content": digits(index)}]} for index in range(questions)]
        ),
        callbacks=[Clock()],
        args=_settings(run),
    )
    trainer.train()
    steps = len(ended_s) - run.warmup_steps
    return TrlFigures(
        samples_per_s=steps * run.completions_per_step / (ended_s[-1] - ended_s[run.warmup_steps - 1]),
        steps=steps,
        length_mean=fmean(lengths),
        length_max=max(lengths),
    )


def _settings(run: TrlRun) -> "GRPOConfig":
    from trl import GRPOConfig

    microbatches = run.completions_per_step // run.rows_per_microbatch
    return GRPOConfig(
        output_dir=str(Path(run.model_dir).parent / "trl"),
        per_device_train_batch_size=run.rows_per_microbatch,
        gradient_accumulation_steps=microbatches,
        steps_per_generation=microbatches,
        num_generations=GROUP_SIZE,
        num_iterations=1,
        max_steps=run.steps,
        max_completion_length=run.max_tokens,
        generation_kwargs=None if run.ends else {"min_new_tokens": run.max_tokens},
        temperature=1.0,
        top_k=0,
        beta=0.0,
        learning_rate=run.lr,
        lr_scheduler_type="constant",
        max_grad_norm=1.0,
        use_cpu=True,
        bf16=run.precision == "mixed",
        gradient_checkpointing=False,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )


def main(argument: str) -> None:
    """One line per run."""
    die_with_parent()
    for run in msgspec.json.decode(argument, type=list[TrlRun]):
        sys.stdout.write(msgspec.json.encode(measured(run)).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
