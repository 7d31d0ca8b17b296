"""Figures of the pages, from raw files in the tree: tables are generated, sentences are compared.

`python tools/measured.py` (`make figures-check`) recomputes every table and sentence, makes the tables of the
experiments again from their runs, and lists the rooms whose code changed since each file was measured.
It exits with 1 when a page says something else than its data. `tools/docs.py` writes the tables.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RAW, RUNS = ROOT / "benchmarks" / "results", ROOT / "experiments"
PAGE = ROOT / "docs" / "benchmarks.md"
QUICK = "81d3372"
"""Commit of the quick benches that the page shows."""
QUICK_ROWS = (
    ("async", "speed-up over `max_staleness` 0", "speedup", "{:.2f}"),
    ("async", "share of the ideal, the slower of generation and training alone", "share_of_ideal", "{:.2f}"),
    (
        "engine",
        "share of a hand-written greedy loop, 4.25 million parameters, batch 8",
        "share_of_limit 5M/8",
        "{:.2f}",
    ),
    ("engine", "tokens/s over `model.generate`, lognormal lengths", "over_generate", "{:.2f}"),
    ("engine", "tokens/s under pushes, `recompute` over `drain`, 2 rows", "interrupt_over_drain", "{:.2f}"),
    ("packing", "packed over padded rows", "speedup", "{:.2f}"),
    ("packing", "packed over padded rows sorted by length", "speedup_sorted", "{:.2f}"),
    ("trainer", "a step over its bare forward and backward passes, tokens/s", "ratio", "{:.2f}"),
    ("gateway", "added milliseconds of an answer, median", "p50_ms", "{:.1f}"),
    ("gateway", "added milliseconds of an answer, 99th percentile", "p99_ms", "{:.1f}"),
    ("orchestrator", "microseconds of a core per rollout", "overhead_us_per_rollout", "{:,.0f}"),
    ("rewards", "milliseconds of a trivial program in a sandbox, median", "sandbox_p50_ms", "{:.0f}"),
    ("rewards", "unit tests/s of programs with three tests", "unit_tests_per_s", "{:.0f}"),
    ("rewards", "mathematics, answers/s through a worker process", "math_per_s", "{:,.0f}"),
    ("swarm", "offers/s of one core through the ingress filter", "offers_per_s", "{:,.0f}"),
    ("swarm", "offers/s with the question drawn again", "with_receipt_per_s", "{:.0f}"),
)
ROOMS = {
    "demo.jsonl": ("engine", "trainer", "rollout", "experience", "run", "model"),
    "quick.jsonl": ("engine", "trainer", "rollout", "experience", "gateway", "reward", "swarm", "run"),
    "hostile.jsonl": ("swarm", "run"),
    "adversary.jsonl": ("swarm",),
    "frameworks.jsonl": ("gateway", "rollout"),
}
"""Rooms whose code a raw file measures, for the files with a commit in each row."""
EXPERIMENTS = (
    *("areal_staleness", "async_speedup", "interrupt", "packing", "question_pool", "rates", "sapo_stacked", "tito"),
)
"""Experiments whose tables `--experiments` makes again from their runs."""


def rows(name: str) -> list[dict[str, Any]]:
    """Rows of a raw file."""
    return [json.loads(line) for line in (RAW / name).read_text().splitlines() if line]


def table(head: Sequence[str], cells: Iterable[Iterable[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *cells))


def demo() -> str:
    """Every run of the demo from its own model whose commit was kept, in the order in which it was measured."""
    head = ("date", "commit", "seed", "held-out, sampled", "held-out, greedy", "whole demo")
    return table(
        head,
        (
            (
                one["date"],
                one["commit"],
                str(one["seed"]),
                *(
                    f"{one[f'{k}_before']:.0%} -> {one[f'{k}_after']:.0%}".replace("%", " %")
                    for k in ("accuracy", "greedy")
                ),
                f"{one['wall_s']:.0f} s",
            )
            for one in rows("demo.jsonl")
            if "commit" in one and "warm_start_of" not in one
        ),
    )


def quick() -> str:
    """The quick benches of one commit."""
    reports = {one["bench"]: one["report"] for one in rows("quick.jsonl") if one["commit"] == QUICK}

    def value(bench: str, path: str) -> float:
        found = reports[bench]
        for key in path.split(" "):
            found = found[key]
        return float(found)

    return "\n".join(
        f"- `{bench}`, {figure}: {form.format(value(bench, path))}" for bench, figure, path, form in QUICK_ROWS
    )


def arithmetic() -> str:
    """Share of right answers of the cookbook's arithmetic recipe."""
    runs: dict[int, list[dict[str, Any]]] = {}
    for one in rows("tinker_arithmetic.jsonl"):
        if one["steps"] == 100:
            runs.setdefault(one["seed"], []).append(one)
    means = (
        (
            str(seed),
            *(f"{fmean(one['correct'] for one in part):.2f}" for part in (run[:5], run[-5:])),
            f"{sum(one['seconds'] for one in run):.0f}",
        )
        for seed, run in sorted(runs.items())
    )
    return table(("seed", "first five steps", "last five steps", "seconds"), means)


def ages() -> str:
    """Commits since each raw file was measured, and the rooms that changed since."""
    cells = []
    for name, rooms in ROOMS.items():
        commit = next(one["commit"] for one in reversed(rows(name)) if name != "quick.jsonl" or one["commit"] == QUICK)
        paths = [f"src/shoal/{room}" for room in rooms]
        try:
            since = _git("rev-list", "--count", f"{commit}..HEAD", "--", *paths)
            changed = {path.split("/")[2] for path in _git("diff", "--name-only", commit, "HEAD", "--", *paths).split()}
            cells.append((f"`{name}`", commit, since, ", ".join(sorted(changed)) or "none"))
        except subprocess.CalledProcessError:
            cells.append((f"`{name}`", commit, "unknown", "unknown: the commit is not in this clone"))
    return table(("raw file", "measured at", "commits since", "rooms changed since"), cells)


def _git(*words: str) -> str:
    return subprocess.run(["git", "-C", ROOT, *words], check=True, capture_output=True, text=True).stdout.strip()


def page(text: str, *, with_ages: bool = False) -> str:
    """The page of benchmarks with its tables as the raw files have them."""
    made = {"demo": demo(), "quick": quick(), "arithmetic": arithmetic(), **({"ages": ages()} if with_ages else {})}
    for name, part in made.items():
        marks = re.compile(rf"(<!-- {name}:begin -->\n).*?(<!-- {name}:end -->)", re.DOTALL)
        if len(marks.findall(text)) != 1:
            raise ValueError(
                f"{PAGE}: expected <!-- {name}:begin --> and <!-- {name}:end --> once, on lines of their own"
            )
        text = marks.sub(lambda found, part=part: f"{found[1]}\n{part}\n\n{found[2]}", text)
    return text


def sentences() -> Iterator[tuple[Path, str]]:
    """Figures in sentences as the data has them: the page, and the text that must be on it."""
    latest = [one for one in rows("demo.jsonl") if one.get("commit") == "fb581f2"]
    before, after = ([f"{one[f'accuracy_{when}']:.0%}".rstrip("%") for one in latest] for when in ("before", "after"))
    said = "from {}, {} and {} % to {}, {} and {} %".format(*before, *after)
    yield ROOT / "README.md", said
    speedups = {
        one["eta"]: one["speedup"] for one in json.loads((RUNS / "async_speedup/results/results.json").read_text())
    }
    yield ROOT / "README.md", f"40 % accuracy {speedups[4]:.2f} times sooner"
    yield ROOT / "docs" / "experiments.md", f"40 % accuracy {speedups[4]:.2f} times sooner"
    calls = [one["calls"] for one in json.loads((RAW / "swarm_growth.json").read_text())["simulated"]]
    yield PAGE, "{:,.0f}, {:,.0f} and {:,.0f} function calls".format(*calls)
    ratios = [one["report"]["steps_ratio"] for one in rows("hostile.jsonl")]
    yield PAGE, f"between {min(ratios):.2f} and {max(ratios):.2f}".replace("0.95", ".95")
    packed = {one["sigma"]: one["speedup"] for one in json.loads((RUNS / "packing/results/results.json").read_text())}
    yield ROOT / "docs" / "experiments.md", f"{packed[1.0]:.2f} times as fast as padded ones"
    yield ROOT / "docs" / "experiments.md", f"with equal lengths {packed[0.0]:.2f}"
    found = json.loads((RAW / "architectures.json").read_text())["architectures"].values()
    models = Counter(one["word"] for one in found)
    link = "[architectures](docs/reference/models.md)"
    said = f"{models['computed']} {link} are computed as published, and {models['refused']} are refused"
    yield ROOT / "README.md", said


def wrong() -> list[str]:
    """Pages that say something else than their data."""
    found = [] if page(text := PAGE.read_text()) == text else [f"{PAGE.name}: a table differs; run `make docs`"]
    for path, said in sentences():
        if said not in " ".join(path.read_text().split()):
            found.append(f"{path.name}: expected {said!r}, as the raw data has it")
    return found


def remade() -> Iterator[str]:
    """Experiments whose table is not that of their runs."""
    for name in EXPERIMENTS:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(shutil.copytree(RUNS / name / "results", Path(folder) / "results"))
            kept = (copy / "results.md").read_text()
            command = [sys.executable, "-m", f"experiments.{name}", "--results", copy]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
            if done.returncode or (copy / "results.md").read_text() != kept:
                yield f"experiments/{name}/results/results.md differs from its runs {done.stderr[-200:]}"


def main(arguments: Sequence[str]) -> int:
    """Prints what differs and how old the data is."""
    found = [*wrong(), *(remade() if "--experiments" in arguments else ())]
    print("\n".join([*found, ages()]))
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
