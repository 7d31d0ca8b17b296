"""A run that SLURM starts through `shoal cluster template slurm`, on three nodes that share no writable folder.

Each node is a host in namespaces of its own (`benchmarks.hosts`) with a slurmd of Debian's package; slurmctld and
munged are beside them. The job runs as an ordinary user. It has two engines, two ranks and a scorer, which Ray places.

accuracy_before, accuracy_after  held-out accuracy
job                              how SLURM says that the job ended
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from pwd import getpwnam

from benchmarks import Report, say
from benchmarks.hosts import HEAD, HOST_NAME, NETWORK, RESOURCES, UNSHARED, Namespaces, can_isolate, environment_of
from benchmarks.processes import reported
from shoal.config import to_toml
from shoal.errors import ShoalError
from shoal.experience.audit import audit
from shoal.run.commands.demo import demo_config
from shoal.run.demo_model.warm_start import demo_model

HOSTS, ENGINES, RANKS = 3, 2, 2
CPUS = 4
STEPS, QUICK_STEPS = 240, 60
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
USER = "nobody"
PATIENCE_S = 1800.0
RUN = Path("/run/slurm-bench")
"""Folder with the servers' files, in a file system that ends with the bench."""
MUNGE = Path("/run/munge")
RAY_OPTIONS = f"--num-cpus={CPUS} --object-store-memory={RESOURCES['object_store_memory']}"
CONFIG = f"""
ClusterName=bench
SlurmctldHost={HOST_NAME}1({HEAD})
SlurmctldParameters=enable_configless
SlurmUser=root
StateSaveLocation={RUN}/state
SlurmdSpoolDir=/tmp/slurmd
SlurmctldPidFile={RUN}/slurmctld.pid
SlurmdPidFile=/tmp/slurmd.pid
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/linear
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=300
"""


def measure(quick: bool) -> Report:
    """Runs the demo's task in a SLURM job; `quick` trains fewer steps."""
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        raise ShoalError(f"bench slurm: expected {', '.join(missing)}, which the package slurm-wlm brings, got none")
    if not can_isolate():
        raise ShoalError("bench slurm: expected root, for the namespaces of its hosts, got another user")
    demo_model()
    steps = QUICK_STEPS if quick else STEPS
    command = [*UNSHARED, sys.executable, "-m", "benchmarks.slurm", str(steps)]
    return reported(command, "the SLURM job")


def main(steps: int) -> Report:
    """Measures in this process, which has namespaces of its own."""
    _prepared(steps)
    Namespaces.bridge()
    _servers()
    hosts = Namespaces(_slurmd, first_user=0, hidden="/run/slurm")
    names = [hosts.add() for _ in range(HOSTS)]
    _wait("all nodes are idle", lambda: _asked("sinfo", "--noheader", "--format=%T %D") == f"idle {HOSTS}")
    job = _submitted()
    state = ""
    while state not in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL"):
        time.sleep(1)  # a busy slurmctld may leave a question without an answer
        state = _asked("scontrol", "show", "job", job).partition("JobState=")[2].partition(" ")[0]
    output = hosts.path_of(names[0], Path("/tmp/output")).read_text()
    say(f"job {job}: {state}")
    if state != "COMPLETED":
        raise ShoalError(f"job {job}: expected COMPLETED, got {state}:\n{output[-4000:]}")
    printed = [line[line.index("{") :] for line in output.splitlines() if '"accuracy_after"' in line]
    if not printed:
        raise ShoalError(f"job {job}: expected the figures of its run, got:\n{output[-4000:]}")
    figures = json.loads(printed[-1])
    shutil.copytree(hosts.path_of(names[0], Path("/tmp/run")), RUN / "run")
    checked = audit(RUN / "run")
    return {
        "slurm": _asked("sinfo", "--version"),
        "nodes": HOSTS,
        "engines": ENGINES,
        "ranks": RANKS,
        "steps": figures["steps"],
        "accuracy_before": figures["accuracy_before"],
        "accuracy_after": figures["accuracy_after"],
        "job": state,
        "audit": checked.ok,
        "wall_s": figures["wall_s"],
    }


def _prepared(steps: int) -> None:
    """Writes the files of SLURM and of the run, in a file system that nobody else sees."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run"], check=True)
    subprocess.run(["hostname", f"{HOST_NAME}1"], check=True)
    for folder in (RUN / "state", MUNGE, Path("/run/slurm")):
        folder.mkdir(parents=True)
    names = [f"{HOST_NAME}{number}" for number in range(1, HOSTS + 2)]
    (RUN / "hosts").write_text("".join(f"{NETWORK}.{name.removeprefix(HOST_NAME)} {name}\n" for name in names))
    subprocess.run(["mount", "--bind", str(RUN / "hosts"), "/etc/hosts"], check=True)
    nodes = "".join(f"NodeName={name} CPUs={CPUS} State=UNKNOWN\n" for name in names[1:])
    (RUN / "slurm.conf").write_text(f"{CONFIG}{nodes}PartitionName=all Nodes={','.join(names[1:])} Default=YES\n")
    (MUNGE / "key").write_bytes(secrets.token_bytes(128))
    (MUNGE / "key").chmod(0o600)
    shutil.copytree(demo_model()[0], RUN / "model", copy_function=shutil.copyfile)
    (RUN / "model").chmod(0o755)
    overrides = [
        f"model.path={RUN}/model",
        f"train.steps={steps}",
        "eval.every_steps=0",
        "engine.count=0",
        "reward.workers=0",
        f"cluster.engines.count={ENGINES}",
        f"cluster.trainer.hosts={RANKS}",
        "cluster.rewards=1",
    ]
    (RUN / "train.toml").write_text(to_toml(demo_config(Path("/tmp/run"), 0, [*overrides, *_addresses()])))


def _addresses() -> list[str]:
    """Settings without which the others are refused; the template has its own."""
    return ["cluster.address=auto", f"cluster.listen={NETWORK}.2:8200"]


def _servers() -> None:
    """Starts munged and slurmctld, which end with this process's namespaces."""
    files = [f"--{name}-file={MUNGE}/{name}" for name in ("key", "log", "pid", "seed")]
    subprocess.run(["munged", *files], check=True)
    os.environ["SLURM_CONF"] = f"{RUN}/slurm.conf"
    with (RUN / "slurmctld.log").open("w") as log:
        subprocess.Popen(["slurmctld", "-D"], stdout=log, stderr=log)
    _wait("slurmctld answers", lambda: "UP" in _asked("scontrol", "ping"))


def _slurmd(address: str) -> Sequence[str]:
    # The shell is the first process of its namespace, and so the one that must wait for orphans: slurmd would not.
    return ["sh", "-c", f"slurmd -D --conf-server {HEAD} -L /tmp/slurmd.log; exit"]


def _submitted() -> str:
    """Submits the template's job as a user who owns nothing here; returns its number."""
    with (RUN / "shoal.sbatch").open("w") as script:
        subprocess.run([sys.executable, "-m", "shoal.cli", "cluster", "template", "slurm"], stdout=script, check=True)
    user = getpwnam(USER)
    environment = environment_of(user.pw_uid)
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment["PATH"]])
    environment["SLURM_CONF"] = os.environ["SLURM_CONF"]
    environment["SHOAL_RAY_OPTIONS"] = RAY_OPTIONS
    become = ["setpriv", f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    options = ["--parsable", f"--nodes={HOSTS}", "--chdir=/tmp", "--output=/tmp/output"]
    words = [*become, "sbatch", *options, f"{RUN}/shoal.sbatch", f"{RUN}/train.toml", "--json"]
    done = subprocess.run(words, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout.strip()


def _asked(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()


def _wait(what: str, true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 120
    while not true():
        if time.monotonic() > deadline_s:
            raise ShoalError(f"expected that {what}, waited 120 s; {_asked('sinfo', '-N', '-l')}")
        time.sleep(0.5)
    say(what)


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
