"""`shoal engine join`, `rewards serve` and `task serve` work for runs from other processes or machines."""

import dataclasses
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.output import JsonFlag, show, until_stopped

engines = typer.Typer(name="engine", help="Bring engines to runs of other hosts.", no_args_is_help=True)
trainers = typer.Typer(name="trainer", help="Bring ranks to runs of other hosts.", no_args_is_help=True)
rewards = typer.Typer(name="rewards", help="Score answers for runs on other machines.", no_args_is_help=True)
tasks = typer.Typer(name="task", help="Serve tasks to a run from separate processes.", no_args_is_help=True)
TEMPLATES = Path(__file__).parents[1] / "cluster" / "templates"
clusters = typer.Typer(name="cluster", help="Bring runs to clusters.", no_args_is_help=True)
software = typer.Typer(name="tasks", help="Make software tasks.", no_args_is_help=True)
groups = (software, engines, trainers, rewards, tasks, clusters)


@engines.command("join")
def join_engine(
    run_url: Annotated[str, typer.Argument(metavar="RUN_URL", help="The run's address, http://HOST:PORT.")],
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- COMMAND]", help="As in: -- vllm serve {model} --port {port}."),
    ] = None,
    folder: Annotated[Path, typer.Option(help="Where models and Versions are kept on this host.")] = Path(
        "shoal-engine"
    ),
    host: Annotated[str, typer.Option(help="Address to listen at; the one that reaches the run when unset.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 picks a free one.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda; the run's setting when unset.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Cores that compute; all when 0.")] = 0,
) -> None:
    """Answer for a run, with Shoal's engine or a command's, until stopped.

    SHOAL_RUN_TOKEN is the run's token. Weights are pulled to this host's disk. The run goes on when the engine leaves.
    """
    from shoal.cluster.engine_role import EngineHost
    from shoal.net.client import TOKEN_VARIABLE

    token = os.environ.get(TOKEN_VARIABLE, "")
    role = EngineHost(run_url.rstrip("/"), token, folder.absolute(), command or (), host, port, device, threads)
    until_stopped(role.run(partial(print, flush=True)))


@trainers.command("join")
def join_trainer(
    run_url: Annotated[str, typer.Argument(metavar="RUN_URL", help="The run's address, http://HOST:PORT.")],
    folder: Annotated[Path, typer.Option(help="Where the model is kept on this host.")] = Path("shoal-trainer"),
    host: Annotated[str, typer.Option(help="Address for other ranks; the one that reaches the run when unset.")] = "",
    threads: Annotated[int, typer.Option(min=0, help="Cores that compute; all when 0.")] = 0,
) -> None:
    """Train for a run as one of its ranks, until stopped.

    SHOAL_RUN_TOKEN is the run's token. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT of a launcher number the ranks,
    and LOCAL_RANK or SLURM_LOCALID the GPU; without them the run does.
    """
    from shoal.cluster.rank_role import RankHost
    from shoal.net.client import TOKEN_VARIABLE
    from shoal.run.machine.devices import gpu_bytes, gpus_present, launched_gpu, visible_gpus

    token = os.environ.get(TOKEN_VARIABLE, "")
    gpu = launched_gpu(os.environ, visible_gpus(os.environ, len(gpus_present())))
    role = RankHost(run_url.rstrip("/"), token, folder.absolute(), host, threads, gpu, gpu_bytes())
    until_stopped(role.run(partial(print, flush=True)))


@rewards.command("serve")
def serve_rewards(
    run: Annotated[str, typer.Option(metavar="RUN_URL", help="The run's address, http://HOST:PORT.")],
    workers: Annotated[int | None, typer.Option(min=1, help="Processes, and sandboxes at once; one per core.")] = None,
    timeout_s: Annotated[float, typer.Option(min=0.01, help="Deadline of one score, queueing not counted.")] = 5.0,
    log: Annotated[Path, typer.Option(help="File for the output of worker processes that cannot start.")] = Path(
        os.devnull
    ),
) -> None:
    """Score answers for a run with reward.workers = 0, until stopped.

    SHOAL_RUN_TOKEN is the run's token.
    """
    from shoal.cluster.rewards_role import serve_rewards as serve
    from shoal.config import RewardConfig
    from shoal.net.client import TOKEN_VARIABLE
    from shoal.net.process import cores

    config = RewardConfig(workers=workers or cores(), timeout_s=timeout_s)
    token = os.environ.get(TOKEN_VARIABLE, "")
    until_stopped(serve(run.rstrip("/"), token, config, log, partial(print, flush=True)))


@tasks.command("serve")
def serve_task(
    task: Annotated[str, typer.Argument(metavar="MODULE:TASK", help="As in `import`, from this folder too.")],
    orchestrator: Annotated[str, typer.Option(metavar="URL", help="The run's address for tasks.")],
    name: Annotated[str | None, typer.Option(help="As the run calls it; the task's own name when unset.")] = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="Rollouts at once; the task's own when unset.")] = None,
) -> None:
    """Draw, roll out and score a task for a run, until stopped.

    SHOAL_RUN_TOKEN is the run's token; without `cluster.listen` a run of this user on this machine needs none.
    """
    from shoal.net.client import TOKEN_VARIABLE
    from shoal.tasks.remote_worker import RemoteWorker
    from shoal.tasks.sdk import definition_at

    served = definition_at(task)
    served = dataclasses.replace(served, name=name or served.name, max_running=max_running or served.max_running)
    worker = RemoteWorker(served, orchestrator, os.environ.get(TOKEN_VARIABLE, ""))
    until_stopped(worker.run(partial(print, f"{served.name} {served.version}:", flush=True)))


@software.command("from-package")
def plant_faults(
    package: Annotated[str, typer.Argument(metavar="PACKAGE", help="Folder, .tar.gz, or a name that pip downloads.")],
    out: Annotated[Path, typer.Option(help="Folder of the sets; each package has a folder in it.")] = Path("tasks"),
    most: Annotated[int, typer.Option(min=1, help="Tasks to make at most.")] = 150,
    limit_s: Annotated[float, typer.Option(min=1, help="Seconds in which faults are tried.")] = 1800.0,
    seed: Annotated[int, typer.Option(help="Seed of the faults' order.")] = 0,
    json_: JsonFlag = False,
) -> None:
    """Plant faults in a package that its own tests notice, and write each as a software task.

    The package's tests run in the sandbox, with the packages of this environment. Needs shoal[swe].
    """
    from shoal.errors import TaskError

    try:
        from shoal.software.planting import make_set
    except ModuleNotFoundError as error:
        raise TaskError(f"tasks from a package need {error.name}; install shoal[swe]") from None
    show(make_set(package, out, most=most, limit_s=limit_s, seed=seed), json_)


@software.command("read")
def read_tasks(
    source: Annotated[Path, typer.Argument(help="Folder of Harbor or terminal-bench, a set, or a file of instances.")],
    out: Annotated[Path, typer.Option(help="File of tasks, as the environment `workspace` takes it.")],
    trees: Annotated[Path | None, typer.Option(help="Folder of the instances' repositories.")] = None,
    check: Annotated[int, typer.Option(min=0, help="Tasks to judge: their solutions, and doing nothing.")] = 0,
    json_: JsonFlag = False,
) -> None:
    """Read tasks of Harbor, terminal-bench, SWE-bench or SWE-smith as tasks of a workspace.

    Prints how many of the checked ones only their solution solves, and the seconds of a verdict.
    """
    from shoal.software.checking import read

    show(read(source, out, trees, check), json_)


@clusters.command("template")
def print_template(
    kind: Annotated[str, typer.Argument(help="slurm, kuberay, kubernetes or skypilot.")],
) -> None:
    """Print the file that starts a run on a cluster."""
    from shoal.errors import ConfigError, expected_one_of

    known = {path.stem: path for path in sorted(TEMPLATES.iterdir())}
    if kind not in known:
        raise ConfigError(f"template: {expected_one_of(known, kind)}")
    print(known[kind].read_text(), end="")
