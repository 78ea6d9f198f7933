"""Every notebook is committed without outputs, and runs from top to bottom, as it lies there."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = (
    "before_a_launch",
    "cost_model_beside_published_runs",
    "own_model_on_four_processes",
    "plan_a_llama",
    "recommender_with_embedding_bags",
)


def test_the_list_of_notebooks_is_complete() -> None:
    assert tuple(sorted(path.stem for path in FOLDER.glob("*.ipynb"))) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_committed_without_outputs(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    nbformat.validate(notebook)
    assert notebook.cells[0].cell_type == "markdown"
    assert notebook.cells[0].source.startswith("# "), "a notebook begins with its title"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [(cell.execution_count, cell.outputs) for cell in code] == [(None, [])] * len(code)


@pytest.mark.parametrize("name", NAMES)
def test_notebook(name: str) -> None:
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}})
    # Raises CellExecutionError, with the cell's traceback.
    client.execute()
    ran = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in ran] == list(range(1, len(ran) + 1))
    warned = [output.text for cell in ran for output in cell.outputs if output.get("name") == "stderr"]
    assert warned == [], "warnings clutter a notebook"
