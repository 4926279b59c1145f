"""The pass as a whole: what it leaves of a graph, what its results are in the corners, and what keeps it from fusing."""

import itertools
import math
import time

import pytest
import torch
import torch.nn.functional as F
from fusing import B, D, Fusing, H, S, draw, fused, learned, plain, qkv, reasons
from torch import nn

import foci
from compiled import several
from foci.fusion import Compiler, fuse


# FUSE-03
def test_nothing_of_the_attention_is_left_but_the_operator():
    def causal(q, k, v):
        keep = torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))
        return torch.softmax((q @ k.mT * 0.3).masked_fill(~keep, -math.inf), -1) @ v

    backend = fused(causal, *learned(*qkv()))
    targets = [str(n.target) for n in backend.after[0].graph.nodes if n.op.startswith("call")]
    assert "foci.attention.default" in targets
    assert not {"softmax", "matmul", "tril", "ones", "masked_fill"} & {t.split(".")[-1].strip("<>") for t in targets}
    assert [site.variant for site in backend.sites] == ["score where kv_idx <= q_idx"]


# FUSE-05
def test_a_site_has_the_users_line():
    backend = fused(plain, *qkv())
    assert f"{plain.__code__.co_filename}:" in backend.sites[0].location
    assert backend.sites[0].kind == "matmul-softmax-matmul"


# FUSE-03
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_heads_that_were_repeated_are_not_stored(kv_heads, dynamic):
    def repeated(q, k, v):
        times = q.shape[1] // k.shape[1]
        k, v = (t[:, :, None].expand(-1, -1, times, -1, -1).reshape(q.shape[0], -1, t.shape[2], t.shape[3]) for t in (k, v))
        return plain(q, k, v)

    backend = fused(repeated, *learned(*qkv(kv_heads=kv_heads)), dynamic=dynamic)
    call = next(n for n in backend.after[0].graph.nodes if "foci.attention" in str(n.target))
    key = call.args[1].meta["example_value"]
    assert key.shape[0] * key.shape[1] in (B * kv_heads, kv_heads)


TURNED = {
    "mT": lambda t: t.mT, "mH": lambda t: t.mH, "adjoint": lambda t: t.adjoint(),
    "aten.mT": lambda t: torch.ops.aten.mT(t), "aten.mH": lambda t: torch.ops.aten.mH.default(t),
    "aten.adjoint": lambda t: torch.ops.aten.adjoint(t),
}  # fmt: skip


# FUSE-03
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", TURNED)
def test_any_spelling_of_a_transpose(name, dynamic):
    def repeated(q, k, v):
        k, v = (t[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape[0], -1, t.shape[2], t.shape[3]).float() for t in (k, v))
        return torch.softmax(q.float() @ TURNED[name](k) * 0.3, -1) @ v

    q, k, v = (t.bfloat16() for t in qkv(kv_heads=2))
    backend = Fusing()
    torch._dynamo.reset()
    compiled = torch.compile(repeated, backend=backend, dynamic=dynamic)
    for length in several(S, S - 3, S - 6):
        args = [t[:, :, :length] for t in (q, k, v)]
        torch.testing.assert_close(compiled(*args), repeated(*args), rtol=2e-2, atol=2e-2)
    for graph in backend.after:
        call = next(n for n in graph.graph.nodes if "foci.attention" in str(n.target))
        key = call.args[1].meta["example_value"]
        assert key.dtype == torch.bfloat16
        assert key.shape[0] * key.shape[1] == 2 * B


@pytest.mark.parametrize("name", ["numpy_T", "matrix_H", "mH"])
def test_any_spelling_of_the_transpose_of_a_matrix(name):
    backend = fused(lambda q, k, v: torch.softmax(q @ getattr(torch.ops.aten, name)(k), -1) @ v, *learned(*(t[0, 0] for t in qkv())))
    assert reasons(backend) == [None]
    assert not {n for n in backend.after[0].graph.nodes if name in str(n.target)}


@pytest.mark.parametrize("dynamic", [False, True])
def test_heads_that_are_merged_with_the_batch_are_told_apart_by_a_mask(dynamic):
    def merged(q, k, v, keep):
        scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(q.shape[0], q.shape[1], q.shape[2], -1)
        weights = scores.masked_fill(~keep[:, None, None], -math.inf).softmax(-1).flatten(0, 1)
        return torch.bmm(weights, v.flatten(0, 1)).view_as(q)

    keep = torch.arange(S) < torch.tensor([[S], [S - 7]])
    backend = fused(merged, *learned(*qkv()), keep, dynamic=dynamic)
    assert backend.sites[0].variant == "score where c0[b, kv_idx]"


def test_lengths_are_symbols():
    backend = fused(plain, *qkv(), dynamic=True)
    torch._dynamo.reset()
    compiled = torch.compile(plain, backend=backend, dynamic=True)
    for length in several(17, 23, 40):
        args = qkv(length=length)
        torch.testing.assert_close(compiled(*args), plain(*args))
    assert len(backend.before) == 2  # one graph here, one above


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
@pytest.mark.parametrize("added", [False, True])
def test_rows_that_attend_to_nothing_keep_their_meaning(low, added):
    def padded(q, k, v, keep):
        scores = q @ k.mT * 0.3
        if added:
            scores = scores + torch.where(keep[:, None, None], 0.0, low)
        else:
            scores = scores.masked_fill(~keep[:, None, None], low)
        return torch.softmax(scores, -1) @ v

    torch._dynamo.reset()
    compiled = torch.compile(padded, backend=Fusing())
    for length in several(S, S + 3, S + 9):
        args = *(t.float() for t in qkv(length=length)), torch.arange(length) < torch.tensor([[length], [0]])
        want, got = padded(*args), compiled(*args)
        if low == -math.inf:
            assert want[1].isnan().all()
            assert (got[1] == 0).all()
            want, got = want[0], got[0]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_a_causal_mask_of_the_lowest_number_needs_no_second_look():
    def causal(q, k, v):
        keep = torch.tril(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool))
        return torch.softmax((q @ k.mT).masked_fill(~keep, torch.finfo(q.dtype).min), -1) @ v

    backend = fused(causal, *learned(*qkv()))
    assert not any("where" in str(n.target) for n in backend.after[0].graph.nodes)


# FUSE-03
def test_a_sink_is_a_column_that_is_dropped():
    def sink(q, k, v, logit):
        scores = torch.cat([q @ k.mT * 0.3, logit.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], -1)
        scores = scores - scores.max(-1, keepdim=True).values
        return torch.softmax(scores, -1)[..., :-1] @ v

    backend = fused(sink, *learned(*qkv(), draw(H, seed=4)))
    assert reasons(backend) == [None]


def test_a_permuted_batch_is_followed():
    def permuted(q, k, v):
        weights = (q @ k.mT).permute(1, 0, 2, 3).softmax(-1)
        return weights @ v.transpose(0, 1)

    assert reasons(fused(permuted, *learned(*qkv()))) == [None]


def test_a_view_that_nobody_reads_does_not_block():
    def idle(q, k, v):
        scores = q @ k.mT
        scores.view(-1, q.shape[2])
        return scores.softmax(-1) @ v

    assert reasons(fused(idle, *learned(*qkv()))) == [None]


def test_two_columns_are_no_sink():
    def columns(q, k, v, logit):
        scores = torch.cat([q @ k.mT * 0.3, logit.view(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 2)], -1)
        return torch.softmax(scores, -1)[..., :-2] @ v

    assert reasons(fused(columns, *qkv(), draw(H, seed=4))) == ["the scores are concatenated with something that is no single column"]


# FUSE-03
def test_gradients_flow_to_what_was_captured():
    def biased(q, k, v, bias, slopes, table):
        position = torch.arange(q.shape[2])
        distance = (position[:, None] - position).abs()
        bias = bias + slopes[:, None, None] * distance + table[distance.clamp(max=4)].permute(2, 0, 1)
        return torch.softmax(q @ k.mT * 0.3 + bias, -1) @ v

    backend = fused(biased, *learned(*qkv(), draw(1, H, S, S, seed=5), draw(H, seed=6), draw(5, H, seed=7)))
    assert reasons(backend) == [None]


# FUSE-04
def test_operands_keep_what_the_caller_gets():
    def cached(q, k, v):
        k, v = k.transpose(1, 2).contiguous().transpose(1, 2), v * 2
        return plain(q, k, v), k, v

    assert reasons(fused(cached, *learned(*qkv()))) == [None]


def test_the_mask_of_all_layers_is_made_once_and_not_kept():
    def layers(q, k, v, keep):
        position = torch.arange(q.shape[2])
        mask = torch.where((position <= position[:, None]) & keep[:, None, None], 0.0, -1e30)
        for _ in range(3):
            q = torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
        return q

    keep = torch.arange(S) < torch.tensor([[S], [S - 3]])
    backend = fused(layers, *learned(*qkv()), keep)
    assert len({site.variant for site in backend.sites}) == 1
    shapes = [
        tuple(n.meta["example_value"].shape) for n in backend.after[0].graph.nodes if isinstance(n.meta.get("example_value"), torch.Tensor)
    ]
    assert not [shape for shape in shapes if shape[-2:] == (S, S)]


def scale_of(backend):
    """The number that the operator takes, and how many tensors it captures."""
    call = next(n for n in backend.after[0].graph.nodes if n.target is torch.ops.foci.attention.default)
    (scale,) = [value for value in call.args if isinstance(value, float)][:1]
    return scale, len(call.args[3])


# FUSE-04
def test_only_a_constant_is_the_scale():
    by_constant = lambda q, k, v: torch.softmax(q @ k.mT / torch.full([], 4.0, dtype=q.dtype), -1) @ v
    assert scale_of(fused(by_constant, *learned(*qkv()))) == (0.25, 0)


# FUSE-04
@pytest.mark.parametrize("shape", [(), (1,), (H, 1, 1)], ids=str)
def test_a_tensor_is_a_factor_of_the_scores_and_gets_its_gradient(shape):
    by_tensor = lambda q, k, v, factor: torch.softmax(q @ k.mT * factor, -1) @ v
    backend = fused(by_tensor, *learned(*qkv(), draw(*shape, seed=4)))
    assert scale_of(backend) == (1.0, 1)
    assert "c0" in backend.sites[0].variant


# FUSE-04
@pytest.mark.parametrize("order", list(itertools.permutations((1, 2, 3))), ids=str)
def test_a_permuted_key_is_what_its_dimensions_say(order):
    """Sizes alike, so that nothing but the order tells a transpose from another permutation."""
    layer = lambda q, k, v: torch.softmax(q @ k.permute(0, *order), -1) @ v
    inputs = [draw(2, 6, 6, 6, seed=n) for n in range(3)]
    fusion = fuse(torch.fx.symbolic_trace(layer), inputs)
    torch.testing.assert_close(fusion.graph_module(*inputs), layer(*inputs))
    assert [site.fused for site in fusion.sites] == [True]


def test_the_logsumexp_of_the_scores_is_the_operators():
    def layer(q, k, v):
        scores = q @ k.mT
        share = torch.sigmoid(scores.logsumexp(-1))
        return (scores.softmax(-1) @ v) * share[..., None]

    backend = fused(layer, *learned(*qkv()))
    assert [site.fused for site in backend.sites] == [True]
    assert not [n for n in backend.after[0].graph.nodes if "logsumexp" in str(n.target)]


def test_autocast_computes_in_its_dtype():
    def cast(q, k, v):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.softmax(q @ k.mT * 0.3, -1) @ v

    torch._dynamo.reset()
    backend = Fusing()
    compiled = torch.compile(cast, backend=backend)
    for length in several(S, S + 3, S + 9):
        args = [t.float() for t in qkv(length=length)]
        out = compiled(*args)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, cast(*args), rtol=2e-2, atol=2e-2)
    assert reasons(backend) == [None, None]


def test_operands_widened_for_the_product_are_read_narrow():
    def widened(q, k, v):
        weights = torch.softmax(q.float() @ k.float().mT * 0.3, -1)
        return weights.to(v.dtype) @ v

    torch._dynamo.reset()
    backend = Fusing()
    compiled = torch.compile(widened, backend=backend)
    for length in several(S, S + 3, S + 9):
        args = [t.bfloat16() for t in qkv(length=length)]
        torch.testing.assert_close(compiled(*args), widened(*args), rtol=2e-2, atol=2e-2)
    for graph in backend.after:
        call = next(n for n in graph.graph.nodes if "foci.attention" in str(n.target))
        assert {n.meta["example_value"].dtype for n in call.args[:3]} == {torch.bfloat16}


# FUSE-04
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)], ids=str)
def test_operands_of_two_dtypes_are_computed_in_the_wider_one(dtypes):
    def mixed(q, k, v):
        return torch.softmax(q @ k.mT * 0.3, -1).to(v.dtype) @ v

    args = [t.to(dtype) for t, dtype in zip(qkv(), (dtypes[0], dtypes[0], dtypes[1]), strict=True)]
    fusion = fuse(torch.fx.symbolic_trace(mixed), args)
    call = next(n for n in fusion.graph_module.graph.nodes if "foci.attention" in str(n.target))
    assert {n.meta["example_value"].dtype for n in call.args[:3]} == {torch.float32}
    out = fusion.graph_module(*args)
    assert out.dtype == dtypes[1]
    torch.testing.assert_close(out, mixed(*args), rtol=2e-2, atol=2e-2)


# FUSE-04
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(S, S), ()], ids=str)
def test_a_mask_of_another_dtype_keeps_its_values(shape, dtype):
    def added(q, k, v, mask):
        return torch.softmax(q @ k.mT * 0.3 + mask, -1).to(v.dtype) @ v

    args = [*(t.float() for t in qkv()), (draw(*shape, seed=4) * 3).to(dtype)]
    fusion = fuse(torch.fx.symbolic_trace(added), args)
    torch.testing.assert_close(fusion.graph_module(*args), added(*args))


# FUSE-04
@pytest.mark.parametrize("which", range(4))
def test_operands_and_masks_on_two_devices_are_refused(which):
    def added(q, k, v, mask):
        return torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v

    args = [*qkv(), draw(S, S, seed=4)]
    args[which] = args[which].to("meta")
    with pytest.raises(ValueError, match="two (different )?devices,? (cpu|meta)( and|,) (cpu|meta)"):
        fuse(torch.fx.symbolic_trace(added), args)


def test_dropout_draws_one_seed():
    def dropped(q, k, v):
        return F.dropout(torch.softmax(q @ k.mT * 0.3, -1), 0.5, training=True) @ v

    torch._dynamo.reset()
    backend, args = Fusing(), [t.float() for t in qkv()]
    # one length: the mean of 300 draws is that of one; dropout at several is in api/test_compile.py
    compiled = torch.compile(dropped, backend=backend)
    torch.manual_seed(3)
    first = compiled(*args)
    torch.manual_seed(3)
    assert torch.equal(compiled(*args), first)
    assert not torch.equal(compiled(*args), first)
    mean = torch.stack([compiled(*args) for _ in range(300)]).mean(0)
    torch.testing.assert_close(mean, torch.softmax(args[0] @ args[1].mT * 0.3, -1) @ args[2], rtol=0.5, atol=0.35)


def test_torchs_modules_are_opened():
    module = nn.MultiheadAttention(H * D, H, batch_first=True).double()
    (x,) = learned(draw(B, S, H * D, seed=4))
    hidden = torch.arange(S) >= torch.tensor([[S], [S - 5]])
    backend = fused(lambda x, hidden: module(x, x, x, key_padding_mask=hidden, need_weights=False)[0], x, hidden)
    assert [(site.kind, site.fused) for site in backend.sites] == [("mha", True)]
    backend = fused(lambda x: module(x, x, x), x)
    assert [(site.kind, site.fused) for site in backend.sites] == [("mha", False)]


# FUSE-06
def test_calls_by_name_are_lowered():
    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    backend = fused(sdpa, *learned(*qkv(kv_heads=2)))
    assert [(s.kind, s.variant) for s in backend.sites] == [("sdpa", "score where kv_idx <= q_idx")]


# FUSE-06
def test_calls_of_flex_attention_are_lowered_with_their_gradients():
    from torch.nn.attention.flex_attention import flex_attention

    def flex(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda score, b, h, q_idx, kv_idx: score - (q_idx - kv_idx).abs())

    torch._dynamo.reset()

    def formula(q, k, v):
        position = torch.arange(q.shape[2])
        return (q @ k.mT / D**0.5 - (position[:, None] - position).abs()).softmax(-1) @ v

    backend = Fusing()
    compiled = torch.compile(flex, backend=backend, fullgraph=True)
    for length in several(S, S + 3, S + 9):
        args = [t.float() for t in qkv(length=length)]
        torch.testing.assert_close(compiled(*args), formula(*args))
    assert [(site.kind, site.fused) for site in backend.sites] == [("flex", True)] * 2
    # Gradients are those of the graph: torch's own function has no backward on the CPU, and takes no tensor that requires a gradient.
    args = learned(*(t.float() for t in qkv()))
    (out,), want = backend.after[0](*args), formula(*args)
    torch.testing.assert_close(out, want)
    grads = (torch.autograd.grad(t.square().sum(), args) for t in (out, want))
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


# FUSE-06, FLEX-06
def test_block_masks_of_flex_attention_may_have_other_block_sizes():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    args, position = [t.float() for t in qkv()], torch.arange(S)
    compiled = torch.compile(lambda blocks, *args: flex_attention(*args, block_mask=blocks), backend=Compiler(rest="eager"))
    scores = args[0] @ args[1].mT / D**0.5
    want = scores.masked_fill(position[:, None] < position, -torch.inf).softmax(-1) @ args[2]
    with foci.observe() as log:
        for size in several(8, 16, 4, 32):
            blocks = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, None, None, S, S, device="cpu", BLOCK_SIZE=size)
            torch.testing.assert_close(compiled(blocks, *args), want)
    assert all(site.fused for site in log.fusions), [site.reason for site in log.fusions]


# FUSE-06, FLEX-06
def test_a_score_that_flex_attention_excludes_is_excluded_in_full_blocks_too():
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    blocks = create_block_mask(lambda b, h, q_idx, kv_idx: kv_idx >= 0, None, None, S, S, device="cpu", BLOCK_SIZE=8)

    def flex(q, k, v):
        causal = lambda score, b, h, q_idx, kv_idx: torch.where(q_idx >= kv_idx, score, -torch.inf)
        return flex_attention(q, k, v, score_mod=causal, block_mask=blocks)

    torch._dynamo.reset()
    backend, args = Fusing(), [t.float() for t in qkv()]
    # one length: the block mask that the function closes over has its lengths as numbers
    out = torch.compile(flex, backend=backend, fullgraph=True)(*args)
    assert [(site.kind, site.fused) for site in backend.sites] == [("flex", True)]
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    want = (args[0].double() @ args[1].double().mT / D**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ args[2].double()
    torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_a_graph_without_example_values_gets_them():
    graph = torch.fx.symbolic_trace(plain)
    args = qkv()
    fusion = fuse(graph, args)
    assert [site.fused for site in fusion.sites] == [True]
    torch.testing.assert_close(fusion.graph_module(*args), plain(*args))


def test_an_unforeseen_error_is_a_reason(monkeypatch):
    monkeypatch.setattr("foci.fusion.fuse_pass.prepare", lambda match: 1 / 0)
    backend = fused(plain, *qkv())
    assert "ZeroDivisionError" in backend.sites[0].reason


def test_the_pass_is_linear_in_the_graph():
    def stacked(layers):
        def run(q, k, v):
            position = torch.arange(q.shape[2])
            mask = torch.where(position <= position[:, None], 0.0, -1e30)
            for _ in range(layers):
                q = q + torch.softmax(q @ k.mT * 0.3 + mask, -1) @ v
            return q

        return run

    def seconds(layers):
        torch._dynamo.reset()
        kept = []
        # one length: it only makes a graph
        torch.compile(stacked(layers), backend=lambda m, x: kept.append((m, x)) or m.forward)(*qkv())
        best = math.inf
        for _ in range(3):
            start = time.process_time()
            assert len(fuse(*kept[0]).sites) == layers
            best = min(best, time.process_time() - start)
        return best

    assert seconds(32) < 4 * 2.0 * seconds(8)


def test_observed_backends_run():
    with foci.observe() as log:
        fused(plain, *qkv())
    assert len(log.calls) == 3  # one for each length
