"""A run whose engines, ranks and scorer Ray places on three hosts; two hosts are killed and one joins.

Each host has a network, processes, files and a user of its own where this machine allows (`benchmarks.hosts`). One with
an engine dies first, then a host joins, then one with a rank dies. A task service, which nobody restarts, is started
again by hand where its host dies.

recovered_s    seconds until as many engines are there again, and until the next step is trained
lost, doubled  groups that the log does not account for; groups that were trained twice
"""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import Report, child_environment, say
from benchmarks.hosts import RESOURCES, UNSHARED, Hosts, Namespaces, RayNodes, can_isolate
from shoal.config import parse, to_toml
from shoal.errors import ShoalError
from shoal.experience.audit import Check, audit
from shoal.net.client import TOKEN_VARIABLE
from shoal.net.listening import free_port
from shoal.run.demo import demo_config
from shoal.run.demo_model.warm_start import DEMO_TASK, demo_model

HOSTS, ENGINES, RANKS = 3, 2, 2
PATIENCE_S = 900.0
SERVED = "benchmarks.words:words"


def measure(quick: bool) -> Report:
    """Runs the demo's task on a cluster; `quick` trains a third of the steps."""
    demo_model()
    apart = UNSHARED if can_isolate() else []
    command = [*apart, sys.executable, "-m", "benchmarks.cluster", *["--quick"] * quick, *["--apart"] * bool(apart)]
    done = subprocess.run(command, env=child_environment(), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise ShoalError(f"the cluster ended with {done.returncode}")
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


def main(*, quick: bool, apart: bool) -> Report:
    """Measures in this process, which with `apart` has namespaces of its own."""
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "180")  # a machine may be busy with other things
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {**RESOURCES, "num_cpus": 0, "include_dashboard": False}
    if apart:
        Namespaces.bridge()
        head["node_ip_address"] = Namespaces.address
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        hosts: Hosts = Namespaces(cluster.address) if apart else RayNodes(cluster)
        with tempfile.TemporaryDirectory(prefix="shoal-cluster-") as folder:
            return _measured(hosts, cluster.address, Path(folder), 240 if quick else 720)
    finally:
        cluster.shutdown()


def _measured(hosts: Hosts, gcs: str, folder: Path, steps: int) -> Report:
    token, listen = secrets.token_urlsafe(16), f"{hosts.address}:{free_port(hosts.address)}"
    settings: dict[str, Any] = {
        "engine.count": 0,
        "reward.workers": 0,
        "cluster.address": gcs,
        "cluster.listen": listen,
        "cluster.engines.count": ENGINES,
        "cluster.trainer.hosts": RANKS,
        "cluster.rewards": 1,
    }
    names = [hosts.add() for _ in range(HOSTS)]
    say(f"hosts: {', '.join(names)}")
    run = _Run.started(folder / "run", token, steps, settings)
    try:
        cluster = _Troubled(hosts, names, run, f"http://{listen}", token)
        recovered = cluster.trouble(steps)
        figures = run.figures()
    finally:
        run.process.kill()
    checked = audit(run.run_dir)
    ids = {check: finding.ids for check, finding in checked.findings.items()}
    return {
        "nodes": HOSTS,
        "engines": ENGINES,
        "ranks": RANKS,
        "isolated": hosts.isolated,
        "accuracy_before": figures["accuracy_before"],
        "accuracy_after": figures["accuracy_after"],
        "killed": ["a node with an engine", "a node with a rank"],
        "recovered_s": recovered,
        "lost": len(ids.get(Check.ACCOUNTING, ())),
        "doubled": len(ids.get(Check.USED_ONCE, ())),
        "audit": checked.ok,
        "wall_s": figures["wall_s"],
    }


class _Troubled:
    """A run on hosts of which some die."""

    def __init__(self, hosts: Hosts, names: list[str], run: "_Run", url: str, token: str) -> None:
        self._hosts, self._alive, self._run = hosts, names, run
        self._url, self._token = url, token
        self._serve(names[0])

    def _serve(self, name: str) -> None:
        words = [sys.executable, "-m", "shoal.cli", "task", "serve", SERVED, f"--orchestrator={self._url}"]
        self._hosts.start(name, words, {TOKEN_VARIABLE: self._token})
        self._serves = name

    def trouble(self, steps: int) -> dict[str, float]:
        """Kills and adds hosts while the run trains; returns the seconds that each recovery took."""
        run = self._run
        run.until("the first steps", lambda: run.steps >= steps // 12)
        where = run.places(self._alive)
        if isinstance(self._hosts, Namespaces):
            assert not any(self._hosts.sees(name, run.run_dir) for name in self._alive), "hosts share the run's folder"
        # Best a host with nothing else that the run would wait for.
        engine = min((host for role, host in where.items() if "engine" in role), key=[*where.values()].count)
        recovered = {"engine": self._after(engine, run.engines_back)}
        self._alive.append(self._hosts.add())
        say(f"{self._alive[-1]} joins")
        run.until("half of the steps", lambda: run.steps >= steps // 2)
        where = run.places(self._alive)
        rank = next(host for role, host in where.items() if "rank" in role)
        recovered["rank"] = self._after(rank, run.gang_back)
        return recovered

    def _after(self, host: str, recovered: Callable[[], bool]) -> float:
        """Kills a host; returns the seconds until the run has recovered."""
        say(f"{host} dies, and with it {', '.join(self._run.roles_on(host))}")
        self._hosts.kill(host)
        self._alive.remove(host)
        began_s = time.monotonic()
        if host == self._serves:
            self._serve(self._alive[0])
        self._run.until("recovery", recovered)
        return time.monotonic() - began_s


class _Run:
    """What a run in another process has written."""

    def __init__(self, process: "subprocess.Popen[str]", run_dir: Path) -> None:
        self.process, self.run_dir = process, run_dir

    @classmethod
    def started(cls, run_dir: Path, token: str, steps: int, settings: dict[str, Any]) -> "_Run":
        """Starts the demo's run, with a second task that a task service draws."""
        served = {"name": "words", "service": "remote", "weight": 0.25, "rewrite": DEMO_TASK["rewrite"]}
        own = {"train.steps": steps, "eval.every_steps": 0, "eval.questions": 128, "checkpoint.every_steps": 10}
        base = demo_config(run_dir, 0).model_dump(mode="json", exclude_none=True)
        overrides = [f"{name}={value}" for name, value in {**own, **settings}.items()]
        config = parse({**base, "tasks": [DEMO_TASK, served]}, overrides)
        file = run_dir.with_suffix(".toml")
        file.write_text(to_toml(config))
        command = [sys.executable, "-m", "shoal.cli", "train", str(file), "--json"]
        environment = {**child_environment(), TOKEN_VARIABLE: token}
        return cls(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True), run_dir)

    def figures(self) -> dict[str, Any]:
        """Figures that the run prints at its end."""
        out, _ = self.process.communicate(timeout=PATIENCE_S)
        figures: dict[str, Any] = json.loads(out.splitlines()[-1])
        return figures

    def records(self) -> list[dict[str, Any]]:
        """Records of metrics.jsonl."""
        file = self.run_dir / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    @property
    def steps(self) -> int:
        """Steps trained."""
        return max((one["step"] for one in self.records() if one["kind"] == "step"), default=0)

    def states(self, state: str, kind: str) -> int:
        """Roles of a kind that joined, or left."""
        events = [one for one in self.records() if one.get("name") == "role" and one["state"] == state]
        return sum(one["role"].startswith(kind) for one in events)

    def engines_back(self) -> bool:
        """Whether as many engines are there as at the start, after one has left."""
        left = self.states("left", "engine")
        return left > 0 and self.states("joined", "engine") - left == ENGINES

    def gang_back(self) -> bool:
        """Whether a step was trained after the run was resumed."""
        kinds = [one.get("name", one["kind"]) for one in self.records()]
        return "resumed" in kinds and "step" in kinds[len(kinds) - kinds[::-1].index("resumed") :]

    def places(self, hosts: list[str]) -> dict[str, str]:
        """Host of each role that Ray placed, as its log has it last; roles of other hosts are left out."""
        found = {}
        for log in sorted((self.run_dir / "logs").glob("ray-*.log")):
            lines = re.findall(r"runs on node (\w+) at ([\d.]+)", log.read_text(errors="replace"))
            here = [name for name in lines[-1] if name in hosts] if lines else []
            found.update({log.stem: here[0]} if here else {})
        return found

    def roles_on(self, host: str) -> list[str]:
        """Roles that Ray placed on a host."""
        return [role for role, where in self.places([host]).items() if where == host]

    def until(self, what: str, true: Callable[[], bool]) -> None:
        """Waits for something of the run. Raises `ShoalError` when it ends first, or takes too long."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not true():
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise ShoalError(f"{what} did not come; the run ended with {self.process.poll()}")
            time.sleep(0.2)
        say(f"{what}: at step {self.steps}")


if __name__ == "__main__":
    print(json.dumps(main(quick="--quick" in sys.argv, apart="--apart" in sys.argv)))
