"""Roles under Ray: what cannot be started is started again, and then said."""

from pathlib import Path
from typing import NoReturn

import pytest

from shoal.cluster.on_ray import SAID, _keep


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
