"""An operation of the language is one row: a copy of the package with one row more has it everywhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import foci

SOURCE = Path(foci.__file__).parent
ROW = """_row("sinc", _F, lambda a: math.sin(math.pi * a) / (math.pi * a) if a else 1.0, ranges.bounded(-0.22, 1.0),
             lambda y, a: _where(apply("eq", a, 0.0), 0.0, _div(_sub(apply("cos", _mul(math.pi, a)), y), a)),
             decomposed=lambda a: _where(apply("eq", a, 0.0), 1.0, _div(apply("sin", _mul(math.pi, a)), _mul(math.pi, a)))),
        """
PROGRAM = """
import sys, torch, foci
from foci.backends.gpu.codegen import triton_codegen
from foci.ir.emit import emit
from foci.ir.expr import variable
from foci.ir.ops import apply
from foci.problem import Formula
from foci.trace_functions import bind

expr = apply("sinc", variable("score"))
assert "tl.sin" in str(emit([expr], triton_codegen((), half=True)))
score = lambda s, b, h, q, k: s + torch.sinc(s)
formula = Formula(bind(score, None, torch.device("cpu")).variant)
assert Formula.parse(formula.text) == formula

torch.manual_seed(0)
def run(backend, dtype):
    tensors = [t.detach().to(dtype).requires_grad_() for t in given]
    with foci.use(backend):
        out = foci.attention(*tensors, score=score)
    return [out, *torch.autograd.grad(out.square().sum(), tensors)]

given = [torch.randn(1, 2, 40, 16) for _ in range(3)]
q, k, v = (t.double().requires_grad_() for t in given)
products = q @ k.mT / 4
out = torch.softmax(products + torch.sinc(products), -1) @ v
expected = [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]
for backend in sys.argv[1:]:
    for found, wanted in zip(run(backend, torch.float32), expected, strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="builds a kernel of the backend cpu")
def test_an_operation_is_one_row(tmp_path):
    shutil.copytree(SOURCE, tmp_path / "foci", ignore=shutil.ignore_patterns("__pycache__"))
    table = tmp_path / "foci" / "ir" / "ops.py"
    text = table.read_text(encoding="utf-8")
    assert text.count('_row("erf"') == 1
    assert "sinc" not in text
    table.write_text(text.replace('_row("erf"', ROW + '_row("erf"'), encoding="utf-8")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "FOCI_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, program, "reference", "blocked", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
