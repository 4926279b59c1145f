"""The functions that the Triton backend generates are a golden file: the text of every variant people use, and nothing more.

Run this file as a program to write the golden file anew.
"""

import importlib.util
from pathlib import Path

import pytest
import torch

import foci
from foci import masks, scores
from foci.trace_functions import bind

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")

CPU = torch.device("cpu")
IDS = torch.zeros(8, dtype=torch.int32)
ROWS = torch.zeros(2, 16, dtype=torch.int32)
TABLE = torch.zeros(4, 31)
PAIRS = torch.zeros(4, 16, 16)
KEPT = torch.ones(16, 16, dtype=torch.bool)
LENGTHS = torch.tensor([5, 7])
SINKS = torch.zeros(4)

VARIANTS = {
    "plain": (None, None),
    "causal": (None, masks.causal()),
    "window to both sides": (None, foci.Mask(lambda b, h, q, k: (q - k).abs() <= 128)),
    "causal window": (None, foci.Mask(lambda b, h, q, k: (k <= q) & (q - k < 1024))),
    "documents": (None, foci.Mask(lambda b, h, q, k: IDS[q] == IDS[k])),
    "causal documents of a batch": (None, foci.Mask(lambda b, h, q, k: (ROWS[b, q] == ROWS[b, k]) & (q >= k))),
    "prefix": (None, foci.Mask(lambda b, h, q, k: (k < LENGTHS[b]) | (k <= q))),
    "padding": (None, foci.Mask(lambda b, h, q, k: k < LENGTHS[b])),
    "bool tensor": (None, foci.Mask(lambda b, h, q, k: KEPT[q, k])),
    "every other": (None, foci.Mask(lambda b, h, q, k: (q - k) % 2 == 0)),
    "ALiBi": (scores.alibi(SINKS), masks.causal()),
    "softcap": (scores.softcap(20.0), masks.causal()),
    "bias": (foci.Score(lambda s, b, h, q, k: s + PAIRS[h, q, k]), None),
    "relative table": (foci.Score(lambda s, b, h, q, k: s + TABLE[h, q - k + 15]), None),
    "temperature of a head": (foci.Score(lambda s, b, h, q, k: s * SINKS[h].exp()), None),
    "sigmoid gate": (foci.Score(lambda s, b, h, q, k: s * torch.sigmoid(s)), None),
}
GOLDEN = Path(__file__).parents[1] / "golden" / "triton.txt"


def golden():
    from foci.backends.gpu.functions import build_functions, capture_layouts

    parts = []
    for name, (score, mask) in VARIANTS.items():
        bound = bind(score, mask, CPU)
        for half in (True, False):
            code = build_functions(bound.variant, capture_layouts(bound.captures), half=half)
            parts.append(f"# {name}, {'16' if half else '32'} bits\n{code.source}")
    return "\n\n\n".join(parts)


def test_generated_functions_are_the_golden_file():
    assert golden() == GOLDEN.read_text(), "run this file as a program if the change is meant"


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text(golden())
