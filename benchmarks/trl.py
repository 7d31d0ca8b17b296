"""Shoal's asynchronous loop beside TRL's GRPOTrainer: the same work on the same machine, in samples per second.

Both train the same 4.25M-parameter model from the same weights in one dtype on the same questions, with one reward:
groups of 8, 64 completions a step, one update a step, clipped surrogate without KL, Adam, the same learning rate and
gradient clip. Two kinds of answers:

    varied   they end at a token that the model draws: nearly geometric lengths, 34 tokens on average, at most 256
    fixed    32 tokens each; nothing ends one early

Shoal is what `shoal train` runs: engine, trainer and main process, the SQLite log, a push of the weights every step;
one core each for engine and trainer, eta = 4, and as many answers at once as TRL draws. TRL is GRPOTrainer as shipped,
generating with transformers, in a process of its own. It gets the best of what was tried before it is measured: one
thread or all cores, several micro-batch sizes, and each with and without the environment that Shoal's own processes
have (OpenMP threads that sleep when idle, a malloc that keeps what it frees). The two best settings are measured in
turn with Shoal, and the best round of each side counts: what else runs on the machine can only make a round slower.
Starting up and the first steps are not counted on either side; Shoal's warm-up is longer by eta steps, until its queue
of finished groups is as full as it stays. Each round says how many cores other processes used meanwhile: above a few
tenths the ratio flatters Shoal, which needs no two cores at the same instant.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar

import msgspec
import psutil
import uvloop

from benchmarks import on_path, say
from benchmarks.model import mean_length, write_ending_model
from benchmarks.trl_side import TrlFigures, TrlRun
from benchmarks.work import GROUP_SIZE, CoinScorer, DigitService
from shoal.config import Config, parse
from shoal.errors import ConfigError, ShoalError
from shoal.model.renderer_loading import load_renderer
from shoal.net.process import torch_environment
from shoal.observe.metrics import Record
from shoal.rollout.single_turn import SingleTurn
from shoal.run.prepare import Prepared
from shoal.run.training import train
from shoal.types import Completion, Sampling, Split, Task

Report = dict[str, object]
F = TypeVar("F")
COMPLETIONS_PER_STEP = 64
LR = 1e-6
ETA = 4
WARMUP_STEPS = 2
TRIAL_STEPS = 3
TRIAL_WARMUP_STEPS = 1
CONTEXT = 512


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of answers."""

    name: str
    max_tokens: int
    ends: bool
    """Whether a drawn token may end an answer."""
    rounds: int
    """Turns that each side gets; the more, the closer the two sides are expected to be."""


VARIED = Case("varied", 256, ends=True, rounds=2)
FIXED = Case("fixed", 32, ends=False, rounds=4)


@dataclass(frozen=True, slots=True)
class Effort:
    """How long is measured."""

    trl_steps: int
    shoal_steps: int
    limit_s: float
    """After which TRL begins no further step of a round."""
    quick: bool
    """One round of each side, and TRL as it is expected to be fast."""


FULL = Effort(trl_steps=14, shoal_steps=30, limit_s=90.0, quick=False)
QUICK = Effort(trl_steps=6, shoal_steps=14, limit_s=30.0, quick=True)


@dataclass(frozen=True, slots=True)
class Setting:
    """How TRL is run."""

    threads: int
    rows_per_microbatch: int
    environment: str
    precision: str

    def __str__(self) -> str:
        rows = self.rows_per_microbatch
        return f"{self.threads} threads, micro-batches of {rows}, {self.precision}, {self.environment} environment"


@dataclass(frozen=True, slots=True)
class Round(Generic[F]):
    """What one side measured, and how many cores other processes used meanwhile."""

    figures: F
    other_cores: float
    setting: str


@dataclass(frozen=True, slots=True)
class ShoalFigures:
    """What one run of Shoal measured."""

    samples_per_s: float
    steps: int
    length_mean: float
    engine_busy: float
    trainer_busy: float
    staleness_max: int
    dropped: int
    """Groups, as too stale."""


PRECISIONS = {"float32": "float32", "bfloat16": "mixed"}
"""Precision of TRL for each dtype: with bfloat16, float32 weights under autocast, as Shoal keeps them.

TRL with bfloat16 weights is a fifth faster, but rounds updates of this learning rate away.
"""


def measure(quick: bool, dtype: str = "float32") -> Report:
    """`ratio` and `ratio_fixed`: Shoal's samples per second over TRL's, and what they were made of.

    Raises `ConfigError` when TRL is not installed, and for another dtype than float32 and bfloat16.
    """
    if dtype not in PRECISIONS:
        raise ConfigError(f"bench trl: expected --dtype {' or '.join(PRECISIONS)}, got {dtype!r}")
    versions = _versions()
    effort = QUICK if quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        model_dir = Path(folder) / "model"
        write_ending_model(model_dir)
        varied, fixed = (_Comparison(case, effort, model_dir, dtype).report() for case in (VARIED, FIXED))
    return {
        "ratio": varied["ratio"],
        "ratio_fixed": fixed["ratio"],
        "varied": varied,
        "fixed": fixed,
        "dtype": dtype,
        "versions": versions,
    }


def _versions() -> dict[str, str]:
    try:
        return {name: version(name) for name in ("trl", "transformers", "torch")}
    except PackageNotFoundError:
        raise ConfigError("bench trl: TRL is not installed; install it with `pip install 'shoal[trl]'`") from None


@dataclass
class _Comparison:
    """Both sides on one kind of answers."""

    case: Case
    effort: Effort
    model_dir: Path
    dtype: str
    tried: dict[str, float] = field(default_factory=dict)
    runs: int = 0

    def report(self) -> Report:
        """Rounds of both sides in turn, and the ratio of their best."""
        say(f"{self.case.name}: which setting is best for TRL")
        settings = self.best_settings()
        trl: list[Round[TrlFigures]] = []
        shoal: list[Round[ShoalFigures]] = []
        for _, setting in zip(range(1 if self.effort.quick else self.case.rounds), cycle(settings), strict=False):
            say(f"{self.case.name}: a round of TRL ({setting}), then one of Shoal")
            trl.append(self._trl_round(setting))
            shoal.append(observed("", self.shoal))
        return compared(self.case, shoal, trl) | {"trl_tried": self.tried}

    def best_settings(self) -> list[Setting]:
        """The two fastest for TRL of those that are tried: first threads and micro-batches, then environments."""
        cores, precision = len(os.sched_getaffinity(0)), PRECISIONS[self.dtype]
        if self.effort.quick:
            return [Setting(cores, COMPLETIONS_PER_STEP, "quiet", precision)]
        best = self._fastest([Setting(cores, rows, "quiet", precision) for rows in (64, 16, 8)])[0]
        best = self._fastest([best, replace(best, threads=1)])[0]
        others = [replace(best, environment=name) for name in environments(cores)]
        return self._fastest(others)[:2]

    def _trl_round(self, setting: Setting) -> Round[TrlFigures]:
        return observed(str(setting), lambda: self.trl([setting], self.effort.trl_steps, WARMUP_STEPS)[0])

    def _fastest(self, settings: Sequence[Setting]) -> list[Setting]:
        """The settings, fastest first; those not tried yet are."""
        new = [setting for setting in settings if str(setting) not in self.tried]
        for environment in dict.fromkeys(setting.environment for setting in new):
            same = [setting for setting in new if setting.environment == environment]
            for setting, figures in zip(same, self.trl(same, TRIAL_STEPS, TRIAL_WARMUP_STEPS), strict=True):
                self.tried[str(setting)] = figures.samples_per_s
        return sorted(settings, key=lambda setting: -self.tried[str(setting)])

    def trl(self, settings: Sequence[Setting], steps: int, warmup_steps: int) -> list[TrlFigures]:
        """One run of TRL per setting, in one process; all settings have the same environment."""
        runs = [
            TrlRun(
                model_dir=str(self.model_dir),
                threads=setting.threads,
                rows_per_microbatch=setting.rows_per_microbatch,
                steps=steps,
                warmup_steps=warmup_steps,
                completions_per_step=COMPLETIONS_PER_STEP,
                max_tokens=self.case.max_tokens,
                lr=LR,
                ends=self.case.ends,
                precision=setting.precision,
                limit_s=self.effort.limit_s,
            )
            for setting in settings
        ]
        return _trl_process(runs, environments(len(os.sched_getaffinity(0)))[settings[0].environment])

    def shoal(self) -> ShoalFigures:
        """One run of Shoal."""
        steps: list[tuple[float, Record]] = []  # when it ended, by the monotonic clock

        def keep(record: Record) -> None:
            if record["kind"] == "step":
                steps.append((time.monotonic(), record))

        self.runs += 1
        config = self._config(self.model_dir.parent / f"{self.case.name}{self.runs}")
        renderer, service = load_renderer(self.model_dir), DigitService()
        prompt = renderer.prompt_ids(service.draw(Split.TRAIN, 0).messages)
        outcome = uvloop.run(
            train(
                Prepared(
                    config,
                    self.model_dir,
                    renderer,
                    service,
                    CONTEXT,
                    len(prompt),
                    scorer=CoinScorer(),
                    single_turn=SingleTurn if self.case.ends else Endless,
                ),
                listeners=[keep],
            )
        )
        return shoal_figures(steps, outcome.staleness_max)

    def _config(self, run_dir: Path) -> Config:
        return parse(
            {
                "run_dir": str(run_dir),
                "model": {"dtype": self.dtype},
                "tasks": [{"name": "digits", "service": "jsonl", "path": "none"}],
                "rollout": {"group_size": GROUP_SIZE, "max_tokens": self.case.max_tokens},
                "engine": {"max_running": COMPLETIONS_PER_STEP},
                "asynchrony": {"max_staleness": ETA},
                "train": {
                    "steps": self.effort.shoal_steps,
                    "groups_per_step": COMPLETIONS_PER_STEP // GROUP_SIZE,
                    "loss": {"name": "grpo"},
                    "lr": LR,
                },
                "eval": {"every_steps": 0, "questions": 1},
                "checkpoint": {"every_steps": 1_000_000},
            }
        )


def _trl_process(runs: Sequence[TrlRun], environment: Mapping[str, str]) -> list[TrlFigures]:
    """The runs, one after the other in a process of their own. Raises `ShoalError` when it ends without figures."""
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.trl_side", msgspec.json.encode(runs).decode()],
        env=on_path(environment),
        check=False,
        capture_output=True,
        text=True,
    )
    lines = [line for line in ended.stdout.splitlines() if line.startswith('{"samples_per_s"')]
    if ended.returncode or len(lines) != len(runs):
        last_words = (ended.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ShoalError(f"bench trl: TRL ended with code {ended.returncode}: {last_words}")
    return [msgspec.json.decode(line, type=TrlFigures) for line in lines]


class Endless(SingleTurn):
    """Draws answers of the full budget; no token ends one early."""

    async def completions(
        self, task: Task, prompt_ids: tuple[int, ...], sampling: Sampling, n: int, priority: int = 0
    ) -> list[Completion]:
        """The engine's answers, without stop tokens."""
        return await super().completions(task, prompt_ids, replace(sampling, stop_token_ids=()), n, priority)


def observed(setting: str, side: Callable[[], F]) -> Round[F]:
    """Runs one side; its processes have ended when it returns."""
    began_s, machine_s, own_s = time.monotonic(), _machine_s(), _own_s()
    figures = side()
    other_s = _machine_s() - machine_s - (_own_s() - own_s)
    return Round(figures, max(0.0, other_s / (time.monotonic() - began_s)), setting)


def _machine_s() -> float:
    """Seconds that all cores together have computed."""
    times = psutil.cpu_times()
    return float(times.user + times.system)


def _own_s() -> float:
    """Seconds that this process and its ended children have computed."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def environments(cores: int) -> dict[str, dict[str, str]]:
    """By name: what a process may start with, from the shell's own to the one that Shoal's processes have."""
    quiet = torch_environment(cores)
    plain = dict(os.environ)
    malloc = {name: value for name, value in quiet.items() if name.startswith(("MALLOC_", "GLIBC_"))}
    return {
        "plain": plain,
        "plain with Shoal's malloc": plain | malloc,
        "quiet with the usual malloc": {name: value for name, value in quiet.items() if name not in malloc},
        "quiet": quiet,
    }


def shoal_figures(steps: Sequence[tuple[float, Record]], staleness_max: int) -> ShoalFigures:
    """Of the steps after the warm-up, each given with the second at which it ended."""
    (began_s, _), *counted = steps[WARMUP_STEPS + ETA - 1 :]
    return ShoalFigures(
        samples_per_s=len(counted) * COMPLETIONS_PER_STEP / (counted[-1][0] - began_s),
        steps=len(counted),
        length_mean=_mean(counted, "length_mean"),
        engine_busy=_mean(counted, "engine_busy"),
        trainer_busy=_mean(counted, "trainer_busy"),
        staleness_max=staleness_max,
        dropped=round(sum(float(record["dropped_late"] or 0) for _, record in steps)),
    )


def compared(case: Case, shoal: Sequence[Round[ShoalFigures]], trl: Sequence[Round[TrlFigures]]) -> Report:
    """The best round of each side, and their ratio."""
    ours = max((r.figures for r in shoal), key=lambda figures: figures.samples_per_s)
    best = max(trl, key=lambda r: r.figures.samples_per_s)
    theirs = best.figures
    return {
        "ratio": ours.samples_per_s / theirs.samples_per_s,
        "shoal_samples_per_s": ours.samples_per_s,
        "trl_samples_per_s": theirs.samples_per_s,
        "shoal_rounds": [r.figures.samples_per_s for r in shoal],
        "trl_rounds": [r.figures.samples_per_s for r in trl],
        "shoal_other_cores": [r.other_cores for r in shoal],
        "trl_other_cores": [r.other_cores for r in trl],
        "shoal_steps": ours.steps,
        "trl_steps": theirs.steps,
        "length_expected": mean_length(case.max_tokens) if case.ends else float(case.max_tokens),
        "shoal_length_mean": ours.length_mean,
        "trl_length_mean": theirs.length_mean,
        "trl_length_max": theirs.length_max,
        "engine_busy": ours.engine_busy,
        "trainer_busy": ours.trainer_busy,
        "staleness_max": ours.staleness_max,
        "dropped_groups": ours.dropped,
        "trl_setting": best.setting,
    }


def _mean(steps: Sequence[tuple[float, Record]], name: str) -> float:
    return fmean(float(record[name] or 0.0) for _, record in steps)
