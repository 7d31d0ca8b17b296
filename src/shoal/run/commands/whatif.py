"""`shoal whatif`: a run's logged groups are trained again under other settings of the loss, the advantage or the rate.

The answers stay those of the run. A policy that differs would have given others, so the numbers lose their meaning as
the policies part. The effective sample size tells how far they have:

    w_r = product over the tokens of row r of pi_whatif / pi_behav,   ess = (sum w)^2 / (n sum w^2)   (Kong 1992)
"""

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from shoal.config import Config
from shoal.errors import ConfigError, RunDirError
from shoal.experience.balance import WaitingGroup
from shoal.observe.metrics import JsonlTracker, Record, number
from shoal.run.commands.replay import BEGINNING, Replay, numbers_by_row, opened_replay, reading_steps, settings_of
from shoal.run.policy import outcome_returns
from shoal.run.prepare import model_directory
from shoal.run.run_dir import write_resolved
from shoal.run.step_metrics import stats_values
from shoal.trainer.advantage import is_informative
from shoal.trainer.messages import StepStats, TokensFile
from shoal.types import Group, Sample

BELIEVABLE = 0.5
"""Smallest effective sample size that is believed, as a share of the rows. Particle filters resample below it (Liu and
Chen 1995)."""
FIXED = ("steps", "groups_per_step", "push_every", "ranks")
"""Settings of training that say which groups a step has, and when."""
CURVES = ("loss", "entropy", "grad_norm", "update_norm", "ess")


@dataclass(frozen=True, slots=True)
class OtherStep:
    """A step under other settings, with the step of the run."""

    step: int
    stats: StepStats | None
    """None where the other settings leave no group."""
    own: Record
    """Metrics of the run's step."""
    ess: float
    """Effective sample size of the rows, 0..1."""
    left_out: int
    """Groups that the other settings leave out."""

    @property
    def believable(self) -> bool:
        """Whether the answers of the run still tell about this policy."""
        return self.ess >= BELIEVABLE

    @property
    def sentence(self) -> str:
        """One line for people."""
        out_of = f"; {self.left_out} groups left out" if self.left_out else ""
        doubt = "" if self.believable else ", too small to believe"
        own, other = self.values("loss")
        return f"step {self.step + 1}: loss {own:.4g}, here {other:.4g}; effective sample {self.ess:.2f}{doubt}{out_of}"

    def values(self, name: str) -> tuple[float, float]:
        """A number of the run's step and of this one; nan if missing."""
        return number(self.own, name), math.nan if self.stats is None else float(asdict(self.stats)[name])


def other_settings(run_dir: Path, overrides: Sequence[str]) -> tuple[Config, Config]:
    """Settings of the run, and the other ones. Raises `ConfigError` for settings that would have given other groups."""
    own, other = settings_of(run_dir, ()), settings_of(run_dir, overrides)
    sections = zip(own.model_dump().items(), other.model_dump().values(), strict=True)
    foreign = [name for (name, before), after in sections if before != after and name not in ("train", "asynchrony")]
    fixed = [f"train.{name}" for name in FIXED if getattr(own.train, name) != getattr(other.train, name)]
    if foreign or fixed:
        raise ConfigError(
            f"{(foreign + fixed)[0]}: expected another loss, advantage, rate or filter (train.*, asynchrony.*); "
            "the logged groups are as they are"
        )
    return own, other


def kept_groups(groups: Sequence[Group], version: int, own: Config, other: Config) -> list[Group]:
    """Groups of a step that the other settings would train under `version`."""
    staleness, kept = other.asynchrony.staleness, list(groups)
    if staleness != own.asynchrony.staleness:
        newest = {one.id: WaitingGroup(one.oldest_version, 0, one).newest_version for one in kept}
        kept = [one for one in kept if not staleness.refuses(one.oldest_version, newest[one.id], version)]
    if other.train.dynamic_sampling is True and own.train.dynamic_sampling is not True:
        kept = [one for one in kept if is_informative(one, outcome_returns)]
    return kept


def sample_size(logprobs: Mapping[int, Sequence[float]], rows: Sequence[Sample]) -> float:
    """Effective sample size of the trained rows, 0..1, by the logprobs of their tokens; 1 when none was computed."""
    ratios = list[float]()
    for row, logp in logprobs.items():
        behaviour = math.fsum(rows[row].logprobs[i] for i, kept in enumerate(rows[row].mask) if kept)
        ratios.append(math.fsum(logp) - behaviour)
    weights = [math.exp(ratio - max(ratios)) for ratio in ratios]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(w * w for w in weights)) if weights else 1.0


async def what_if(
    run_dir: Path,
    first: int,
    last: int,
    overrides: Sequence[str],
    show: Callable[[OtherStep], None],
    out: Path | None = None,
) -> list[OtherStep]:
    """Trains the steps `first` to `last` of a run under other settings, from the run's state before them.

    Steps count from 0. `out`, a new folder, gets metrics, settings and the model, for `shoal view` and `shoal compare`.
    Raises a `ShoalError`.
    """
    own, other = other_settings(run_dir, overrides)
    if out is not None and await asyncio.to_thread(out.exists):
        raise RunDirError(f"{out}: expected a new folder, got one that exists")
    with reading_steps(run_dir) as logged, TemporaryDirectory(prefix="shoal-whatif-") as folder:
        logged.between(first, last)
        before = Path(folder) / "before"
        if first - 1 != BEGINNING:
            before.mkdir()
            async with opened_replay(logged) as replay:
                await replay.go_after(first - 1)
                await replay.trainer.save(before)
        async with opened_replay(logged, overrides) as replay:
            if before.exists():
                await replay.trainer.load(before)
            found = []
            for step in range(first, last + 1):
                kept = kept_groups(logged.groups(step), logged.records[step].version, own, other)
                found.append(await _step(replay, step, kept, Path(folder) / f"{step}.safetensors"))
                show(found[-1])
            if out is not None:
                await asyncio.to_thread(_write, out, other, found)
                model_dir = await asyncio.to_thread(model_directory, other.model.path)
                await replay.steps.write_model(model_dir, out / "model", out / "adapter")
    return found


async def _step(replay: Replay, step: int, kept: Sequence[Group], file: Path) -> OtherStep:
    """Takes one step on the groups that are kept; the trainer writes its numbers to a new `file`."""
    logged = replay.logged
    record, own = logged.records[step], logged.metrics.get(step, {})
    left_out = len(logged.groups(step)) - len(kept)
    stats = await replay.take(record, kept, TokensFile(str(file), tuple(group.id for group in kept)))
    rows = await replay.steps.rows(kept, record.version)
    logprobs = await asyncio.to_thread(numbers_by_row, file, "logp_N")
    ess = sample_size(logprobs, [row for some in rows.of_group.values() for row in some])
    return OtherStep(step, stats, own, ess, left_out)


def _write(out: Path, config: Config, found: Sequence[OtherStep]) -> None:
    """Writes settings and metrics into a new folder, for pages."""
    out.mkdir(parents=True)
    write_resolved(config.model_copy(update={"run_dir": str(out)}), out)
    with closing(JsonlTracker(out / "metrics.jsonl")) as metrics:
        for one in found:
            logged = {name: number(one.own, name) for name in ("version", "reward") if name in one.own}
            numbers = {} if one.stats is None else stats_values(one.stats)
            metrics.log(one.step + 1, {**logged, **numbers, "ess_rows": one.ess})


BARS, COLUMNS = "▁▂▃▄▅▆▇█", 60


def curves(found: Sequence[OtherStep]) -> list[str]:
    """Lines with the curves of the run and of the other settings, on one scale for each number."""
    lines = []
    for name in CURVES:
        pairs = [one.values(name) for one in found[:: -(-len(found) // COLUMNS)]]
        finite = [value for pair in pairs for value in pair if math.isfinite(value)]
        if not finite:
            continue
        low, high = min(finite), max(finite)
        for label, values in zip((f"{name}, run", f"{name}, what if"), zip(*pairs, strict=True), strict=True):
            drawn = "".join(_bar(value, low, high) for value in values)
            lines.append(f"{label:<22}{drawn}  {low:.3g} to {high:.3g}")
    return lines


def _bar(value: float, low: float, high: float) -> str:
    if not math.isfinite(value):
        return " "
    return BARS[min(len(BARS) - 1, int((value - low) / ((high - low) or 1.0) * len(BARS)))]


def summary(found: Sequence[OtherStep]) -> Mapping[str, object]:
    """Figures of the whole what-if."""
    doubtful = [one.step + 1 for one in found if not one.believable]
    return {
        "steps": len(found),
        "ess_least": min(one.ess for one in found),
        "doubtful_steps": doubtful,
        "weights": {one.step + 1: one.stats.weights for one in found if one.stats is not None},
    }
