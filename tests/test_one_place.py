"""One change, one place: each test adds something to a copy of the package as docs/design.md says, and finds it wherever it belongs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import foci

SOURCE = Path(foci.__file__).parent
DOCS = Path(__file__).parents[1] / "docs"


class Copy:
    """The package in another folder, to be changed and run there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        shutil.copytree(SOURCE, folder / "foci", ignore=shutil.ignore_patterns("__pycache__"))

    def add(self, module: str, before: str, text: str) -> None:
        """Write `text` before the only place in a module that begins with `before`."""
        path = self.folder / "foci" / module
        content = path.read_text(encoding="utf-8")
        assert content.count(before) == 1, f"{before!r} stands {content.count(before)} times in {module}"
        path.write_text(content.replace(before, text + before), encoding="utf-8")

    def create(self, module: str, text: str) -> None:
        """Write a new module."""
        path = self.folder / "foci" / module
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")

    def run(self, program: str, *words: object) -> None:
        """Run a program that imports the copy."""
        path = self.folder / "program.py"
        path.write_text(program, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": str(self.folder), "FOCI_CACHE_DIR": str(self.folder / "cache")}
        done = subprocess.run([sys.executable, path, *map(str, words)], env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture
def copy(tmp_path):
    return Copy(tmp_path)


# ---- a mask: one module ----

MASK = '''@picklable
def every_third(first: int) -> Mask:
    """Every third key, from `first` on.

    Example:
        >>> every_third(1).name
        'every_third(1)'
    """
    return Mask(lambda b, h, q_idx, kv_idx: (kv_idx >= first) & ((kv_idx - first) % 3 == 0), name=name_with_numbers("every_third({})", first))


'''
MASK_DEFINITION = """    "every_third": Definition("(kv_idx >= first) & ((kv_idx - first) % 3 == 0)"),
"""
MASK_EXAMPLE = """    MaskExample("every_third", "a third of the keys", lambda s: every_third(2), lambda s: (torch.arange(s.Skv) - 2) % 3 == 0),
"""
MASK_PROGRAM = """
import importlib.util, pickle, sys, torch, foci
from foci.cli.catalogue import list_entries
from foci.cli.expr_parser import read_mask
from foci.mask_examples import Sizes

def page(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", f"{sys.argv[1]}/{name}.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

assert "every_third" in foci.masks.__all__ and "every_third" in dir(foci.masks)
q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
found = foci.attention(q, k, v, mask=foci.masks.every_third(2))
keep = (torch.arange(40) >= 2) & ((torch.arange(40) - 2) % 3 == 0)
torch.testing.assert_close(found, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=keep.expand(40, 40)))
assert pickle.loads(pickle.dumps(foci.masks.every_third(2))).name == "every_third(2)"
assert ("every_third(first)", "Every third key, from `first` on.") in list_entries(foci.masks)
assert str(read_mask("causal & every_third(1)", Sizes())) == "Mask((causal & every_third(1)))"
assert str(read_mask("every_third", Sizes())) == "Mask(every_third(2))"
gallery, text = page("gallery"), page("gallery").page()
for words in ("### every_third", "`foci.masks.every_third(first)`", "(kv_idx - first) % 3 == 0", "a third of the keys"):
    assert words in text, words
assert "| `every_third(first)` | Every third key" in gallery.guide(open(f"{sys.argv[1]}/masks-and-scores.md").read())
assert "heading: foci.masks.every_third\\n" in page("reference").page("foci.masks")
"""


def test_a_mask_is_one_module(copy):
    pytest.importorskip("matplotlib")
    module = "masks/positional.py"
    copy.add(module, '    "everything",\n', '    "every_third",\n')
    copy.add(module, "@picklable\ndef everything", MASK)
    copy.add(module, '    "everything": Definition', MASK_DEFINITION)
    copy.add(module, '    MaskExample("everything"', MASK_EXAMPLE)
    copy.run(MASK_PROGRAM, DOCS)


# ---- a backend: one folder and one row ----

BACKEND = """
from foci.backends.contract import Backend, MachineFact
from foci.backends.reference import BACKEND as REFERENCE

class _Other(Backend):
    name = "other"

    def reject(self, problem, target, /):
        return "needs a causal mask" if problem.variant.is_plain else None

    def cost(self, problem, target, /):
        return 1e-9

    def note(self, problem, target, /):
        return "by the formula"

    def build(self, plan, /):
        return REFERENCE.build(plan)

    def features(self):
        return frozenset({"ruler"})

    def facts(self):
        return {"ruler": MachineFact("12 inches")}

BACKEND = _Other()
"""
BACKEND_PROGRAM = """
import io, torch, foci
from rich.console import Console
from foci.cli.environment import facts_table

assert foci.backends.names()[0] == "other"
q, k, v = torch.randn(3, 1, 2, 40, 16, requires_grad=True).unbind(0)
with foci.observe() as log:
    foci.attention(q, k, v, mask=foci.masks.causal()).sum().backward()
    foci.attention(q, k, v)
assert [call.backend for call in (*log.calls[:1], *log.backward_calls)] == ["other", "other"]
assert ("other", "needs a causal mask") in [(one.backend, one.reason) for one in log.calls[1].rejections]
with foci.use("other"):
    chosen = foci.explain(q, k, v, mask=foci.masks.causal())
assert "by the formula" in str(chosen) and "ruler" in chosen.decision.target.features
console = Console(file=io.StringIO(), width=200)
console.print(facts_table())
assert "other backend, ruler" in console.file.getvalue()
"""


def test_a_backend_is_one_folder_and_one_row(copy):
    copy.create("backends/other/__init__.py", BACKEND)
    copy.add("backends/__init__.py", '    "hopper": _BuiltIn', '    "other": _BuiltIn("foci.backends.other"),\n')
    copy.run(BACKEND_PROGRAM)


# ---- a rule for graphs: one row ----

RULE_PROGRAM = """
import sys, torch
from foci.fusion import fuse

sites = []

def backend(graph, inputs):
    fused = fuse(graph, inputs)
    sites.extend(fused.sites)
    return fused.graph_module.forward

def attend(q, k, v):
    return torch.softmax(torch.real(q @ k.mT / 4), -1) @ v

tensors = torch.randn(3, 1, 2, 40, 16).unbind(0)
# one length: only which rule there is matters
torch.testing.assert_close(torch.compile(attend, backend=backend)(*tensors), attend(*tensors))
expected = {"without": (False, "the scores go through `real`"), "with": (True, None)}[sys.argv[1]]
assert [(site.fused, site.reason) for site in sites] == [expected]
"""


@pytest.mark.slow
def test_a_rule_for_graphs_is_one_row(copy):
    copy.run(RULE_PROGRAM, "without")
    copy.add(
        "fusion/views.py",
        '    Rule(("transpose",)',
        '    Rule(("real",), "real numbers are their real parts", _same, ("torch.real(x)",), ("x.sgn()",)),\n',
    )
    copy.run(RULE_PROGRAM, "with")


# ---- an operation of the expression language: one row ----

OPERATION = """_row("sinc", _F, lambda a: math.sin(math.pi * a) / (math.pi * a) if a else 1.0, ranges.bounded(-0.22, 1.0),
             lambda y, a: _where(apply("eq", a, 0.0), 0.0, _div(_sub(apply("cos", _mul(math.pi, a)), y), a)),
             decomposed=lambda a: _where(apply("eq", a, 0.0), 1.0, _div(apply("sin", _mul(math.pi, a)), _mul(math.pi, a)))),
        """
OPERATION_PROGRAM = """
import sys, torch, foci
from foci.backends.cpu.price import seconds_per_score
from foci.backends.gpu.codegen import triton_codegen
from foci.ir.emit import emit
from foci.ir.expr import const, variable
from foci.ir.interval import Grid, bounds
from foci.ir.ops import apply
from foci.ir.ranges import Range
from foci.ir.simplify import simplify
from foci.problem import Formula
from foci.trace_functions import bind

expr = apply("sinc", variable("score"))
assert "tl.sin" in str(emit([expr], triton_codegen((), half=True)))
score = lambda s, b, h, q, k: s + torch.sinc(s)
formula = Formula(bind(score, None, torch.device("cpu")).variant)
assert Formula.parse(formula.text) == formula

# simplified, bounded, priced
assert simplify(apply("sinc", const(0.0))) is const(1.0)
wide = Range(torch.tensor(-9.0, dtype=torch.float64), torch.tensor(9.0, dtype=torch.float64))
find_range = bounds(expr, Grid({"score": wide}))
assert -0.23 < find_range.lo <= -0.2172 and 1.0 <= find_range.hi < 1.01, find_range
assert seconds_per_score(expr, (), needs_backward=True) > seconds_per_score(apply("neg", variable("score")), (), needs_backward=True) > 0

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
def test_an_operation_is_one_row(copy):
    assert "sinc" not in (SOURCE / "ir" / "ops.py").read_text(encoding="utf-8")
    copy.add("ir/ops.py", '_row("erf"', OPERATION)
    copy.run(OPERATION_PROGRAM, "reference", "blocked", "cpu")
