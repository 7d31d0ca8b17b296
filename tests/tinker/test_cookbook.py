"""Recipes of the tinker-cookbook run unchanged on `shoal serve tinker`; every other one has a reason."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import cookbook
from tinker_server import KEYS, TinkerServer, tinker_serving

PACKAGES = Path(os.environ.get("SHOAL_COOKBOOK", ""))
pytestmark = [
    pytest.mark.cookbook,
    pytest.mark.skipif(not PACKAGES.name, reason="run by make test-tinker, which installs the cookbook"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from shoal.run.demo_model.architecture import Shape, save, untrained

    model = tmp_path_factory.mktemp("model")
    save(untrained(Shape(width=32, layers=1, heads=2, feed_forward=32, context=2048, model_type="seed_oss"), 0), model)
    path = tmp_path_factory.mktemp("cookbook")
    cookbook.prepare(path, model)
    return path


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TinkerServer]:
    with tinker_serving(folder / cookbook.MODEL, folder / "server", name=cookbook.MODEL) as running:
        yield running


@pytest.mark.parametrize("name", cookbook.RUN)
def test_a_recipe_runs_as_it_is(name: str, folder: Path, server: TinkerServer) -> None:
    arguments = [f"model_name={cookbook.MODEL}", *cookbook.RUN[name]]
    done = cookbook.recipe(name, arguments, folder=folder, packages=PACKAGES, url=server.url, key=KEYS[0])
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (folder / "logs" / name / "metrics.jsonl").read_text().splitlines()]
    assert any(cookbook.TRAINED.get(name, "version") in record for record in records)


def test_every_recipe_runs_or_has_a_reason() -> None:
    known = {*cookbook.RUN, *cookbook.LEFT_OUT}
    assert {name for name in cookbook.modules(PACKAGES) if not any(name.startswith(one) for one in known)} == set()
