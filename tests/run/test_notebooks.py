"""The notebooks run as they are, in a kernel with its own event loop, and a result draws itself."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples" / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_trains_and_its_result_is_drawn_with_answers_before_and_after(path: Path, tmp_path: Path) -> None:
    """With fewer steps."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        cell.source = cell.source.replace("STEPS = 100", "STEPS = 8")
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    drawn = [
        output.data["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "data" in output and "text/html" in output.data
    ]
    assert len(drawn) == 1
    assert 'src="data:image/png;base64,' in drawn[0]
    assert "Sampled answers to held-out questions" in drawn[0]
    assert re.search(r"<td[^>]*>&#39;reverse \w+&#39;</td>", drawn[0])
    (run,) = (tmp_path / "runs").iterdir()
    assert (run / "model" / "model.safetensors").is_file()


def test_the_notebooks_are_kept_without_outputs() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["first_run", "own_task"]
    for path in NOTEBOOKS:
        assert all(not cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells)
