"""A part of the conformance suite in Triton's interpreter, for machines without a GPU; on one, the whole suite runs natively.

The whole of it here: TRITON_INTERPRET=1 pytest tests/conformance -k "triton and cpu", which takes hours.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="runs the interpreter itself"),
]
CONFORMANCE = "tests/conformance/test_conformance.py"
# file, what is run of it, tests at least; long ones first and beside short ones, as --sample deals them
PARTS = {
    "biased": (CONFORMANCE, "triton and cpu and not repeats and (score-bias_keys-dense-float16 or no-keys-dense)", 2),
    "outputs": (CONFORMANCE, "triton and cpu and not repeats and (outputs-dense-float32 or outputs-jagged-float32)", 2),
    "distance": (
        CONFORMANCE,
        "triton and cpu and not repeats and (causal-square-dense-float16 or captured-head-scale-blocks or (distance and float32))",
        4,
    ),
    "split_captures": ("tests/backends/triton_backend/test_triton_splits.py", "lower or learn", 2),
    "words": ("tests/backends/hopper/test_words.py", "words", 7),
    "slopes": ("tests/backends/triton_backend/test_triton_slopes.py", "packed or turned or negative or scale", 5),
    "learned": ("tests/backends/triton_backend/test_triton_learned.py", "triton and cpu and not repeats and (formula or other_way)", 2),
    "visits": ("tests/backends/triton_backend/test_triton_visits.py", "share or documents or causal and 32", 6),
    "ranks": ("tests/backends/hopper/test_ranks.py", "packed and window", 1),
    "paged": (
        "tests/api/test_paged.py",
        "triton and cpu and (decoding-1-32 or decoding-16-32 or decoding-40-8 or window-5-12 or score-1-8 or gradients_of_query)",
        6,
    ),
    "far": ("tests/api/test_sdpa_sizes.py", "two_to_the_31 and triton and batch", 1),
    "streams": ("tests/backends/triton_backend/test_triton_streams.py", "zeros", 8),
    "splits": ("tests/backends/triton_backend/test_triton_splits.py", "groups or without or blocks", 3),
    "excluded": (
        "tests/conformance/test_scores_with_masks.py",
        "triton and (blocks-all-where_turned or full_blocks-window-added or one_block-causal-captured or torch_blocks-by_head-everything)",
        4,
    ),
    "layout": ("tests/api/test_result_layout.py", "triton", 4),
    "beyond": ("tests/backends/test_excluded.py", "triton and not cuda and (no_excluded_key or beyond or no_sequence)", 9),
    "row_gradients": ("tests/backends/test_row_gradients.py", "triton and (rows-triton or queries-triton or packed or beside)", 10),
    "rows": ("tests/backends/triton_backend/test_triton_rows.py", "otherwise or 24", 12),
}


@pytest.mark.parametrize("name", PARTS)
def test_in_the_interpreter(name):
    numpy = pytest.importorskip("numpy", reason="the interpreter needs NumPy")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 needs NumPy below 2.4: it turns arrays of one element into numbers")
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    file, chosen, least = PARTS[name]
    command = [sys.executable, "-m", "pytest", file, "-k", chosen, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    summary = done.stdout.splitlines()[-1]
    assert int(summary.split(" passed")[0].split()[-1]) >= least, summary
