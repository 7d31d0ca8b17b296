"""What `shoal swarm demo` compares, and the demonstration itself, shortened: it takes minutes."""

from pathlib import Path

from examples.swarm_demo import GROUPS, DemoCondition, DemoPlan, node_config
from shoal.config import parse


def test_a_node_alone_and_in_the_swarm_differs_in_where_its_groups_come_from_and_in_nothing_else(
    tmp_path: Path,
) -> None:
    plan = DemoPlan(tmp_path, nodes=5)
    assert [one.name for one in plan.trainees] == ["large", "small", "large-2"]
    assert len({one.seed for one in plan.trainees}) == 3
    for trainee in plan.trainees:
        solo = node_config(plan, trainee, tmp_path / "model", DemoCondition.SOLO)
        half = node_config(plan, trainee, tmp_path / "model", DemoCondition.SOLO_HALF)
        swarm = node_config(plan, trainee, tmp_path / "model", DemoCondition.SWARM, "nats://127.0.0.1:1")
        assert solo.train.groups_per_step == GROUPS
        assert swarm.train.groups_per_step + swarm.swarm.external_groups == GROUPS
        alike = {"run_dir": solo.run_dir, "swarm": parse(solo.model_dump(mode="json")).swarm, "train": solo.train}
        assert swarm.model_copy(update=alike) == solo
        assert half.train == swarm.train
        assert not half.swarm.servers
        assert swarm.train.model_copy(update={"groups_per_step": GROUPS}) == solo.train
