"""`python -m experiments.balance automatic|joint [--steps N] [--results D]`, from the repository's folder.

`joint` serves one of its tasks by `shoal task serve`.
"""

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import matplotlib as mpl

from shoal.experience.log import snapshot
from shoal.observe.metrics import read_run

HERE = Path(__file__).parent
WINDOW = 20
HUB = 8231


def main(arguments: list[str]) -> None:
    """Trains, and draws what became of each task."""
    parser = argparse.ArgumentParser(prog="experiments.balance")
    parser.add_argument("which", choices=["automatic", "joint"], nargs="?", default="automatic")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    run_dir = Path("runs") / f"balance-{options.which}"
    shutil.rmtree(run_dir, ignore_errors=True)
    command = ["train", str(HERE / f"{options.which}.toml"), f"--run_dir={run_dir}"]
    command += [f"--train.steps={options.steps}"] if options.steps else []
    with external() if options.which == "joint" else contextlib.nullcontext():
        subprocess.run([sys.executable, "-m", "shoal.cli", *command], check=True)
    options.results.mkdir(exist_ok=True)
    figures = described(run_dir)
    (options.results / f"{options.which}.json").write_text(json.dumps(figures, indent=1) + "\n")
    draw(options.results / f"{options.which}.png", figures)


@contextlib.contextmanager
def external() -> Iterator[None]:
    """The process that serves the task `external`."""
    serve = ["task", "serve", "experiments.balance.tasks:External", "--orchestrator", f"http://127.0.0.1:{HUB}"]
    with subprocess.Popen([sys.executable, "-m", "shoal.cli", *serve]) as member:
        yield
        member.terminate()


def described(run_dir: Path) -> dict[str, object]:
    """By task and window of steps: share of the trained groups and mean reward; and how the weights moved."""
    run = read_run(run_dir)
    consumed: dict[str, list[int]] = {}
    with snapshot(run_dir) as log:
        trained = log.execute(
            "SELECT service, step FROM consumed JOIN groups USING (finished_seq) JOIN started USING (group_id) "
            "WHERE peer_id IS NULL ORDER BY service"
        )
        for service, step in trained:
            counts = consumed.setdefault(service, [0] * len(run.steps))
            if step < len(run.steps):
                counts[step] += 1
    windows = range(0, len(run.steps), WINDOW)
    total = [sum(sum(counts[at : at + WINDOW]) for counts in consumed.values()) for at in windows]
    return {
        "window": WINDOW,
        "shares": {
            name: [sum(counts[at : at + WINDOW]) / max(number, 1) for at, number in zip(windows, total, strict=True)]
            for name, counts in consumed.items()
        },
        "rewards": {
            name: [mean(run.column(f"reward/{name}")[at : at + WINDOW]) for at in windows] for name in consumed
        },
        "changes": [event for event in run.events if event.get("name") == "ratio"],
        "evaluations": run.evals,
    }


def mean(values: list[float]) -> float | None:
    """Of those that are there."""
    known = [value for value in values if value == value]
    return sum(known) / len(known) if known else None


def draw(path: Path, figures: dict[str, object]) -> None:
    """Shares and rewards over steps."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    for axis, what in zip(axes, ("shares", "rewards"), strict=True):
        for name, values in figures[what].items():  # type: ignore[attr-defined]
            steps = list(accumulate([WINDOW // 2] + [WINDOW] * (len(values) - 1)))
            axis.plot(steps, [float("nan") if value is None else value for value in values], marker=".", label=name)
        axis.set_xlabel("step")
        axis.set_ylim(0, 1)
    axes[0].set_title("share of the trained groups")
    axes[1].set_title("reward")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main(sys.argv[1:])
