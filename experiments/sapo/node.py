"""The nodes of a cell: `shoal train` processes that meet at a NATS server, and what they wrote."""

import asyncio
import random
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil
from pydantic import JsonValue

from benchmarks.processes import SHOAL, started
from experiments.grid import Record
from experiments.sapo_stacked.questions import SETTINGS, SHORTER
from shoal.config import Config, TaskConfig, parse, to_toml
from shoal.errors import ChildDied, ConfigError
from shoal.experience.audit import audit
from shoal.observe.metrics import read_records
from shoal.swarm.wire.server import NatsServer, ServerOptions
from shoal.types import seed_for

CONTROLS = ("same", "shuffled", "order", "again")
"""Names after a cell's, as in 4/4-same.

`same` and `shuffled` are in control.py. With `order` each node has the specialties in an order of its own, by chance;
`again` is the cell once more.
"""
START_APART_S = 2.0
"""Seconds between two starts: what is imported once is in memory for the next."""
WAIT_S = 600.0
"""Seconds that a step waits for the offers of its round: on a busy machine too, nodes stay in step with one another."""
FRESH_S = 3600.0
REWRITE = [
    (r"^\s+|\s+$", ""),
    *((f"(?s){pattern}", replacement) for pattern, replacement in SHORTER),
    ("base-", ""),
    ("binary", "2"),
]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large."""

    nodes: int = 8
    rounds: int = 40
    each: int = 8
    """Answers to one question."""
    lr: float = 1e-3
    questions: int = 90
    """Held-out questions of each evaluation."""
    every: int = 0
    """Rounds between evaluations; 0 evaluates only before and after."""
    warm_steps: int = 800
    width: int = 64


def tasks() -> list[JsonValue]:
    """The nine specialties, each with the exact truth as its scorer."""
    rewrite = [list(pair) for pair in REWRITE]
    return [
        {"name": name, "params": settings, "rewrite": rewrite, "scorer": "exact"} for name, settings in SETTINGS.items()
    ]


def task_configs() -> list[TaskConfig]:
    """The specialties as the warm start draws them."""
    return [TaskConfig.model_validate(task) for task in tasks()]


def node_config(folder: Path, model: Path, cell: str, seed: int, scale: Scale, server: str = "") -> Config:
    """One node: I own and J external groups a round, everything else as `preset = "sapo"` has it."""
    split, _, control = cell.partition("-")
    own, external = map(int, split.split("/"))
    asked = tasks()
    if control == "order":
        random.Random(seed_for("order of specialties", seed)).shuffle(asked)
    swarm = swarm_settings(server, own, external, scale) if external else {"external_groups": 0}
    return parse({**settings(folder, model, asked, own, scale), "seed": seed, "swarm": swarm})


def settings(folder: Path, model: Path, asked: list[JsonValue], own: int, scale: Scale) -> dict[str, JsonValue]:
    """Settings of a node that trains `own` groups of its own a step."""
    return {
        "run_dir": str(folder),
        "preset": "sapo",
        "model": {"path": str(model)},
        "tasks": asked,
        "rollout": {"group_size": scale.each, "max_tokens": 10, "ratios": "fixed"},  # as recorded; 4/4-order needs it
        "engine": {"gpus": "shared"},
        "asynchrony": {"max_staleness": 0},
        "train": {"steps": scale.rounds, "groups_per_step": own, "lr": scale.lr, "warmup_steps": 0},
        "eval": {"every_steps": scale.every or scale.rounds, "questions": scale.questions},
        "checkpoint": {"every_steps": scale.rounds},
        "stall_s": FRESH_S,
        "reward": {"workers": 1},
    }


def swarm_settings(server: str, own: int, external: int, scale: Scale) -> dict[str, JsonValue]:
    """Settings of a swarm whose nodes stay in step."""
    return {
        "servers": [server],
        "external_groups": external,
        "round_offers": own * (scale.nodes - 1),
        "wait_s": WAIT_S,
        "fresh_s": FRESH_S,
    }


async def run_cell(folder: Path, model: Path, cell: str, seed: int, scale: Scale) -> Record:
    """All nodes of a cell at once; the record has the form of the stacked simulation's, and seconds of processor."""
    _, _, control = cell.partition("-")
    if control not in ("", *CONTROLS):
        raise ConfigError(f"expected a control of {', '.join(CONTROLS)}, got {control!r}")

    def config_of(run: Path, node: int, server: str) -> Config:
        return node_config(run, model, cell, 1000 * seed + node, scale, server)

    return await run_nodes(folder, scale.nodes, config_of, shares="/0" not in cell, control=control)


async def run_nodes(
    folder: Path, nodes: int, config_of: Callable[[Path, int, str], Config], *, shares: bool, control: str = ""
) -> Record:
    """Nodes at once, with a server if they share; `config_of` gets run directory, number and server's address."""
    runs = [folder / f"node-{i}" for i in range(nodes)]
    async with AsyncExitStack() as stack:
        url = ""
        if shares:
            url = (await stack.enter_async_context(NatsServer(ServerOptions(folder / "server")))).url
        configs = [config_of(run, i, url) for i, run in enumerate(runs)]
        before_s, began_s = processor_s(), time.time()
        async with asyncio.TaskGroup() as group:
            start = group.create_task(start_s(runs, began_s))
            await train_all(configs, control)
        used_s = processor_s() - before_s
    record = record_of(runs, configs[0].train.groups_per_step, configs[0].train.steps)
    return {**record, "processor_s": round(used_s, 1), "start_s": round(start.result(), 1)}


async def start_s(runs: Sequence[Path], began_s: float) -> float:
    """Seconds of processor of the running nodes when each has ended its first evaluation: what all cells have alike.

    Processes that were there before `began_s` (Unix time) are not theirs.
    """
    while True:
        if all(_evaluated(run / "metrics.jsonl") for run in runs):
            break
        await asyncio.sleep(1)
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.create_time() > began_s - 0.5:  # clocks of kernel and process differ by less
                used += sum(process.cpu_times()[:4])
    return used


def _evaluated(metrics: Path) -> bool:
    return metrics.exists() and any(one["kind"] == "eval" for one in read_records(metrics))


def processor_s() -> float:
    """Seconds of processor of the processes that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def train_all(configs: Iterable[Config], control: str = "") -> None:
    """Trains nodes at once, each to its end; the first that fails ends the others. Raises `ChildDied`, in a group."""
    async with asyncio.TaskGroup() as group:
        for config in configs:
            path = Path(f"{config.run_dir}.toml")
            await asyncio.to_thread(path.write_text, to_toml(config))
            group.create_task(_train(path, control))
            await asyncio.sleep(START_APART_S)


async def _train(config: Path, control: str) -> None:
    """One node, to its end. Raises `ChildDied`."""
    command = [*SHOAL, "train", str(config), "--json"]
    if control in ("same", "shuffled"):
        command = ["-m", "experiments.sapo.control", str(config), control]
    process = await started(command, config.with_suffix(".log"))
    try:
        code = await process.wait()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()
    if code:
        raise ChildDied(f"{config.stem} ended with code {code}; see {config.with_suffix('.log')}")


def record_of(runs: Sequence[Path], own: int, rounds: int) -> Record:
    """Own reward by round and node, held-out accuracy, groups of peers, and whether every log passes its audit."""
    records = [read_records(run / "metrics.jsonl") for run in runs]
    steps = [[one for one in found if one["kind"] == "step"] for found in records]
    rewards = [[float(str(one["reward"])) for one in found] for found in steps]
    if any(len(curve) != rounds for curve in rewards):
        raise ChildDied(f"expected {rounds} rounds of each node, got {[len(curve) for curve in rewards]}")
    taken = [[float(str(one.get("external", 0))) for one in found] for found in steps]
    evals = [[one for one in found if one["kind"] == "eval"] for found in records]
    refused = [audit(run) for run in runs]
    return {
        "rewards": [[round(value, 4) for value in row] for row in zip(*rewards, strict=True)],
        "own": [float(own)] * rounds,
        "taken": [round(fmean(row), 3) for row in zip(*taken, strict=True)],
        "evaluations": [
            [int(str(same[0]["step"])), round(fmean(float(str(one["sampled"])) for one in same), 4)]
            for same in zip(*evals, strict=True)
        ],
        "cumulative": round(sum(map(sum, rewards)), 2),
        "audits_clean": sum(report.ok for report in refused),
    }
