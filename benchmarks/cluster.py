"""A run whose engines, ranks and scorer Ray places on three hosts; two hosts are killed and one joins.

Each host has a network, processes, files and a user of its own where this machine allows (`benchmarks.hosts`). One with
an engine dies first, then a host joins, then one with a rank dies (`Plan.events`). A task
service, which nobody restarts, is started again by hand where its host dies. The same run without Ray and other hosts
follows.

recovered_s           seconds until as many engines are there again, and until the next step is trained; a host that
                      dies may have taken other roles too, which come back meanwhile
lost, doubled         groups that the log does not account for; groups that were trained twice
accuracy_one_machine  held-out accuracy after the same run of this machine alone, without faults
accuracy_error        standard error of the difference between the two accuracies, from their numbers of answers
"""

import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import Report, child_environment, say
from benchmarks.hosts import RAY_VARIABLES, RESOURCES, UNSHARED, Hosts, Namespaces, RayNodes, can_isolate, ray_node
from benchmarks.processes import reported
from shoal.cluster.on_ray import RayPlan, started
from shoal.config import parse, to_toml
from shoal.errors import ShoalError
from shoal.experience.audit import Check, audit
from shoal.net.client import TOKEN_VARIABLE, authorization
from shoal.net.listening import free_port
from shoal.run.commands.demo import demo_config
from shoal.run.demo_model.warm_start import DEMO_TASK, demo_model

RANKS = 2
PATIENCE_S = 1800.0
SERVED = "benchmarks.words:words"


class Event(StrEnum):
    """Event of a run on a cluster."""

    ENGINE = "a node with an engine dies"
    RANK = "a node with a rank dies"
    JOIN = "a node joins"


class Plan(msgspec.Struct, frozen=True):
    """Size of a run, and what happens to its hosts."""

    steps: int = 720
    hosts: int = 3
    engines: int = 2
    questions: int = 256
    checkpoint_every: int = 10
    events: tuple[Event, ...] = (Event.ENGINE, Event.JOIN, Event.RANK)
    """In order; deaths are spread over the first half of the steps."""
    ray: dict[str, str] = {}
    """Variables of Ray's processes."""
    doomed: bool = False
    """Whether Ray starts a scorer, too, that cannot join: its token is another."""


QUICK = Plan(steps=240)
SHORT = Plan(
    steps=8,
    hosts=2,
    engines=1,
    questions=2,
    checkpoint_every=2,
    events=(Event.JOIN, Event.RANK),
    doomed=True,
    ray={
        "RAY_health_check_timeout_ms": "3000",
        "RAY_health_check_period_ms": "500",
        "RAY_health_check_failure_threshold": "3",
    },
)
"""Shortened form for the tests: a rank group that loses its host goes on with the host that joined."""


def measure(quick: bool) -> Report:
    """Runs the demo's task on a cluster, then on this machine alone; `quick` trains a third of the steps."""
    demo_model()
    plan = QUICK if quick else Plan()
    report = on_hosts(plan)
    say(f"on hosts: {report}")
    return {**report, **compared(report, plan)}


def on_hosts(plan: Plan) -> Report:
    """Runs the demo's task on a cluster, in a process and, where possible, namespaces of its own."""
    apart = UNSHARED if can_isolate() else []
    given = msgspec.json.encode(plan).decode()
    command = [*apart, sys.executable, "-m", "benchmarks.cluster", given, *["--apart"] * bool(apart)]
    return reported(command, "the cluster")


def compared(report: Report, plan: Plan) -> Report:
    """Accuracy of the same run on this machine alone."""
    say("the same run on one machine")
    token, listen = secrets.token_urlsafe(16), f"127.0.0.1:{free_port()}"
    settings = {"engine.count": plan.engines, "train.ranks": RANKS, "reward.workers": 1, "cluster.listen": listen}
    service = subprocess.Popen(_served(f"http://{listen}"), env={**child_environment(), TOKEN_VARIABLE: token})
    try:
        with tempfile.TemporaryDirectory(prefix="shoal-cluster-") as folder:
            after = _Run.started(Path(folder) / "run", token, plan, settings).figures()["accuracy_after"]
    finally:
        service.kill()
    shares = [float(str(report["accuracy_after"])), after]
    variance = sum(share * (1 - share) / plan.questions for share in shares)
    return {"accuracy_one_machine": after, "accuracy_error": variance**0.5}


def _served(url: str) -> list[str]:
    """Command of the task service."""
    return [sys.executable, "-m", "shoal.cli", "task", "serve", SERVED, f"--orchestrator={url}"]


def main(plan: Plan, *, apart: bool) -> Report:
    """Measures in this process, which with `apart` has namespaces of its own."""
    os.environ.update({**RAY_VARIABLES, **plan.ray})
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {**RESOURCES, "num_cpus": 0, "include_dashboard": False}
    if apart:
        Namespaces.bridge()
        head["node_ip_address"] = Namespaces.address
    cluster: Any = Cluster(initialize_head=True, head_node_args=head)
    try:
        hosts: Hosts = Namespaces(ray_node(cluster.address)) if apart else RayNodes(cluster)
        with tempfile.TemporaryDirectory(prefix="shoal-cluster-") as folder:
            return _measured(hosts, cluster, Path(folder), plan)
    finally:
        cluster.shutdown()


def _measured(hosts: Hosts, ray: Any, folder: Path, plan: Plan) -> Report:
    token, listen = secrets.token_urlsafe(16), f"{hosts.address}:{free_port(hosts.address)}"
    settings: dict[str, Any] = {
        "engine.count": 0,
        "reward.workers": 0,
        "cluster.address": ray.address,
        "cluster.listen": listen,
        "cluster.engines.count": plan.engines,
        "cluster.trainer.hosts": RANKS,
        "cluster.rewards": 1,
    }
    names = [hosts.add() for _ in range(plan.hosts)]
    _wait_for_nodes(ray, plan.hosts + 1)  # Ray places a role on what is there
    say(f"hosts: {', '.join(names)}")
    run = _Run.started(folder / "run", token, plan, settings)
    said: list[str] = []
    doomed = RayPlan(
        ray.address, f"http://{listen}", str(folder / "doomed"), engines=1, engine_gpus=1, rewards=1, restarts=2
    )
    try:
        with started(doomed, "another token", said.append) if plan.doomed else nullcontext():
            cluster = _Troubled(hosts, names, run, f"http://{listen}", token)
            recovered = cluster.trouble(plan)
            figures = run.figures()
    finally:
        run.process.kill()
    checked = audit(run.run_dir)
    ids = {check: finding.ids for check, finding in checked.findings.items()}
    return {
        "steps": plan.steps,
        "nodes": plan.hosts,
        "engines": plan.engines,
        "ranks": RANKS,
        "isolated": hosts.isolated,
        "accuracy_before": figures["accuracy_before"],
        "accuracy_after": figures["accuracy_after"],
        "killed": [event.removesuffix(" dies") for event in plan.events if event is not Event.JOIN],
        "recovered_s": recovered,
        "lost": len(ids.get(Check.ACCOUNTING, ())),
        "doubled": len(ids.get(Check.USED_ONCE, ())),
        "audit": checked.ok,
        **({"said": said} if plan.doomed else {}),
    }


def _wait_for_nodes(ray: Any, count: int) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while (there := sum(node["Alive"] for node in ray.global_state.node_table())) < count:
        if time.monotonic() > deadline_s:
            raise ShoalError(f"expected {count} nodes of Ray, got {there}")
        time.sleep(0.2)


class _Troubled:
    """A run on hosts of which some die."""

    def __init__(self, hosts: Hosts, names: list[str], run: "_Run", url: str, token: str) -> None:
        self._hosts, self._alive, self._run = hosts, names, run
        self._url, self._token = url, token
        self._serve(names[0])

    def _serve(self, name: str) -> None:
        self._hosts.start(name, _served(self._url), {TOKEN_VARIABLE: self._token})
        self._serves = name

    def trouble(self, plan: Plan) -> dict[str, float]:
        """Kills and adds hosts while the run trains; returns the seconds that each recovery took."""
        run, recovered = self._run, {}
        for index, event in enumerate(plan.events):
            if event is Event.JOIN:
                self._alive.append(self._hosts.add())
                say(f"{self._alive[-1]} joins")
                continue
            wanted = plan.steps * (1 + 5 * index // 2) // 12
            run.until(f"step {wanted}", lambda wanted=wanted: run.steps >= wanted)  # type: ignore[misc]
            if isinstance(self._hosts, Namespaces):
                assert not any(self._hosts.sees(name, run.run_dir) for name in self._alive), "hosts share a folder"
            kind, resumed = event.name.lower(), run.resumed
            # Best a host with nothing else that the run would wait for.
            where = run.places(self._alive)
            host = min((host for role, host in where.items() if kind in role), key=[*where.values()].count)
            if event is Event.ENGINE:
                recovered[kind] = self._after(host, partial(self._engines_back, plan.engines))
            else:
                recovered[kind] = self._after(host, partial(run.gang_back, resumed))
        return recovered

    def _engines_back(self, count: int, since_s: float) -> bool:
        """Whether so many engines are there, and one of them has come within the last seconds."""
        request = urllib.request.Request(f"{self._url}/v1/roles", headers=authorization(self._token))
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                roles = json.load(answer)
        except OSError:  # the run gathers its next rank group
            return False
        there = [role["seconds"] for name, role in roles.items() if name.startswith("engine")]
        return len(there) == count and min(there) < since_s

    def _after(self, host: str, recovered: Callable[[float], bool]) -> float:
        """Kills a host; returns the seconds until the run has recovered."""
        say(f"{host} dies, and with it {', '.join(self._run.roles_on(host))}")
        self._hosts.kill(host)
        self._alive.remove(host)
        began_s = time.monotonic()
        if host == self._serves:
            self._serve(self._alive[0])
        self._run.until("recovery", lambda: recovered(time.monotonic() - began_s))
        return time.monotonic() - began_s


class _Run:
    """What a run in another process has written."""

    def __init__(self, process: "subprocess.Popen[str]", run_dir: Path) -> None:
        self.process, self.run_dir = process, run_dir

    @classmethod
    def started(cls, run_dir: Path, token: str, plan: Plan, settings: dict[str, Any]) -> "_Run":
        """Starts the demo's run, with a second task that a task service draws."""
        words: dict[str, Any] = {"name": "words", "weight": 0.25, "service": "remote"}
        own = {"train.steps": plan.steps, "eval.every_steps": 0, "eval.questions": plan.questions}
        own["checkpoint.every_steps"] = plan.checkpoint_every
        base = demo_config(run_dir, 0).model_dump(mode="json", exclude_none=True)
        overrides = [f"{name}={value}" for name, value in {**own, **settings}.items()]
        config = parse({**base, "tasks": [DEMO_TASK, words]}, overrides)
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

    @property
    def resumed(self) -> int:
        """How often the run went on from its log."""
        return sum(one.get("name") == "resumed" for one in self.records())

    def gang_back(self, resumed: int, _: float) -> bool:
        """Whether a step was trained after the run went on from its log once more than `resumed` times."""
        kinds = [one.get("name", one["kind"]) for one in self.records()]
        return kinds.count("resumed") > resumed and "step" in kinds[len(kinds) - kinds[::-1].index("resumed") :]

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
    print(json.dumps(main(msgspec.json.decode(sys.argv[1], type=Plan), apart="--apart" in sys.argv)))
