"""Roles under Ray: what cannot be started is started again, and then said."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec
import psutil
import pytest

from shoal.cluster.on_ray import PLAN, SAID, RayPlan, _keep
from shoal.config import parse
from shoal.run.roles import launched
from until import until


@pytest.mark.parametrize("error", [ConnectionError("the cluster is away"), RuntimeError(), ValueError("no such node")])
def test_a_role_that_cannot_be_started_is_given_up_and_said(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def start() -> NoReturn:
        raise error

    log = tmp_path / "engine.log"
    _keep("ray-engine-0", start, log, 1)
    why = str(error) or "RuntimeError"
    assert f"{SAID}ray-engine-0 is given up: it ended 1 times within 600 s; the last time Ray said: {why}" in (
        capsys.readouterr().out
    )
    assert "is started again" in log.read_text()


def test_the_folder_of_a_role_that_was_killed_goes_with_the_next_one_s_start(tmp_path: Path) -> None:
    program = "from shoal.cluster.on_ray import own_folder; print(own_folder(), flush=True); input()"

    def started() -> tuple["subprocess.Popen[str]", Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    made = [started() for _ in range(2)]
    try:
        made[0][0].kill()
        made[0][0].wait()
        made.append(started())
        assert [folder.is_dir() for _, folder in made] == [False, True, True]
    finally:
        for process, _ in made:
            with process:
                process.kill()


def test_ray_is_told_the_hosts_and_gpus_of_each_kind_of_role(tmp_path: Path) -> None:
    roles = {"trainer": {"hosts": 2, "gpus": 3}, "engines": {"count": 4, "gpus": 5, "command": ["vllm"]}}
    cluster = {"address": "auto", "listen": "127.0.0.1:9", **roles}
    config = parse({"run_dir": str(tmp_path), "tasks": [{"name": "gcd"}], "cluster": cluster})
    plans: list[RayPlan] = []

    def told() -> bool:
        for child in psutil.Process().children():
            with suppress(psutil.Error, KeyError):
                plans.append(msgspec.json.decode(child.environ()[PLAN], type=RayPlan))
        return bool(plans)

    with launched(config, "secret", print):
        asyncio.run(until(told))
    plan = plans[0]
    assert (plan.address, plan.hosts, plan.gpus) == ("auto", 2, 3)
    assert (plan.engines, plan.engine_gpus, plan.engine_command) == (4, 5, ["vllm"])
