"""Runs the notebooks of docs/notebooks/ and keeps their outputs: `make notebooks`. Needs no Jupyter.

A cell's output is what it prints and, as in Jupyter, the value of its last line: a picture of a matplotlib Figure, else the repr.
tests/test_notebooks.py runs the same and compares what is text.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent / "notebooks"


def run(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The notebook with the outputs of its code cells, run in order, in one namespace.

    Args:
        notebook: the parsed JSON.
        name: for tracebacks.
    """
    torch.manual_seed(0)
    module = types.ModuleType(f"notebook {name}")
    sys.modules[module.__name__] = module  # torch.compile looks a function's globals up by the name of its module
    try:
        cells = []
        count = 0
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                count += 1
                outputs = _run_cell("".join(cell["source"]), module.__dict__, f"{name}, cell {count}", count)
                cell = {**cell, "execution_count": count, "outputs": outputs}
            cells.append(cell)
        return {**notebook, "cells": cells}
    finally:
        del sys.modules[module.__name__]


def _run_cell(source: str, namespace: dict[str, Any], name: str, count: int) -> list[dict[str, Any]]:
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(tree, name, "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        outputs.append({"data": _data(value), "execution_count": count, "metadata": {}, "output_type": "execute_result"})
    return outputs


def _data(value: Any) -> dict[str, Any]:
    from matplotlib.figure import Figure

    if not isinstance(value, Figure):
        return {"text/plain": repr(value).splitlines(True)}
    picture = io.BytesIO()
    value.savefig(picture, format="png", dpi=100, metadata={"Software": None})
    return {"image/png": base64.b64encode(picture.getvalue()).decode() + "\n", "text/plain": ["<Figure>"]}


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        notebook = run(json.loads(path.read_text(encoding="utf-8")), path.stem)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
