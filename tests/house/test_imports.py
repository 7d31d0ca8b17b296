"""What an import may cost: torch only where tensors are, and an answer at once on the command line."""

import subprocess
import sys

import pytest
from test_layers import imported, modules

# These are, or are loaded by, the engine's, the trainer's, the warm start's and the Tinker server's processes. In the
# last, the package tinker loads torch.
COMPUTING = (
    *("model.attention", "model.checkpoint_names", "model.family", "model.loading", "model.mixers", "model.packed"),
    *("model.product", "model.routing", "model.tensor_files", "model.token_logprobs", "model.training_forward"),
    "engine",
    "trainer",
    "tinker",
    "run.demo_model",
)
TORCH_FREE = sorted(name for name, _ in modules() if not f"{name}.".startswith(tuple(f"{part}." for part in COMPUTING)))


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


def test_help_loads_nothing_that_takes_long() -> None:
    """What it costs in seconds is measured by `shoal bench cli`."""
    loaded = loaded_by(
        "from typer.testing import CliRunner\nfrom shoal.cli import app\nCliRunner().invoke(app, ['--help'])"
    )
    assert loaded.isdisjoint(
        {"torch", "transformers", "numpy", "pyarrow", "matplotlib", "starlette", "aiohttp", "nats"}
    )
