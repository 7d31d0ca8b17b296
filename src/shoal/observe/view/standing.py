"""Where a run stands, in words and figures for the top of the overview, and where a node stands in its swarm."""

import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shoal.observe.listing import state_of
from shoal.observe.metrics import number
from shoal.observe.progress import duration
from shoal.observe.runs import RunRecords, column, known
from shoal.observe.status import LATELY, lately

STATUS = Path("swarm") / "status.json"


def last_step(run: RunRecords) -> int | None:
    """Number of the newest step; None before the first."""
    return int(number(run.steps[-1], "step")) if run.steps else None


def lead(run_dir: Path, run: RunRecords) -> str:
    """Model, tasks, state and duration of a run in one line."""
    model = f"{run.config.model.path} on {', '.join(task.name for task in run.config.tasks)}, " if run.config else ""
    took_s = max((number(one, "time_s", 0.0) for one in (*run.steps, *run.evals, *run.events)), default=0.0)
    state = state_of(run_dir)
    return f"{model}{state} {'for' if state == 'running' else 'after'} {duration(took_s)}"


def figures(run: RunRecords) -> list[tuple[str, str]]:
    """Where a run stands, as label and figure."""
    is_same = all(one.get("sampled_reward") == one.get("sampled") for one in run.evals)
    of = f" of {run.config.train.steps}" if run.config else ""
    numbers = (
        ("reward", lately(run, "reward"), ".3f"),
        ("tokens/s", lately(run, "tokens_per_s"), ",.0f"),
        ("staleness", lately(run, "staleness_mean"), ".2f"),
        ("engine busy", lately(run, "engine_busy"), ".0%"),
        ("trainer busy", lately(run, "trainer_busy"), ".0%"),
    )
    shown = [(label, format(value, form)) for label, value, form in numbers if isinstance(value, int | float)]
    scores = {"held-out reward": "sampled_reward"} | ({} if is_same else {"held-out full marks": "sampled"})
    held_out = [(label, _first_to_last(run, name)) for label, name in scores.items()]
    return [("step", f"{len(run.steps)}{of}"), *shown, *((label, text) for label, text in held_out if text)]


def _first_to_last(run: RunRecords, name: str) -> str:
    """A score of the first and of the last evaluation; empty without any."""
    scores = [f"{value:.3f}" for value in known(column(run.evals, name))]
    return " to ".join((scores[0], scores[-1])) if len(scores) > 1 else "".join(scores)


def swarm_status(run_dir: Path) -> Mapping[str, object] | None:
    """Newest status of a node; None when the run is in no swarm."""
    try:
        status = msgspec.json.decode((run_dir / STATUS).read_bytes(), type=dict[str, object])
    except (FileNotFoundError, msgspec.MsgspecError):
        return None
    written_s = status.pop("time_s", None)
    if isinstance(written_s, int | float):
        status["written"] = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written_s))
    return status


def influence(run: RunRecords) -> str:
    """Sentence on the contribution of peers' groups to the last steps; empty for a run that trained none."""
    groups, theirs, own = (lately(run, name) for name in ("external", "reward_external", "reward"))
    if not groups or theirs is None or own is None:
        return ""
    better = "above" if theirs > own else "below" if theirs < own else "equal to"
    return (
        f"Over the last {min(LATELY, len(run.steps))} steps a step trained {groups:.2g} groups of peers. Their "
        f"answers earned {theirs:.3f} by this node's own rewards, {better} the {own:.3f} that its answers earned."
    )
