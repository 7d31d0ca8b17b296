"""`shoal swarm demo` trains several nodes on each other's text, and the same nodes alone, on this machine.

Each node is a process with its own model, and all meet at a real NATS server. Training nodes have models of two sizes
with two tokenizers, and their own questions. Two generators do not train: a frozen model behind an OpenAI URL, and a
rule. The training nodes first train alone with 8 own groups per step, then alone with 4, which is half of the answers
to draw. Last they train in the swarm, with 4 own groups and up to 4 external. Models and seeds are equal each time.
"""

import asyncio
import io
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from pydantic import JsonValue

from shoal.config import Config, parse, to_toml
from shoal.errors import ChildDied
from shoal.net.process import PARENT
from shoal.observe.metrics import read_records
from shoal.observe.report.figure import COLOURS, MUTED, STYLE
from shoal.run.demo_model.warm_start import REWRITE, Recipe, demo_model
from shoal.run.join_swarm import FOLDER
from shoal.swarm.peer import STATUS_FILE
from shoal.swarm.trust.refusals import Reason
from shoal.swarm.wire.server import NatsServer, ServerOptions

GROUPS = 8
"""Groups per step: all own when alone, half of them external in the swarm."""
LARGE = Recipe()
SMALL = Recipe(width=64, heads=2, feed_forward=128, steps=400, slip_share=0.8, tokenizer="pairs")
FROZEN = Recipe(width=96, steps=400, slip_share=0.3, seed=7)
GENERATORS = ("frozen", "rule")
EXCHANGE: dict[str, JsonValue] = {"share": "informative", "take": "uniform", "reuse": 2}
PAUSE_S = 0.25
"""Seconds between two groups of a generator."""
START_TIMEOUT_S = 120.0
MAIN = "from shoal.net.process import die_with_parent; die_with_parent(); from shoal.cli import main; main()"


class DemoCondition(StrEnum):
    """Condition under which a node trains."""

    SOLO = "solo"
    """Training alone, with as many groups per step as in the swarm."""
    SOLO_HALF = "solo_half"
    """Training alone, with as many own groups as in the swarm: the swarm without its external groups."""
    SWARM = "swarm"


STYLES = (
    (DemoCondition.SOLO, "--", "alone"),
    (DemoCondition.SOLO_HALF, ":", "alone, half the answers"),
    (DemoCondition.SWARM, "-", "swarm"),
)


@dataclass(frozen=True, slots=True)
class Trainee:
    """A training node."""

    name: str
    recipe: Recipe
    seed: int


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """Settings of a demonstration."""

    folder: Path
    nodes: int = 4
    steps: int = 120
    seed: int = 0
    questions: int = 256
    """Held-out questions asked of each node."""
    recipes: tuple[tuple[str, Recipe], ...] = (("large", LARGE), ("small", SMALL))
    """Recipes of the training nodes' models, in turn."""
    frozen: Recipe = FROZEN
    conditions: tuple[DemoCondition, ...] = tuple(DemoCondition)
    """Conditions to compare; `SWARM` is among them."""

    @property
    def trainees(self) -> list[Trainee]:
        """All training nodes, large and small in turn."""
        found = []
        for i in range(self.nodes - len(GENERATORS)):
            turn, place = divmod(i, len(self.recipes))
            kind, recipe = self.recipes[place]
            found.append(Trainee(f"{kind}-{turn + 1}" if turn else kind, recipe, 1000 * self.seed + i))
        return found


def run_swarm_demo(plan: DemoPlan) -> dict[str, object]:
    """Runs the demonstration; returns the figures and the picture's path. Raises a `ShoalError`."""
    began_s = time.monotonic()
    models = {trainee.name: demo_model(trainee.recipe)[0] for trainee in plan.trainees}
    frozen = demo_model(plan.frozen)[0]
    made_s = time.monotonic() - began_s
    plan.folder.mkdir(parents=True, exist_ok=True)
    outcomes = asyncio.run(_each_condition(plan, models, frozen))
    names = [trainee.name for trainee in plan.trainees]
    picture = plan.folder / "swarm.png"
    styles = [style for style in STYLES if style[0] in plan.conditions]
    picture.write_bytes(swarm_png(plan.folder, styles, names, _external_shares(plan)))
    return {
        "before": {name: outcomes[plan.conditions[0]][name]["accuracy_before"] for name in names},
        **{
            condition.value: {name: outcomes[condition][name]["accuracy_after"] for name in names}
            for condition in plan.conditions
        },
        **_traffic(plan),
        "external_per_step": _external_shares(plan),
        "picture": str(picture),
        "warm_start_s": made_s,
        "wall_s": time.monotonic() - began_s - made_s,
    }


async def _each_condition(
    plan: DemoPlan, models: dict[str, Path], frozen: Path
) -> dict[DemoCondition, dict[str, dict[str, float]]]:
    """Outcomes of `shoal train` by condition and node."""
    found: dict[DemoCondition, dict[str, dict[str, float]]] = {}
    for condition in (one for one in plan.conditions if one is not DemoCondition.SWARM):
        found[condition] = await _train_all(
            plan, [node_config(plan, one, models[one.name], condition) for one in plan.trainees]
        )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(NatsServer(ServerOptions(plan.folder / "server")))
        configs = [node_config(plan, one, models[one.name], DemoCondition.SWARM, server.url) for one in plan.trainees]
        url = await stack.enter_async_context(_serve_model(plan, frozen))
        for name, how in (("frozen", ["--model-url", url]), ("rule", ["--rule", "truth"])):
            path, folder = _written(plan, name, configs[0]), plan.folder / name
            command = ["swarm", "join", str(path), *how, f"--run_dir={folder}", "--every", str(PAUSE_S)]
            await _wait_until_joined(plan, name, await stack.enter_async_context(_child(plan, name, command)))
        found[DemoCondition.SWARM] = await _train_all(plan, configs)
    return found


def node_config(plan: DemoPlan, trainee: Trainee, model: Path, condition: DemoCondition, server: str = "") -> Config:
    """Builds the configuration of one node; conditions differ in the groups and their sources only."""
    return parse(
        {
            "run_dir": str(plan.folder / f"{condition}-{trainee.name}"),
            "seed": trainee.seed,
            "model": {"path": str(model)},
            "tasks": [
                {
                    "name": "spell_backward",
                    "params": {"min_word_len": 3, "max_word_len": 5},
                    "rewrite": [list(pair) for pair in REWRITE],
                    "reward": "correct",
                }
            ],
            "rollout": {"group_size": 8, "max_tokens": 12},
            "engine": {"gpus": "shared"},
            "asynchrony": {"max_staleness": 2},
            "train": {
                "steps": plan.steps,
                "groups_per_step": GROUPS if condition is DemoCondition.SOLO else GROUPS // 2,
                "lr": 3e-4,
                "warmup_steps": 5,
            },
            "eval": {"every_steps": max(1, plan.steps // 4), "questions": plan.questions},
            "checkpoint": {"every_steps": max(1, plan.steps)},
            "swarm": {"servers": [server], "external_groups": GROUPS // 2, **EXCHANGE}
            if condition is DemoCondition.SWARM
            else {},
        }
    )


async def _train_all(plan: DemoPlan, configs: Sequence[Config]) -> dict[str, dict[str, float]]:
    """Trains all nodes at once; returns each outcome by node name."""

    async def one(config: Config) -> tuple[str, dict[str, float]]:
        name = Path(config.run_dir).name
        path = _written(plan, name, config)
        async with _child(plan, name, ["train", str(path), "--json"]) as process:
            assert process.stdout is not None
            said = (await process.stdout.read()).decode()
            if await process.wait() != 0:
                raise ChildDied(f"node {name} ended with code {process.returncode}; see {_log(plan, name)}")
        outcome: dict[str, float] = json.loads(said.splitlines()[-1])
        return name.partition("-")[2], outcome

    return dict(await asyncio.gather(*(one(config) for config in configs)))


async def _wait_until_joined(plan: DemoPlan, name: str, process: asyncio.subprocess.Process) -> None:
    """Waits until a generator is at work. Raises `ChildDied`."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not (plan.folder / name / FOLDER / STATUS_FILE).exists():
        if process.returncode is not None or time.monotonic() > deadline_s:
            raise ChildDied(f"{name} did not join the swarm; see {_log(plan, name)}")
        await asyncio.sleep(0.1)


@asynccontextmanager
async def _serve_model(plan: DemoPlan, model: Path) -> AsyncIterator[str]:
    """Serves a frozen model; yields its URL, with /v1."""
    command = ["serve", "--model", str(model), "--port", "0"]
    async with _child(plan, "frozen-model", command) as process:
        assert process.stdout is not None
        async with asyncio.timeout(START_TIMEOUT_S):
            line = (await process.stdout.readline()).decode().strip()
        if not line:
            raise ChildDied(f"the frozen model did not start; see {_log(plan, 'frozen-model')}")
        yield line


@asynccontextmanager
async def _child(plan: DemoPlan, name: str, arguments: Sequence[str]) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs a `shoal` command in a process that ends with this block or with this process."""
    with _log(plan, name).open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            MAIN,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env={**os.environ, PARENT: str(os.getpid())},
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


def _log(plan: DemoPlan, name: str) -> Path:
    return plan.folder / f"{name}.log"


def _written(plan: DemoPlan, name: str, config: Config) -> Path:
    path = plan.folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


def _traffic(plan: DemoPlan) -> dict[str, object]:
    """Counts all offers, the training nodes' refusals by reason, and the bytes that one node shared per step."""
    nodes = [f"{DemoCondition.SWARM}-{trainee.name}" for trainee in plan.trainees]
    statuses = {
        name: json.loads((plan.folder / name / FOLDER / STATUS_FILE).read_text()) for name in (*nodes, *GENERATORS)
    }
    refused = Counter[str]()
    for name in nodes:
        refused.update(statuses[name]["refused"])
    del refused[Reason.OWN.value]
    given = sum(statuses[name]["shared_bytes"] for name in nodes)
    return {
        "offers": {name: status["shared"] for name, status in statuses.items()},
        "refused": dict(refused),
        "bytes_per_step": given / (plan.steps * len(nodes)),
    }


def _external_shares(plan: DemoPlan) -> dict[str, float]:
    """External groups that each training node trained per step, of the 4 it wanted."""
    found = {}
    for trainee in plan.trainees:
        records = read_records(plan.folder / f"{DemoCondition.SWARM}-{trainee.name}" / "metrics.jsonl")
        found[trainee.name] = sum(float(str(r["external"])) for r in records if r["kind"] == "step") / plan.steps
    return found


def swarm_png(
    folder: Path, styles: Sequence[tuple[str, str, str]], names: Sequence[str], external: Mapping[str, float]
) -> bytes:
    """Plots the runs of a folder; a style is (condition, line style, legend), `external` the external groups per
    step."""
    with rc_context(STYLE):  # type: ignore[arg-type]  # its stub knows fixed keys only
        figure = Figure(figsize=(11, 4.5), layout="constrained", facecolor="white")
        curves, bars = figure.subplots(1, 2, width_ratios=[2.2, 1])
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            for condition, style, words in styles:
                steps, accuracy = _evaluations(folder / f"{condition}-{name}" / "metrics.jsonl")
                curves.plot(steps, accuracy, style, color=colour, label=f"{name}, {words}", marker="o", ms=3)
        curves.set_title("held-out accuracy, sampled")
        curves.set_xlabel("step", color=MUTED)
        curves.set_ylim(0, 1)
        curves.yaxis.set_major_formatter(PercentFormatter(1.0))
        curves.legend(loc="upper left", ncols=2)
        bars.bar(list(names), [external[name] for name in names], color=list(COLOURS * len(names))[: len(names)])
        bars.set_title("groups of others trained per step")
        data = io.BytesIO()
        figure.savefig(data, format="png", dpi=150)
    return data.getvalue()


def _evaluations(path: Path) -> tuple[list[float], list[float]]:
    found = [(float(str(r["step"])), float(str(r["sampled"]))) for r in read_records(path) if r["kind"] == "eval"]
    return [step for step, _ in found], [value for _, value in found]
