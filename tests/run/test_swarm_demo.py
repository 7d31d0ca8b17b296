"""What `shoal swarm demo` compares, and the demonstration itself, shortened: it takes minutes."""

from dataclasses import replace
from pathlib import Path

import pytest

from examples.swarm_demo import GROUPS, DemoCondition, DemoPlan, node_config, run_swarm_demo
from shoal.config import parse
from shoal.experience.audit import audit
from shoal.run.demo_model.warm_start import Recipe


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


def test_a_few_steps_of_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real NATS, a process per node, tiny models that were shown next to nothing: of learning it says nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = Recipe(width=32, heads=2, feed_forward=64, steps=2, pool=100)
    recipes = (("large", tiny), ("small", replace(tiny, layers=1, tokenizer="pairs")))
    conditions = (DemoCondition.SWARM,)  # without a swarm, `shoal train` is what other tests run
    plan = DemoPlan(tmp_path / "demo", steps=2, questions=4, recipes=recipes, frozen=tiny, conditions=conditions)
    found = run_swarm_demo(plan)
    for condition in ("before", *conditions):
        assert set(found[condition]) == {"large", "small"}  # type: ignore[call-overload]
    offers = found["offers"]
    assert isinstance(offers, dict)
    assert set(offers) == {"swarm-large", "swarm-small", "frozen", "rule"}
    assert offers["rule"] > 0
    assert Path(str(found["picture"])).read_bytes().startswith(b"\x89PNG")
    for condition in conditions:
        for name in ("large", "small"):
            report = audit(plan.folder / f"{condition}-{name}")
            assert report.ok, report
