"""The notebooks of docs/notebooks/ run, and what they print is what is kept in them."""

import importlib.util
import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("docs_notebooks", ROOT / "docs" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)

PATHS = sorted(notebooks.FOLDER.glob("*.ipynb"))


def texts(notebook):
    """What each code cell shows, pictures by their place alone: other versions draw other pixels."""
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [["".join(output.get("text", output.get("data", {}).get("text/plain", ""))) for output in cell["outputs"]] for cell in cells]


def test_there_are_notebooks():
    assert len(PATHS) == 2


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook(path):
    kept = json.loads(path.read_text(encoding="utf-8"))
    assert any(texts(kept)), "run it: make notebooks"
    assert texts(notebooks.run(kept, path.stem)) == texts(kept)
