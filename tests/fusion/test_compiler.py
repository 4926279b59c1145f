"""The backend of torch.compile, foci.compile, the pass for Inductor and exported programs: how they are called and what they promise."""

import subprocess
import sys

import pytest
import torch
from spelling_harness import DIM, HEADS, Counted, compare, draw, hidden, qkv, results
from torch import nn

import foci
from compiled import several
from foci.fusion import Compiler, Fused, Site, VerificationError, fuse, fuse_exported, inductor_backend
from foci.fusion.verify import verify


class Block(nn.Module):
    """Causal attention with projections, as a small GPT has it."""

    def __init__(self, width=HEADS * DIM):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.o = nn.Linear(width, width)
        self.drop = nn.Dropout(0.0)

    def heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def forward(self, x):
        q, k, v = map(self.heads, self.qkv(x).chunk(3, -1))
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.mT) * q.shape[-1] ** -0.5
        weights = self.drop(scores.masked_fill(~causal, -torch.inf).softmax(-1))
        return x + self.o((weights @ v).transpose(1, 2).flatten(2))


class Broken(nn.Module):
    """Two blocks with a graph break between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)


def fused(log):
    return [site.fused for site in log.fusions]


def test_the_name_is_registered():
    assert "foci" in torch._dynamo.list_backends()


@pytest.mark.parametrize("order", ["import foci, torch._dynamo", "import torch._dynamo, foci", "import torch"])
def test_the_name_is_found_however_things_are_imported(order):
    code = (
        f"{order}; import torch; print(torch.compile(lambda x: x + 1, backend='foci', options={{'rest': 'eager'}})(torch.zeros(1)).item())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "1.0", done.stderr


def test_importing_foci_does_not_import_dynamo():
    code = "import sys, foci; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# FUSE-01
def test_by_name_with_options():
    model = Block()
    run = torch.compile(model, backend="foci", options={"rest": "eager", "verify": True}, fullgraph=True)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            x = draw(2, length, HEADS * DIM)
            torch.testing.assert_close(run(x), model(x))
    assert fused(log) == [True, True]
    assert "spelling" not in log.fusions[0].location
    assert "test_compiler.py:" in log.fusions[0].location


# FUSE-01
@pytest.mark.slow
@pytest.mark.skipif(inductor_backend.inductor_obstacle(["cpu"]) is not None, reason="no C++ compiler for Inductor")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_inductor_takes_the_rest(mode):
    model = Block()
    run = foci.compile(model, mode=mode, dynamic=True, rest="inductor", fullgraph=True)
    with foci.observe() as log:
        for length in several(20, 27, 33):
            compare(model, hidden(length), torch.float32, run, backward=True)
    assert fused(log) == [True]
    assert len(log.calls) == 3
    assert len(log.backward_calls) == 3


# FUSE-01
@pytest.mark.slow
@pytest.mark.skipif(inductor_backend.inductor_obstacle(["cpu"]) is not None, reason="no C++ compiler for Inductor")
def test_the_pass_in_inductor():
    from torch._inductor import config

    from foci.fusion import inductor_pass

    timing = {"pre_grad_pass_timing": "early"} if hasattr(config, "pre_grad_pass_timing") else {}
    model = Block()
    with config.patch(pre_grad_custom_pass=inductor_pass, **timing), foci.observe() as log:
        run = torch.compile(model, fullgraph=True)
        for length in several(20, 27, 33):
            compare(model, hidden(length), torch.float32, run, backward=True)
    assert fused(log) == [True, True]
    assert len(log.calls) == len(log.backward_calls) == 3


@pytest.mark.skipif(inductor_backend.inductor_obstacle(["cpu"]) is not None, reason="no C++ compiler for Inductor")
@pytest.mark.parametrize("timing", ["early", "late"])
def test_code_names_modules_of_foci_only_where_the_caches_key_holds_focis_code(timing):
    """An early pass has run before the cache is asked, so its uuid is in no key: another foci may find the code, and run it."""
    from torch._inductor import config
    from torch._inductor.utils import run_and_get_code

    from foci.fusion import inductor_pass

    if not hasattr(config, "pre_grad_pass_timing") and timing == "late":
        pytest.skip("this torch runs the pass early")
    timings = {"pre_grad_pass_timing": timing} if hasattr(config, "pre_grad_pass_timing") else {}
    with (
        config.patch(pre_grad_custom_pass=inductor_pass, fx_graph_cache=False, **timings),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        # one length: it reads the code of one graph
        _, codes = run_and_get_code(torch.compile(lambda q: torch.softmax(q @ q.mT, -1) @ q, fullgraph=True), qkv(20)[0].detach())
    assert len(codes) == 1
    assert ("foci.attention" in codes[0], "foci.operator" in codes[0]) == (True, timing == "late")


@pytest.mark.skipif(inductor_backend.inductor_obstacle(["cpu"]) is not None, reason="no C++ compiler for Inductor")
def test_the_pass_and_the_backend_together_look_once():
    from torch._inductor import config

    from foci.fusion import inductor_pass

    with config.patch(pre_grad_custom_pass=inductor_pass), foci.observe() as log:
        # one length: it counts who looks at one graph
        foci.compile(lambda q: torch.softmax(q @ q.mT, -2) @ q, rest="inductor")(qkv(20)[0])
    assert fused(log) == [False]


def test_without_a_compiler_the_rest_is_eager(monkeypatch):
    monkeypatch.setattr(inductor_backend.shutil, "which", lambda name: None)
    assert "C++" in inductor_backend.inductor_obstacle(["cpu"])
    model = Block()
    run = foci.compile(model)
    for length in several(20, 27, 33):
        compare(model, hidden(length), torch.float32, run, backward=True)


def test_a_graph_break_leaves_both_sides_fused():
    model = Broken()
    run = foci.compile(model, rest="eager")
    with foci.observe() as log:
        for length in several(20, 27, 33):
            compare(model, hidden(length), torch.float32, run, backward=True)
    assert fused(log) == [True] * 4


# FUSE-01
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_training_and_inference(context):
    model = Block()
    run = foci.compile(model, rest="eager")
    with foci.observe() as log, context():
        for length in several(20, 27, 33):
            out = run(*hidden(length))
            torch.testing.assert_close(out, model(*hidden(length)))
            assert out.requires_grad == torch.is_grad_enabled()
    assert fused(log) == [True, True]


@pytest.mark.parametrize("inside", [False, True], ids=["around the model", "inside the model"])
def test_autocast(inside):
    model = Block()

    def cast(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x)

    def run(function, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not inside):
            out = function(x)
        model.zero_grad()
        out.float().square().sum().backward()
        return out.detach(), model.qkv.weight.grad.clone()

    function = cast if inside else model
    compiled = foci.compile(function, rest="eager")
    with foci.observe() as log:
        for length in several(20, 27, 33):
            (x,) = hidden(length)
            actual, plain = run(compiled, x), run(function, x)
            exact = results(Block.forward, (model, x), backward=False)["output 0"]
            for ours, theirs in zip(actual, plain, strict=True):
                assert ours.dtype == theirs.dtype
            assert (actual[0] - exact).abs().max() <= 4 * (plain[0] - exact).abs().max()
            torch.testing.assert_close(actual[1], plain[1], rtol=0.05, atol=0.05 * float(plain[1].abs().max()))
    assert fused(log) == [True, True]
    assert {call.problem.dtype for call in log.calls} == {torch.bfloat16}


def test_fresh_lengths_compile_once():
    model = Block()
    counted = Counted(Compiler(rest="eager"))
    run = torch.compile(model, backend=counted, dynamic=True)
    for length in several(20, 33, 64, 7, 129):
        torch.testing.assert_close(run(*hidden(length)), model(*hidden(length)), rtol=1e-4, atol=1e-5)
    assert counted.graphs == 1


def test_exported_programs():
    model, x = Block().eval(), hidden(20)
    length = torch.export.Dim("length", min=2, max=512)
    program = torch.export.export(model, x, dynamic_shapes=({1: length},))
    fused_program, sites = fuse_exported(program)
    assert [site.fused for site in sites] == [True]
    names = [str(node.target) for node in fused_program.graph.nodes]
    assert sum("foci.attention" in name for name in names) == 1
    assert not any("softmax" in name for name in names)
    for n in (20, 33, 41):
        torch.testing.assert_close(fused_program.module()(*hidden(n)), model(*hidden(n)), rtol=1e-4, atol=1e-5)


def test_an_exported_program_compiles():
    model, x = Block().eval(), hidden(20)
    with foci.observe() as log:
        # one length: what is exported has one
        out = foci.compile(torch.export.export(model, x).module(), rest="eager")(*x)
    assert fused(log) == [True]
    torch.testing.assert_close(out, model(*x))


def test_an_exported_program_survives_a_file(tmp_path):
    model, x = Block().eval(), hidden(20)
    program, _ = fuse_exported(torch.export.export(model, x))
    torch.export.save(program, tmp_path / "model.pt2")
    torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(*x), model(*x))


def test_arguments_have_no_line_breaks():
    """Inductor writes every argument into a comment of the code that it makes for a GPU."""

    def look(graph_module, inputs):
        nodes = [node for node in fuse(graph_module, inputs).graph_module.graph.nodes if "attention" in str(node.target)]
        seen.extend(text for node in nodes for text in node.args if isinstance(text, str))
        return graph_module

    seen = []
    # one length: it reads one graph
    torch.compile(Block(), backend=look)(*hidden(20))
    assert len(seen) == 2
    assert not any("\n" in text for text in seen)


def test_the_graph_given_is_not_changed():
    seen = []

    def look(graph_module, inputs):
        before = str(graph_module.graph)
        fusion = fuse(graph_module, inputs)
        seen.append((before == str(graph_module.graph), fusion.sites[0].fused))
        return graph_module

    # one length: it reads one graph
    torch.compile(Block(), backend=look)(*hidden(20))
    assert seen == [(True, True)]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [({"mode": "fastest"}, "mode"), ({"options": {"max_autotone": True}}, "max_autotone"), ({"rest": "gcc"}, "rest")],
)
def test_wrong_arguments_are_errors_at_once(arguments, word):
    with pytest.raises(ValueError, match=word):
        # one length: it raises before anything compiles
        foci.compile(Block(), **arguments)


# FUSE-06
def test_tiny_problems_are_declined_on_the_cpu():
    def attend(q, k, v):
        return torch.softmax(q @ k.mT / 2, -1) @ v

    with foci.observe() as log:
        # one length: what is declined depends on it
        foci.compile(attend, rest="eager", dynamic=False)(*qkv(3))
        foci.compile(attend, rest="eager", dynamic=False)(*qkv(20))
    assert fused(log) == [False, True]
    assert "too few scores to pay: 3 x 3" in log.fusions[0].reason


class TestVerify:
    def test_a_wrong_graph_is_found(self):
        inputs = [t.requires_grad_() for t in qkv(20)]
        graph = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v)
        wrong = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.mT / 2.001, -1) @ v)
        site = Site(True, "model.py:7", "score", None, "matmul-softmax-matmul")
        with pytest.raises(VerificationError, match=r"output 0.*model.py:7"):
            verify(graph, Fused(wrong, (site,)), inputs)
        verify(graph, Fused(graph, (site,)), inputs)

    def test_a_wrong_gradient_is_found(self):
        inputs = [t.requires_grad_() for t in qkv(20)]
        graph = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q @ k.mT / 2, -1) @ v)
        wrong = torch.fx.symbolic_trace(lambda q, k, v: torch.softmax(q.detach() @ k.mT / 2, -1) @ v)
        with pytest.raises(VerificationError, match="gradient of input 0"):
            verify(graph, Fused(wrong, (Site(True, "", "score", None, "matmul-softmax-matmul"),)), inputs)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_a_right_one_passes(self, dtype):
        model = Block().to(dtype)
        run = foci.compile(model, rest="eager", verify=True, dynamic=True)
        with foci.observe() as log:
            for length in several(20, 27, 33):
                run(hidden(length)[0].to(dtype))
        assert fused(log) == [True]

    def test_inputs_keep_their_values(self):
        buffer = torch.zeros(1)

        def count(q, buffer):
            buffer += 1
            return torch.softmax(q @ q.mT, -1) @ q

        # one length: the self-check runs at the first call of a graph
        foci.compile(count, rest="eager", verify=True)(qkv(20)[0], buffer)
        assert buffer.item() == 1


def test_parameters_stay_known_as_such(monkeypatch):
    """Else each call checks how every parameter lies, and CUDA graphs copy them all."""
    from functorch.compile import make_boxed_func
    from torch._inductor import compile_fx

    static_indices, compile_graph = [], compile_fx.compile_fx

    def compile_inner(graph, inputs, **known):
        static_indices.append(known["static_input_idxs"])
        return make_boxed_func(graph.forward)

    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs, **_: compile_graph(graph, inputs, inner_compile=compile_inner))
    layer, x = torch.nn.Linear(DIM, DIM), draw(2, 20, DIM)

    def attend(x):
        return (layer(x) @ x.mT).softmax(-1) @ x

    for backend in (compile_fx.compile_fx, Compiler(rest="inductor")):
        torch._dynamo.reset()
        # one length: it reads what one graph was compiled with
        torch.compile(attend, backend=backend)(x)
    assert static_indices[0] == static_indices[1] == [0, 1]


class CastScores(torch.nn.Module):
    """Attention with the casts of transformers' eager functions: torch.export asserts dtype and device of what each reads."""

    def forward(self, q, k, v):
        scores = q @ k.transpose(2, 3) * 0.25
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        return weights.to(v.device) @ v


# FUSE-04
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_assertions_of_exported_programs_are_no_readers(dtype):
    lengths = torch.export.Dim("lengths", min=2, max=512)
    args = tuple(t.to(dtype) for t in qkv(20))
    program = torch.export.export(CastScores(), args, dynamic_shapes=[{2: lengths}] * 3)
    assert any("_assert_tensor_metadata" in str(node.target) for node in program.graph.nodes)
    fused_program, sites = foci.fusion.fuse_exported(program)
    assert [(site.fused, site.reason) for site in sites] == [(True, None)]
    assert not any("softmax" in str(node.target) for node in fused_program.graph.nodes)
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 2e-2, "rtol": 2e-2}
    for length in (20, 31, 64):
        args = tuple(t.to(dtype) for t in qkv(length))
        torch.testing.assert_close(fused_program.module()(*args), CastScores()(*args), **tolerance)


# FUSE-01
def test_a_model_is_compiled_in_place():
    """For those who hand a model to a trainer, which looks at its class and its signature."""
    model = Block()
    reference = Block()
    reference.load_state_dict(model.state_dict())
    model.compile(backend="foci", options={"rest": "eager"})
    assert type(model) is Block
    with foci.observe() as log:
        for length in (20, 31, 40):
            (x,) = hidden(length)
            x = x.to(next(model.parameters()).dtype)
            torch.testing.assert_close(model(x), reference(x), atol=1e-5, rtol=1e-5)
    assert log.fusions and all(site.fused for site in log.fusions)
