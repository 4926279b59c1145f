"""The CPU backend touches no memory but its own: every allocation, Python's too, is watched by AddressSanitizer, in a process apart."""

import os
import shutil
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent("""
    import torch
    import foci
    from foci.backends.cpu import build

    build._FLAGS = (*build._FLAGS, "-Og", "-fsanitize=address")
    torch.manual_seed(0)
    B, H, G, S, D = 2, 4, 2, 37, 16
    query = torch.randn(B, H, S, D, requires_grad=True)
    key, value = (torch.randn(B, G, S, D, requires_grad=True) for _ in range(2))
    bias, slope = torch.randn(B, H, S, S, requires_grad=True), torch.randn(H, requires_grad=True)
    keep = torch.rand(B, S, S) < 0.7


    def learned(score, b, h, i, j):
        return score * slope[h] + bias[b, h, i, j]


    def kept(b, h, i, j):
        return keep[b, i, j] & (j <= i)


    with foci.use("cpu"):
        out = foci.attention(query, key, value, score=learned, mask=kept, dropout_p=0.1)
        torch.autograd.grad(out.sum(), (query, key, value, bias, slope))
        lengths = torch.tensor([0, 5, 5, S])
        packed = torch.nested.nested_tensor_from_jagged(query[0].transpose(0, 1), lengths).transpose(1, 2)
        key, value = (torch.nested.nested_tensor_from_jagged(t[0].transpose(0, 1), lengths).transpose(1, 2) for t in (key, value))
        out = foci.attention(packed, key, value, score=lambda s, b, h, i, j: s * slope[h]).values()
        torch.autograd.grad(out.sum(), (query, slope))
""")


def sanitizer():
    """AddressSanitizer's library, None where g++ has none."""
    if shutil.which("g++") is None:
        return None
    library = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True).stdout.strip()
    return library if os.path.isabs(library) else None


@pytest.mark.slow
@pytest.mark.skipif(sanitizer() is None, reason="needs g++ with AddressSanitizer's library")
def test_calls_use_no_memory_that_is_not_theirs(tmp_path):
    env = {
        **os.environ, "FOCI_CACHE_DIR": str(tmp_path), "FOCI_CXX": "env -u LD_PRELOAD g++", "LD_PRELOAD": sanitizer(),
        "ASAN_OPTIONS": "detect_leaks=0", "PYTHONMALLOC": "malloc", "FOCI_QUIET": "1",
    }  # fmt: skip
    ran = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-8000:]
