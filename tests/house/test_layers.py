"""Layers: a module imports its own folder and lower layers only; the modules of layer 0 may import one another."""

import ast
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "shoal"

LAYERS = (
    {
        "types",
        "turn_tree",
        "errors",
        "files",
        "interfaces",
        "wire",
        "plugins",
        "checker",
        "confidence",
        "procedural",
        "staleness",
    },
    {"net"},
    {"config", "model", "sandbox"},
    {"engine", "experience", "gateway", "reward", "tasks", "trainer", "weights", "workspace"},
    {"environments", "observe", "rollout", "software", "swarm", "tinker"},
    {"cluster"},
    {"run"},
    {"rehearsal"},
    {"cli", "library"},
)
FLOORS = {"engine": ("compute", "server", "pool", "external"), "swarm": ("wire", "trust", "strategy")}
"""Folders of a room, the lowest first: each imports itself and lower ones only, and nothing else of its room."""
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
        return [f"{room}: expected a room with a layer; give it a row in LAYERS and in docs/developers/architecture.md"]
    wrong = []
    for name in sorted(imported(module, source)):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top == "shoal" and other != room and LAYER_OF.get(other, 99) >= max(LAYER_OF[room], 1):
            wrong.append(f"{module} (layer {LAYER_OF[room]}) imports {name} (layer {LAYER_OF.get(other, 'none')})")
    return wrong


def upward(module: str, source: str) -> list[str]:
    """Imports of a folder's module within its room that are not of its own or a lower folder."""
    room, folder, *_ = [*module.split("."), ""]
    floors = FLOORS.get(room, ())
    if folder not in floors:
        return []
    free = tuple(f"shoal.{room}.{lower}." for lower in floors[: floors.index(folder) + 1])
    within = (name for name in imported(module, source) if name.startswith(f"shoal.{room}."))
    return [name for name in sorted(within) if not name.startswith(free)]


@pytest.mark.parametrize(("module", "source"), [pytest.param(*pair, id=pair[0]) for pair in modules()])
def test_a_module_imports_its_own_folder_and_lower_layers_only(module: str, source: str) -> None:
    assert violations(module, source) + upward(module, source) == []


@pytest.mark.parametrize("source", ["from shoal.swarm.strategy import choice", "from shoal.swarm.peer import Peer"])
def test_a_planted_import_upward_within_a_room_is_found(source: str) -> None:
    assert upward("swarm.trust.ingress", source) != []
    assert upward("swarm.node", source) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("config", "import shoal.sandbox"),  # never a neighbour above layer 0
        ("types", "import shoal.config"),
        ("engine.pool", "from shoal.experience import Log"),
        ("engine.pool", "def f():\n    from shoal import run"),
        ("engine.pool", "from ..trainer import loss"),
        ("wire", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import shoal.model.loading"),
        ("gateway", "import shoal.nowhere"),
        ("unheard_of", ""),
    ],
)
def test_a_planted_violation_is_found(module: str, source: str) -> None:
    assert violations(module, source) != []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "engine.pool",
            "from shoal.engine.scheduler import plan\nfrom . import sampling\nfrom ..types import Group",
        ),
        ("run", "from shoal import experience as buffer, config\nimport shoal.engine.pool.engine_pool, json"),
    ],
)
def test_lower_layers_and_the_own_folder_are_free(module: str, source: str) -> None:
    assert violations(module, source) == []


def test_no_module_imports_itself_by_way_of_others() -> None:
    names = {name for name, _ in modules()}
    edges = {name: {found for found in map(known(names), imported(name, text)) if found} for name, text in modules()}
    TopologicalSorter(edges).prepare()  # raises CycleError


def known(names: set[str]) -> Callable[[str], str]:
    """The function from a dotted import to the module of `names` that it loads, or ""."""

    def module(dotted: str) -> str:
        name = dotted.removeprefix("shoal.")
        while name and name not in names:
            name = name.rpartition(".")[0]
        return name if dotted.startswith("shoal.") else ""

    return module
