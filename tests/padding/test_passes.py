"""What the pass does to graphs: values stay, strides that users see stay, products get aligned rows."""

import pytest
import torch
import torch.nn.functional as F
from machines import Recorder, compiled, first_call_only, machine, other_sizes

from compiled import several
from foci.padding import Machine, legality
from foci.padding.operators import OPERATORS
from foci.padding.reading import fake_value

aten = torch.ops.aten
READS_BETWEEN_ROWS = legality.reads_between_rows  # tests replace it


def run_both(function, *inputs, recorder=None, fixed=(), **options):
    """The recorder after a first call; outputs and gradients agree with those of the function as it is, strides included.

    Two further calls of the compiled function, with other sizes but for those of `fixed` (`machines.other_sizes`), agree too.
    """
    recorder = recorder or Recorder()
    called = compiled(function, recorder, **options)
    agree(function, called, inputs)
    with first_call_only(recorder):
        for other_inputs in other_sizes(inputs, fixed):
            agree(function, called, other_inputs)
    return recorder


def agree(function, called, inputs):
    """Checks outputs and gradients of a compiled function beside those of the function."""
    results = []
    for run in (function, called):
        taken = [
            x.detach().clone().as_strided(x.shape, x.stride()).requires_grad_(x.requires_grad) if x.is_floating_point() else x
            for x in inputs
        ]
        outputs = run(*taken)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        differentiable = [x for x in taken if x.requires_grad]
        gradients = torch.autograd.grad(sum(out.float().pow(2).sum() for out in outputs), differentiable) if differentiable else ()
        results.append((*outputs, *gradients))
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(
            got, expected, rtol=2e-3 if expected.dtype.itemsize == 2 else 1e-4, atol=2e-2 if expected.dtype.itemsize == 2 else 1e-3
        )
        assert got.stride() == expected.stride()


# PAD-02
def test_linear_and_cross_entropy():
    recorder = Recorder()
    layer = torch.nn.Linear(64, 2047)
    t = torch.randint(0, 2047, (256,))
    x = torch.randn(256, 64, requires_grad=True)
    run_both(lambda x, w, t: F.cross_entropy(F.linear(x, w), t), x, layer.weight, t, recorder=recorder)
    assert recorder.strides("padded_mm") == [(2048, 1)]
    assert recorder.strides("padded") == [(2048, 1)]  # the gradient of the logits
    assert [padding.how for padding in recorder.paddings] == ["in place", "in place"]


# PAD-03
def test_logits_that_the_user_sees_keep_their_strides():
    def both(x, w):
        logits = x @ w.t()
        return logits, logits.logsumexp(1)

    recorder = run_both(both, torch.randn(256, 64, requires_grad=True), torch.randn(2047, 64, requires_grad=True))
    assert recorder.how()["mm"] == "written twice"


# PAD-03
@pytest.mark.parametrize("trained", [False, True])
def test_a_view_of_the_logits_that_the_user_sees(trained):
    def both(x, w):
        logits = (x.view(-1, 64) @ w.t()).view(4, 64, len(w))
        return logits, logits.view(-1, len(w)).logsumexp(1)

    recorder = run_both(both, torch.randn(4, 64, 64, requires_grad=trained), torch.randn(2047, 64, requires_grad=trained), fixed={64})
    assert recorder.how()["mm"] == "written twice"


class _KnownGradient(torch.autograd.Function):
    """Computes its gradient in the forward pass, as fused losses do, and a product of it."""

    @staticmethod
    def forward(ctx, y, a, b, transposed):
        gradient = (a @ b).tanh() @ b.t() @ a.t()
        ctx.save_for_backward(gradient)
        ctx.transposed = transposed
        return (y * 2).sum() + (gradient @ a).sum()

    @staticmethod
    def backward(ctx, _):
        (gradient,) = ctx.saved_tensors
        return gradient.t() if ctx.transposed else gradient, None, None, None


@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_gradient_that_the_forward_pass_saved_keeps_its_strides(grow, transposed):
    y, a, b = torch.randn(1027, 1027, requires_grad=True), torch.randn(1027, 64), torch.randn(64, 1027)
    recorder = Recorder(machine(odd=3.0, bandwidth=1e16) if grow else None, grow=grow)
    run_both(lambda *tensors: _KnownGradient.apply(*tensors, transposed), y, a, b, recorder=recorder)
    assert any(padding.how for padding in recorder.paddings)


# PAD-02
def test_each_of_two_operands_is_padded_only_with_the_other():
    recorder = run_both(lambda x, w: x @ w.t(), torch.randn(256, 2047), torch.randn(128, 2047))
    assert recorder.how() == {"arg0_1": "copied", "arg1_1": "copied"}
    assert recorder.strides("padded") == [(2048, 1), (2048, 1)]


# PAD-02
def test_a_copy_that_costs_more_than_it_gains_is_refused():
    recorder = run_both(lambda x, w: x @ w, torch.randn(256, 2047), torch.randn(2047, 128), recorder=Recorder(machine(bandwidth=1e9)))
    (padding,) = recorder.paddings
    assert padding.how is None
    assert "gains" in padding.reason


# PAD-03
def test_softmax_attention_of_odd_lengths():
    def attend(q, k, v):
        return torch.softmax(q @ k.mT / 4, -1) @ v

    q, k, v = (torch.randn(6, 1023, 16, requires_grad=True) for _ in range(3))
    recorder = run_both(attend, q, k, v)
    scores = [padding for padding in recorder.paddings if padding.sizes == (6, 1023, 1023)]
    assert len(scores) >= 3  # scores, weights, and the gradient of either
    assert {(padding.how, padding.padded) for padding in scores} == {("in place", (1023 * 1024, 1024, 1))}


# PAD-03
def test_concatenation():
    recorder = run_both(
        lambda a, b, w: torch.cat([a, b], 1) @ w, torch.randn(64, 1000), torch.randn(64, 1047), torch.randn(2047, 64), fixed={1000}
    )
    assert recorder.strides("padded_cat") == [(2048, 1)]


# PAD-03
def test_producer_behind_views():
    recorder = run_both(lambda x, w: torch.relu(x).view(128, -1) @ w, torch.randn(4, 32, 2046), torch.randn(2046, 64))
    assert recorder.strides("padded") == [(32 * 2048, 2048, 1)]


# PAD-03
def test_every_product_of_both_passes_reads_and_writes_padded_rows():
    def chain(x, w, v):
        weights = torch.softmax((x @ w).view(4, 32, len(v)) * 0.5, -1)
        return torch.cat([weights, weights.tanh()], 1).view(-1, len(v)) @ v

    inputs = [torch.randn(*sizes, requires_grad=True) for sizes in ((128, 64), (64, 2047), (2047, 32))]
    recorder = run_both(chain, *inputs, fixed={128})
    of_products = [aten.mm.default, OPERATORS["padded_mm"]]
    per_pass = [[node for node in graph.graph.nodes if node.target in of_products] for graph in recorder.graphs]
    assert [len(products) for products in per_pass] == [2, 4]
    for node in (node for products in per_pass for node in products):
        for matrix in (*node.args[:2], node):
            assert [stride % 4 for stride in fake_value(matrix).stride() if stride > 1] == [0], node
    # the concatenation is written in place, the gradient in front of the first product's view too
    assert recorder.strides("padded_cat") == [(64 * 2048, 2048, 1)]
    assert (32 * 2048, 2048, 1) in recorder.strides("padded")


# PAD-03
def test_the_gradient_of_a_concatenation_is_cut_from_padded_rows():
    inputs = [torch.randn(*sizes, requires_grad=True) for sizes in ((64, 1000), (64, 1047), (2047, 64))]
    recorder = run_both(lambda a, b, w: torch.cat([a.sin(), b.cos()], 1) @ w, *inputs, fixed={1000})
    assert recorder.strides("padded_cat") == [(2048, 1)]
    assert recorder.strides("padded_mm") == [(2048, 1)]


# PAD-03
def test_the_gradient_behind_a_view_has_padded_rows():
    inputs = torch.randn(4, 32, 2046, requires_grad=True), torch.randn(2046, 64, requires_grad=True)
    recorder = run_both(lambda x, w: torch.relu(x).view(128, -1) @ w, *inputs)
    assert recorder.strides("padded") == [(32 * 2048, 2048, 1)]
    assert recorder.strides("padded_mm") == [(2048, 1)]


def test_a_view_that_padding_would_break_is_refused():
    # rows of the product straddle rows of what is padded
    recorder = run_both(lambda x, w: torch.relu(x).view(x.shape[1], 128) @ w, torch.randn(128, 2046), torch.randn(128, 2047), fixed={128})
    assert "relu" not in recorder.how() or recorder.how()["relu"] is None


def test_weights_cast_by_autocast_are_padded_where_they_are_cast():
    weight = torch.randn(64, 2047)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return F.linear(x.sin(), weight).float()

    recorder = run_both(step, torch.randn(256, 2047), fixed={2047})
    assert recorder.strides("padded") == [(2048, 1), (2048, 1)]
    assert {padding.how for padding in recorder.paddings} == {"in place"}


# PAD-04
@pytest.mark.parametrize("reads", [False, True])
def test_nothing_is_padded_where_products_read_between_rows(reads, monkeypatch):
    """As mkldnn does with bfloat16 on a CPU with AMX."""
    monkeypatch.setattr(legality, "reads_between_rows", lambda dtype: reads and dtype is torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        recorder = run_both(lambda x, w: torch.relu(x) @ w, torch.randn(64, 2047).to(dtype), torch.randn(2047, 64).to(dtype), fixed={64})
        is_left = reads and dtype is torch.bfloat16
        assert all((padding.how is None) == is_left for padding in recorder.paddings)
        assert not is_left or any("between rows" in str(padding.reason) for padding in recorder.paddings)


# PAD-04
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_products_keep_to_their_rows_unless_this_cpu_is_known_not_to(dtype):
    for rows, length, columns in ((64, 33, 48), (100, 1001, 64), (128, 2040, 256)):
        left = torch.full((rows, length + 24), torch.nan, dtype=dtype)[:, :length].fill_(0.5)
        product = left @ torch.ones(length, columns, dtype=dtype)
        assert READS_BETWEEN_ROWS(dtype) or not product.isnan().any()


def test_an_input_changed_in_place():
    def change(x, w):
        x.mul_(2)
        return torch.relu(x) @ w

    recorder = Recorder()
    called = compiled(change, recorder)
    for size in several(2047, 2049, 2053):
        x, w = torch.randn(64, size), torch.randn(size, 64)
        mine, theirs = x.clone(), x.clone()
        torch.testing.assert_close(called(mine, w), change(theirs, w))
        assert mine.stride() == (size, 1)
        torch.testing.assert_close(mine, theirs)
    assert recorder.strides("padded")[0] == (2048, 1)


# PAD-06
@pytest.mark.parametrize("dynamic", [0, 1])
def test_a_symbolic_size(dynamic):
    recorder = Recorder()
    w = torch.randn(64, 2047)

    def logits(x, w):
        return (x @ w).logsumexp(1)

    called = compiled(logits, recorder)
    for size in several(64, 130, 71):
        x, v = torch.randn(size if dynamic == 0 else 64, 64), w if dynamic == 0 else torch.randn(64, 2047 + size)
        torch._dynamo.mark_dynamic(x if dynamic == 0 else v, dynamic)
        torch.testing.assert_close(called(x, v), logits(x, v))
    assert len(recorder.graphs) == 1
    (strides,) = recorder.strides("padded_mm")
    assert isinstance(strides[0], int if dynamic == 0 else torch.SymInt)


def test_frozen_weights_are_padded_once():
    weight = torch.randn(64, 2047)
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("weight")
    product = graph.call_function(torch.ops.aten.mm.default, (x, graph.call_function(torch.ops.aten.t.default, (w,))))
    graph.output((product,))
    module = torch.fx.GraphModule({"weight": weight}, graph)
    module.register_buffer("weight", weight)
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.passes.fake_tensor_prop import FakeTensorProp

    from foci.padding import pad

    activation = torch.randn(32, 2048)[:, :2047]
    FakeTensorProp(module, FakeTensorMode(allow_non_fake_inputs=True)).propagate(activation)
    expected = module(activation)[0]
    done = pad(module, (), machine())
    assert [(p.tensor, p.how) for p in done.paddings] == [("weight", "copied once")]
    assert done.graph_module.weight_padded.stride() == (2048, 1)
    torch.testing.assert_close(done.graph_module(activation)[0], expected)
    assert all(node.target is not OPERATORS["padded"] for node in done.graph_module.graph.nodes)


# What a product reads with padded rows, and a convolution too.
READ_TWICE = {"pointwise": lambda x: torch.relu(x), "cat": lambda x: torch.cat([x.sin(), x], 1), "input": lambda x: x}


# PAD-03
@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize("kind", READ_TWICE)
def test_inputs_of_convolutions_keep_their_strides(kind, grow):
    def both(x, kernel, w):
        read = READ_TWICE[kind](x)
        return F.conv2d(read, kernel), read @ w

    x, w = torch.randn(1, 4, 5, 1025, requires_grad=True), torch.randn(1025, 16, requires_grad=True)
    kernel = torch.randn(2, READ_TWICE[kind](x).shape[1], 3, 3, requires_grad=True)
    recorder = run_both(both, x, kernel, w, recorder=Recorder(machine(odd=3.0, bandwidth=1e16) if grow else None, grow=grow))
    strided_inputs = [
        (node.name, operand.name, value.shape, value.stride())
        for graph in recorder.graphs
        for node in graph.graph.nodes
        if "convolution" in str(node.target)
        for operand in node.all_input_nodes
        if (value := fake_value(operand)) is not None and not value.is_contiguous()
    ]
    assert strided_inputs == []
    if not grow and kind != "input":
        refused = {padding.reason for padding in recorder.paddings if padding.sizes == tuple(READ_TWICE[kind](x).shape)}
        assert "convolution would copy it" in refused
    else:
        assert any(padding.how for padding in recorder.paddings)


@torch.library.custom_op("foci_test::looked_at", mutates_args=())
def looked_at(x: torch.Tensor) -> torch.Tensor:
    """An operation of the user's own, which asks for strides."""
    LOOKS.append(x.stride())
    return x.sum(1)


@looked_at.register_fake
def _(x):
    return x.new_empty(x.shape[0])


LOOKS: list[tuple[int, ...]] = []


# PAD-03
@pytest.mark.parametrize("grow", [False, True])
@pytest.mark.parametrize(
    "produce", [lambda a, b: a @ b, lambda a, b: (a[:, :1] + b[0]).sin(), lambda a, b: torch.cat([b, b], 0)], ids=["product", "loop", "cat"]
)
def test_an_operation_of_the_user_sees_the_strides_that_it_would(produce, grow):
    def both(a, b, w):
        read = produce(a, b)
        return looked_at(read), read @ w

    LOOKS.clear()
    inputs = torch.randn(128, 64), torch.randn(64, 2047), torch.randn(2047, 32)
    recorder = run_both(both, *inputs, recorder=Recorder(machine(odd=3.0, bandwidth=1e16) if grow else None, grow=grow))
    assert [(n, 1) for n in (2047, 2049, 2053) for _ in range(2)] == LOOKS
    assert any(padding.how for padding in recorder.paddings)


# PAD-03
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("grow", [False, True])
def test_views_that_the_user_sees_of_what_products_pad(grow, trained):
    def views(x, w, v):
        logits = x @ w
        weights = logits.softmax(-1)
        return logits[:, 3:1000], logits.t(), weights.detach(), weights.view(4, 16, len(v)), weights @ v

    inputs = [torch.randn(*sizes, requires_grad=trained) for sizes in ((64, 48), (48, 2047), (2047, 32))]
    recorder = run_both(views, *inputs, recorder=Recorder(machine(odd=3.0, bandwidth=1e16) if grow else None, grow=grow), fixed={64})
    assert any(padding.how for padding in recorder.paddings)


def test_channels_last_stays():
    def f(x, w):
        return torch.relu(x).permute(0, 2, 3, 1).reshape(-1, 33) @ w

    x = torch.randn(2, 33, 8, 8).contiguous(memory_format=torch.channels_last)
    recorder = run_both(f, x, torch.randn(33, 64))
    assert all(padding.how is None for padding in recorder.paddings if padding.tensor == "relu")


# PAD-06
def test_an_unknown_device_is_left_alone():
    recorder = run_both(
        lambda x, w: x @ w, torch.randn(64, 2047), torch.randn(2047, 64), recorder=Recorder(Machine("new", 16, False, None))
    )
    assert [padding.reason for padding in recorder.paddings] == ["no measurements of new: run `foci tune`"]


# PAD-02
def test_two_compilations_decide_alike():
    def f(x, w, v):
        return torch.softmax(x @ w, 1) @ v

    inputs = torch.randn(64, 65, requires_grad=True), torch.randn(65, 1023, requires_grad=True), torch.randn(1023, 33, requires_grad=True)
    first, second = (run_both(f, *inputs) for _ in range(2))
    assert [graph.code for graph in first.graphs] == [graph.code for graph in second.graphs]
    assert [str(p) for p in first.paddings] == [str(p) for p in second.paddings]


# PAD-06
def test_the_report_says_where_and_how_much():
    recorder = run_both(lambda x, w: torch.relu(x) @ w, torch.randn(64, 2047), torch.randn(2047, 64))
    (padding,) = recorder.paddings
    assert padding.tensor == "relu"
    assert padding.products == ("mm [64, 2047] @ [2047, 64]",)
    assert padding.bytes == 63 * 4
    assert padding.seconds > 0
    assert "test_passes.py" in padding.location
    assert "in place" in str(padding)
