"""What foci does where names inside of Inductor are missing: it compiles by public means, or does without a feature and says so."""

# NOW-03

import importlib.util

import pytest
from without import run_without

from foci.compat import inductor as compat
from foci.compat import lookup

MODEL = """
import torch, foci, foci.torch_compile
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

torch.manual_seed(0)
first, last = torch.nn.Linear(24, 3 * 24), torch.nn.Linear(24, 37)
parameters = [*first.parameters(), *last.parameters()]

def model(x):
    q, k, v = first(x).view(*x.shape[:2], 3, 2, 12).permute(2, 0, 3, 1, 4)
    y = torch.softmax(q @ k.mT * 12 ** -0.5, -1) @ v
    return torch.nn.functional.cross_entropy(last(y.transpose(1, 2).flatten(2)).flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 37)

def compare(compiled, lengths=(9, 14)):
    for length in lengths:
        x = torch.randn(3, length, 24)
        (got, found), (want, expected) = ((loss, torch.autograd.grad(loss, parameters)) for loss in (compiled(x), model(x)))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)

def code_of(compiled):
    config.force_disable_caches = True
    with foci.observe() as log:
        _, code = run_and_get_code(lambda: compare(compiled, [9]))
    assert [site.fused for site in log.fusions] == [True] * len(log.fusions) and log.fusions
    return code

"""


@pytest.mark.slow
def test_without_lowerings_the_operators_are_called_and_nothing_is_padded():
    code = """
code = code_of(torch.compile(model, backend=foci.torch_compile.backend, fullgraph=True))
assert all("torch.ops.foci.attention" in text and "foci.operator" not in text for text in code), code
from foci.padding.options import options
assert options() == {}
assert_found("torch._inductor.ir.", False)
"""
    run_without("torch._inductor.ir.*,torch._inductor.lowering.*", MODEL + code)


@pytest.mark.slow
def test_passes_of_no_class_that_inductor_knows():
    code = """
from foci.fusion import inductor_pass
early = {"pre_grad_pass_timing": "early"} if hasattr(config, "pre_grad_pass_timing") else {}
with config.patch(pre_grad_custom_pass=inductor_pass, **early):
    code_of(torch.compile(model, fullgraph=True))
assert_found("torch._inductor.custom_graph_pass.", False)
"""
    run_without("torch._inductor.custom_graph_pass.*", MODEL + code)


@pytest.mark.slow
def test_without_any_name_of_inductor():
    code = """
from foci.compat.inductor import with_pre_grad_pass
assert all("torch.ops.foci.attention" in text for text in code_of(torch.compile(model, backend=foci.torch_compile.backend)))
for rest in ("inductor", "eager"):
    torch.compiler.reset()
    with foci.observe() as log:
        compare(foci.compile(model, rest=rest))
    assert all(site.fused for site in log.fusions) and log.fusions and log.calls
for wrong in ({"mode": "reduce-overhead"}, {"options": {"max_autotune": False}}):
    try:
        foci.compile(model, **wrong)
    except ValueError as error:
        assert "mode and options must be left out with torch" in str(error), error
    else:
        raise AssertionError(wrong)
with with_pre_grad_pass(None):
    assert config.pre_grad_custom_pass is None
assert_found("torch._inductor.", False)
assert_found("torch._dynamo.backends.common.", False)
"""
    run_without("torch._inductor*,torch._dynamo.backends.common.*,torch.utils._triton.*", MODEL + code)


def test_answers_without_names(monkeypatch):
    monkeypatch.setattr(lookup, "_patterns", ["torch.*"])
    assert compat.setting_types() is compat.modes() is None
    assert compat.known_settings({"shape_padding": False, "no_such": 1}, without="fails") == {}
    assert compat.setting("triton.cudagraphs") is None and compat.setting("no_such", 3) == 3
    monkeypatch.setenv("CXX", "some-compiler")
    assert compat.cpp_compiler() == "some-compiler"
    monkeypatch.delenv("CXX")
    assert compat.cpp_compiler() == "g++"
    assert compat.has_triton() is (importlib.util.find_spec("triton") is not None)
    compat.start_workers()


@pytest.mark.filterwarnings("ignore:torch._inductor.config.no_such is missing")
def test_answers_with_names(monkeypatch):
    monkeypatch.setattr(lookup, "_names", {})
    assert compat.setting("triton.cudagraphs") is False and compat.setting("no_such", 3) == 3
    assert compat.known_settings({"shape_padding": False, "no_such": 1}, without="fails") == {"shape_padding": False}
    assert compat.setting_types()["shape_padding"] is bool and "reduce-overhead" in compat.modes()
    assert "++" in compat.cpp_compiler()
    compat.note_names()
    assert set(lookup._names) >= set(compat._WITHOUT)
