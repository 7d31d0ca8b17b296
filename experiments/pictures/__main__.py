"""`python -m experiments.pictures [--steps 120] [--results DIR]`: see claim.md."""

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from pydantic import JsonValue

from experiments.grid import Record
from shoal.config import parse, to_toml
from shoal.net.process import PARENT
from shoal.observe.metrics import read_records
from shoal.run.demo_model.architecture import Shape, save, untrained
from shoal.run.join_swarm import FOLDER
from shoal.swarm.peer import STATUS_FILE
from shoal.swarm.wire.server import NatsServer, ServerOptions

HERE = Path(__file__).parent
GLYPHS = HERE.parents[1] / "examples" / "modalities" / "glyphs.py"
RULES = 5
TEXT_STEPS = 10
SIDE = 6
"""Dots of a grid's side: 80 grids, of which a fifth is held out. A node takes each grid once of each rule."""
COMMAND = "from shoal.net.process import die_with_parent; die_with_parent(); from shoal.cli import main; main()"


def main(arguments: Sequence[str]) -> None:
    """Runs the experiment."""
    parser = argparse.ArgumentParser(prog="python -m experiments.pictures")
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="shoal-pictures-") as folder:
        found = asyncio.run(measured(Path(folder), options.steps))
    options.results.mkdir(parents=True, exist_ok=True)
    (options.results / "results.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found))


async def measured(folder: Path, steps: int) -> Record:
    """A reader and a text node in a swarm of rules that share pictures; beside them the reader alone."""
    save(untrained(Shape(width=64, heads=2, feed_forward=128, context=128), 0), folder / "tiny")
    words = folder / "words.jsonl"
    words.write_text("\n".join(json.dumps({"prompt": f"say {c}", "answer": c}) for c in "abcdefghijklmnop"))
    spelled: dict[str, JsonValue] = {"name": "words", "service": "jsonl", "path": str(words), "scorer": "exact"}
    async with NatsServer(ServerOptions(folder / "server")) as server:
        config = configured(folder, "rules", glyphs("Pictures"), steps, [server.url])
        line = ["swarm", "join", str(config), "--rule", "truth", "--every", "0.125"]
        rules = [await started([*line, f"--run_dir={folder / f'rule{i}'}"], folder / "rules.log") for i in range(RULES)]
        reader = configured(folder, "reader", glyphs("Grids"), steps, [server.url])
        text = configured(folder, "text", spelled, TEXT_STEPS, [server.url])
        alone = configured(folder, "alone", glyphs("Grids"), steps, [])
        nodes = [await started(["train", str(one)], folder / f"{one.stem}.log") for one in (reader, text, alone)]
        codes = [await node.wait() for node in nodes]
        for rule in rules:
            rule.send_signal(signal.SIGINT)
        await asyncio.gather(*(rule.wait() for rule in rules))
    if any(codes):
        raise RuntimeError(
            f"experiments.pictures: a node ended with {codes}; {(folder / 'reader.log').read_text()[-800:]}"
        )
    return {
        "steps": steps,
        "reader": {**curve(folder / "reader"), **received(folder / "reader")},
        "alone": curve(folder / "alone"),
        "text": received(folder / "text"),
    }


def glyphs(name: str) -> dict[str, JsonValue]:
    """A task of the example, with grids of `SIDE` dots."""
    return {"name": "glyphs", "service": "python", "path": f"{GLYPHS}:{name}", "params": {"side": SIDE}}


def configured(folder: Path, name: str, task: dict[str, JsonValue], steps: int, servers: list[JsonValue]) -> Path:
    """Writes the configuration of a node; without servers it trains alone."""
    swarm: dict[str, JsonValue] = {"servers": servers, "take": "uniform"}
    if servers:
        swarm |= {"external_groups": 8, "reuse": 4, "wait_s": 10.0 if name == "reader" else 0.0}
    config = parse(
        {
            "run_dir": str(folder / name),
            "model": {"path": str(folder / "tiny")},
            "tasks": [task],
            "rollout": {"group_size": 4, "max_tokens": 2},
            "train": {"steps": steps, "groups_per_step": 1, "lr": 1e-3},
            "eval": {"every_steps": max(1, steps // 4), "questions": 64},
            "checkpoint": {"every_steps": 1_000_000},
            "swarm": swarm,
        }
    )
    path = folder / f"{name}.toml"
    path.write_text(to_toml(config))
    return path


async def started(arguments: list[str], log: Path) -> asyncio.subprocess.Process:
    """Starts a command of Shoal that ends with this process."""
    with log.open("ab") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            COMMAND,
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, PARENT: str(os.getpid())},
        )


def curve(run: Path) -> Record:
    """Held-out accuracy by step, sampled; own reward in the last quarter; the groups of peers trained in all."""
    records = read_records(run / "metrics.jsonl")
    own = [float(str(one["reward"])) for one in records if one.get("kind") == "step"]
    return {
        "own_reward": fmean(own[-max(1, len(own) // 4) :]),
        "accuracy": [[one["step"], one["sampled"]] for one in records if one.get("kind") == "eval"],
        "external": sum(float(str(one.get("external", 0))) for one in records if one.get("kind") == "step"),
    }


def received(run: Path) -> Record:
    """What became of the offers that a node got."""
    status = json.loads((run / FOLDER / STATUS_FILE).read_text())
    return {"admitted": status["admitted"], "taken": status["taken"], "refused": status["refused"]}


if __name__ == "__main__":
    main(sys.argv[1:])
