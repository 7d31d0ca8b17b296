"""`python -m experiments.sapo_real [--quick] [--only KEY] [--cells N] [--results D]`: see claim.md."""

import asyncio
import sys
import tempfile
import tomllib
from pathlib import Path

from pydantic import JsonValue

from experiments.grid import Record
from experiments.judge_figure.__main__ import table
from experiments.judge_figure.comparison import compare, comparison_png
from experiments.sapo.cells import Cells, keys_of
from experiments.sapo.node import FRESH_S, WAIT_S, run_nodes
from experiments.sapo_real.equal_time import equal_time, judged
from experiments.sapo_real.specialties import node, own_tasks, started
from experiments.sapo_real.warm import warm_model
from shoal.config import Config, parse
from shoal.model.quantised import SMOLLM2
from shoal.run.demo_model.architecture import Shape, save, untrained

HERE = Path(__file__).parent
PAPERS_GROUPS = 8
WARM = Path("runs") / "sapo-warm"
"""Model after the lessons; it is made once."""


def main(arguments: list[str]) -> None:
    """Runs the experiment, or what is left of it."""
    cells = Cells.asked(arguments, HERE)
    plan = tomllib.loads((HERE / "experiment.toml").read_text())
    size = plan["quick" if cells.quick else "size"]
    planned = keys_of({SMOLLM2: None}, ["4/4"] if cells.quick else plan["cells"], [0] if cells.quick else plan["seeds"])
    with tempfile.TemporaryDirectory(prefix="shoal-sapo-real-") as made:
        model, tasks = "", own_tasks()
        if cells.quick:  # random weights: the form of a run, and no finding
            save(untrained(Shape(width=32), 0), Path(made))
            model = made
        elif cells.most != 0:
            model = str(warm_model(WARM))
            tasks = started(cells.results, model, size["each"], size["start_s"])

        def measure(key: str, folder: Path) -> Record:
            _, cell, seed = key.split(":")

            def config_of(run: Path, number: int, server: str) -> Config:
                return node_config(run, node(model, tasks, size["each"]), cell, 1000 * int(seed) + number, size, server)

            return asyncio.run(run_nodes(folder, size["nodes"], config_of, shares=not cell.endswith("/0")))

        failed = cells.run(planned, measure)
    write(cells, planned, plan)
    cells.end(failed)


def node_config(
    run: Path, tree: dict[str, JsonValue], cell: str, seed: int, size: dict[str, int], server: str
) -> Config:
    """The recipe as one node of a cell: I and J are shares of a round's groups."""
    own, external = (int(part) * size["groups"] // PAPERS_GROUPS for part in cell.split("/"))
    swarm: dict[str, JsonValue] = {"external_groups": 0}
    if external:
        offers = own * (size["nodes"] - 1)
        swarm = {"servers": [server], "external_groups": external, "round_offers": offers}
        swarm |= {"wait_s": WAIT_S, "fresh_s": FRESH_S}
    settings = [f"train.groups_per_step={own}", f"train.steps={size['rounds']}", f"seed={seed}"]
    settings += [f"eval.every_steps={size['every']}", f"eval.questions={size['questions']}"]
    lasting: dict[str, JsonValue] = {"checkpoint": {"every_steps": size["rounds"]}, "stall_s": FRESH_S}
    lasting["engine"] = {"max_running": 32, "max_model_len": size["context"]}  # nodes share one machine's memory
    return parse({**tree, **lasting, "run_dir": str(run), "swarm": swarm}, settings)


def write(cells: Cells, planned: list[str], plan: Record) -> None:
    """Tables and figures of the runs that are there."""
    bin_rounds = int(str(plan["bin_rounds"]))
    found = cells.found(planned)
    points = compare(judged(found), bin_rounds=bin_rounds)
    cells.write(planned, plan["beside"], equal_time(found), table(points))
    if points:
        (cells.results / "figure3.png").write_bytes(comparison_png(points, bin_rounds))


if __name__ == "__main__":
    main(sys.argv[1:])
