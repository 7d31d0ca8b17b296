"""A swarm of two nodes that train, a frozen model and a rule."""

from dataclasses import replace
from pathlib import Path

import pytest

from examples.swarm_demo import DemoCondition, DemoPlan, run_swarm_demo
from shoal.experience.audit import audit
from shoal.run.demo_model.warm_start import Recipe


def test_a_few_steps_of_the_demonstration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real NATS, a process per node, tiny models that were shown next to nothing: of learning it says nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny = Recipe(width=32, heads=2, feed_forward=64, steps=2, pool=100)
    recipes = (("large", tiny), ("small", replace(tiny, layers=1, tokenizer="pairs")))
    conditions = (DemoCondition.SWARM,)  # without a swarm, `shoal train` is what other tests run
    plan = DemoPlan(tmp_path / "demo", steps=6, questions=8, recipes=recipes, frozen=tiny, conditions=conditions)
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
