"""A module imports its own folder and lower layers only; torch stays where tensors are."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "shoal"

LAYERS = (
    {"types", "errors", "clock"},
    {"interfaces", "config", "metrics", "prefix_tree", "wire", "net", "own_code"},
    {"checker", "model", "render", "procedural", "sandbox"},
    {
        "engine",
        "session",
        "tasks",
        "rewards",
        "buffer",
        "train",
        "weights",
        "swarm",
        "checkpoint",
        "small_model",
        "small_programs",
    },
    {"desk", "gateway", "judge", "warm_start"},
    {"agents"},
    {"run", "sim", "dashboard", "report", "progress", "doctor"},
    {"demo", "swarm_demo", "bench"},
    {"cli"},
)
LAYER_OF = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}


def modules() -> list[tuple[str, str]]:
    """Dotted name below `shoal` and source of every module."""
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            found.append((name, path.read_text()))
    return found


def imported(module: str, source: str) -> set[str]:
    """Every dotted name that a module imports, wherever in its text, relative ones resolved."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            package = ["shoal", *module.split(".")][: -node.level]
            names |= {".".join([*package, *filter(None, [node.module]), alias.name]) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def violations(module: str, source: str) -> list[str]:
    """What a module imports although it may not, one sentence each."""
    room = module.partition(".")[0]
    if room not in LAYER_OF:
        return [f"{room}: expected a room with a layer; give it a row in LAYERS and in docs/architecture.md"]
    wrong = []
    for name in sorted(imported(module, source)):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "shoal" and other != room and LAYER_OF.get(other, 99) >= LAYER_OF[room]:
            wrong.append(f"{module} (layer {LAYER_OF[room]}) imports {name} (layer {LAYER_OF.get(other, 'none')})")
    return wrong


@pytest.mark.parametrize(("module", "source"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_a_module_imports_its_own_folder_and_lower_layers_only(module: str, source: str) -> None:
    assert violations(module, source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("types", "import shoal.errors"),  # never a neighbour, not even in layer 0
        ("engine.pool", "from shoal.buffer import Log"),
        ("engine.pool", "def f():\n    from shoal import run"),
        ("engine.pool", "from ..train import loss"),
        ("metrics", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shoal.model"),
        ("gateway", "import shoal.nowhere"),
        ("unheard_of", ""),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert violations(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("engine.pool", "from shoal.engine.scheduler import plan\nfrom . import sampling\nfrom ..types import Group"),
        ("run", "from shoal import buffer, config\nimport shoal.engine.pool, json"),
    ],
)
def test_lower_layers_and_the_own_folder_are_free(module: str, source: str) -> None:
    assert violations(module, source) == []
