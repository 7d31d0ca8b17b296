"""`make churn`, shortened: real servers, a real node and a generator, of which all but the node die."""

import asyncio
from pathlib import Path

from experiments.churn.__main__ import Scale, run

SHORT = Scale(seconds=2, period_s=1, victims=0, steady=1, generators=1)


def test_a_node_trains_on_while_servers_and_peers_die_and_its_link_is_cut(tmp_path: Path) -> None:
    found = asyncio.run(run(tmp_path, SHORT))
    assert found["stopped_by_themselves"] == {}
    said = [what for _, what in found["events"]]  # type: ignore[attr-defined]
    assert {"killed rule-0", "killed rule-1", "killed servers [0]", "started servers [0]"} <= set(said)
    assert not found["partition"] or said[-2:] == ["cut off the last steady node", "healed"]
    assert found["late_joiner_frames"] > 0
    node = found["nodes"]["steady-0"]
    assert node["audit"]
    assert node["external"] > 0
    assert node["steps"] > 1
