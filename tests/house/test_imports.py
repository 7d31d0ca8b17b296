"""What an import may cost: torch only where tensors are, and an answer at once on the command line."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from test_layers import imported, modules

# These are, or are loaded by, the engine's, the trainer's and the warm start's processes.
COMPUTING = ("model.loading", "model.dequantise", "engine", "trainer", "run.demo_model")
TORCH_FREE = sorted(name for name, _ in modules() if not f"{name}.".startswith(tuple(f"{part}." for part in COMPUTING)))
HELP_BOUND_S = 0.3


def loaded_by(statement: str) -> set[str]:
    """The top-level packages in a fresh Python after `statement`."""
    script = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_types_need_the_standard_library_only() -> None:
    loaded = loaded_by("import shoal.types")
    assert "torch" not in loaded
    assert loaded.isdisjoint({"numpy", "pydantic", "msgspec", "transformers"})


def test_the_main_process_loads_no_torch() -> None:
    assert "shoal" in loaded_by("import shoal.cli")
    statement = "\n".join(f"import shoal.{name}" for name in TORCH_FREE)
    assert "torch" not in loaded_by(statement)


@pytest.mark.parametrize("name", TORCH_FREE)
def test_a_module_of_the_main_process_does_not_even_name_torch(name: str) -> None:
    assert not any(found.partition(".")[0] == "torch" for found in imported(name, dict(modules())[name]))


def test_help_answers_at_once() -> None:
    """Measured as CPU time: that is how long it takes on a core that nobody else wants."""
    command = [str(Path(sys.executable).with_name("shoal")), "--help"]
    took_s = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert "Usage: shoal" in done.stdout
    assert min(took_s) < HELP_BOUND_S
