"""foci as a flash attention implementation in torch's registry: the operators by their schemas, through torch's autograd, and errors."""

# ECO-02

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F
from drawn import rand
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn

import foci
from foci.integrations import flash, register_flash_attention

aten = torch.ops.aten
registry = torch.nn.attention
needs_registry = pytest.mark.skipif(not hasattr(registry, "register_flash_attention_impl"), reason="this torch has no registry")


def operators():
    """Names, functions and schemas of what this torch has."""
    for name, function in flash.OPERATORS.items():
        operator, _, overload = name.partition(".")
        packet = getattr(aten, operator, None)
        if packet is not None and (overload or "default") in packet.overloads():
            yield pytest.param(name, function, getattr(packet, overload or "default")._schema, id=name)


@pytest.fixture
def on_cpu():
    """torch's operators by foci on CPU tensors, for which torch has none."""
    handle = flash.install("CPU")
    yield
    handle.remove()
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_flash_attention_forward", "CPU")


def plain(q, k, v, *, is_causal=False, left=None, right=None, scale=None):
    """[B, H, S, D] by the formula, aligned to the lower right, and the logsumexp."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2] - torch.arange(k.shape[2])
    keep = torch.ones_like(distance, dtype=torch.bool)
    if left not in (None, -1):
        keep &= distance <= left
    if is_causal or right not in (None, -1):
        keep &= distance >= (0 if is_causal else -right)
    scores = scores.masked_fill(~keep, -torch.inf)
    return torch.softmax(scores, -1) @ v, scores.logsumexp(-1)


def leaves(*shapes, dtype=torch.float64):
    return [rand(*shape, dtype=dtype, seed=n).requires_grad_() for n, shape in enumerate(shapes)]


def attends(window):
    """`window_size` of `varlen_attn`, by the name that this torch has for it."""
    if window == (-1, -1):
        return {}
    return {"window_size": window} if "window_size" in inspect.signature(varlen_attn).parameters else {"is_causal": True}


def gradients(out, tensors):
    return torch.autograd.grad(out, tensors, rand(*out.shape, seed=99).to(out))


def close(actual, wanted, tolerance=1e-10):
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance, check_dtype=False)


@needs_registry
def test_registered_activated_and_restored():
    register_flash_attention()
    register_flash_attention()
    assert registry.list_flash_attention_impls().count("FOCI") == 1
    assert registry.current_flash_attention_impl() is None
    registry.activate_flash_attention_impl("FOCI")
    try:
        assert registry.current_flash_attention_impl() == "FOCI"
    finally:
        registry.restore_flash_attention_impl()
    assert registry.current_flash_attention_impl() is None


def test_error_names_the_version_without_a_registry(monkeypatch):
    monkeypatch.delattr(registry, "register_flash_attention_impl", raising=False)
    with pytest.raises(RuntimeError, match=rf"torch {torch.__version__.split('+')[0]}.*2\.11 to 2\.13"):
        register_flash_attention()


@pytest.mark.parametrize("name, function, schema", list(operators()))
def test_functions_take_what_the_schemas_say(name, function, schema):
    if function is flash.refuse_quantised:
        with pytest.raises(ValueError, match="q_descale"):
            function(*[None for _ in schema.arguments])
        return
    takes = inspect.signature(flash.flash_forward if function is flash.flash_forward_into else function).parameters
    arguments = schema.arguments[1:] if function is flash.flash_forward_into else schema.arguments
    positional = [a.name for a in arguments if not a.kwarg_only]
    assert [p.name for p in takes.values() if p.kind is p.POSITIONAL_OR_KEYWORD] == positional
    named = {a.name for a in arguments if a.kwarg_only}
    assert named <= {p.name for p in takes.values() if p.kind is p.KEYWORD_ONLY}
    for argument in arguments:
        parameter = takes[argument.name]
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        if argument.has_default_value():
            assert parameter.default == argument.default_value


@pytest.mark.parametrize("heads_in_rows", [True, False])
@pytest.mark.parametrize("lengths", [(24, 24), (7, 20)])
@pytest.mark.parametrize("is_causal, scale", [(False, None), (True, None), (True, 0.3)])
def test_dense_results_and_gradients(on_cpu, is_causal, scale, lengths, heads_in_rows):
    q, k, v = leaves((2, 4, lengths[0], 16), (2, 2, lengths[1], 16), (2, 2, lengths[1], 16))
    inputs = [t.transpose(1, 2).contiguous().transpose(1, 2) if heads_in_rows else t for t in (q, k, v)]
    with foci.observe() as log:
        out, lse, cum_q, cum_k, max_q, max_k, state, offset, debug = aten._scaled_dot_product_flash_attention(
            *inputs, 0.0, is_causal, scale=scale
        )
        grads = gradients(out, (q, k, v))
    assert len(log.calls) == len(log.backward_calls) == 1
    assert {call.backend for call in (*log.calls, *log.backward_calls)}.isdisjoint({"aten"})
    wanted, wanted_lse = plain(q, k, v, is_causal=is_causal, scale=scale)
    close((out, lse, *grads), (wanted, wanted_lse, *gradients(wanted, (q, k, v))))
    assert out.stride() == torch.empty_like(inputs[0]).stride()
    assert lse.is_contiguous()
    assert (cum_q, cum_k, max_q, max_k) == (None, None, *lengths)
    assert (state.shape, offset.shape, debug.shape) == ((2,), (), (0,))
    assert (state.dtype, offset.dtype, debug.dtype) == (torch.uint64, torch.uint64, q.dtype)


def test_dtypes_and_strides_are_those_of_torchs_meta_kernels(on_cpu):
    q, k, v = (t.transpose(1, 2) for t in leaves(*[(2, 24, 4, 16)] * 3, dtype=torch.bfloat16))
    results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
    meta = aten._scaled_dot_product_flash_attention(*(t.detach().to("meta") for t in (q, k, v)), 0.0, True)
    for a, b in zip(results, meta, strict=True):
        if isinstance(a, torch.Tensor):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())
        else:
            assert a == b


@pytest.mark.parametrize("window", [(None, None), (-1, -1), (3, 0), (2, 5), (-1, 4), (6, None)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_windows_of_dense_sequences(on_cpu, is_causal, window):
    q, k, v = leaves((2, 9, 4, 16), (2, 12, 2, 16), (2, 12, 2, 16))
    left, right = window
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, None, None, 9, 12, 0.0, is_causal, False, window_size_left=left, window_size_right=right
    )
    wanted, wanted_lse = plain(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=is_causal, left=left, right=right)
    wanted = wanted.transpose(1, 2)
    close((out, lse, *gradients(out, (q, k, v))), (wanted, wanted_lse, *gradients(wanted, (q, k, v))))


def by_sequence(q, k, v, q_lengths, k_lengths, **how):
    parts = zip(q.split(q_lengths), k.split(k_lengths), v.split(k_lengths), strict=True)
    results = [plain(*(t.transpose(0, 1)[None] for t in part), **how) for part in parts]
    return torch.cat([out[0].transpose(0, 1) for out, _ in results]), torch.cat([lse[0] for _, lse in results], 1)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (3, 0), (2, 5)])
def test_packed_sequences(on_cpu, window):
    q_lengths, k_lengths = [3, 8, 5], [6, 8, 9]
    q, k, v = leaves((16, 4, 16), (23, 2, 16), (23, 2, 16))
    cu_q, cu_k = (torch.tensor([0, *n]).cumsum(0).int() for n in (q_lengths, k_lengths))
    left, right = window
    out, lse, *_ = aten._flash_attention_forward(
        q, k, v, cu_q, cu_k, 8, 9, 0.0, False, False, window_size_left=left, window_size_right=right
    )
    wanted, wanted_lse = by_sequence(q, k, v, q_lengths, k_lengths, left=left, right=right)
    close((out, lse, *gradients(out, (q, k, v))), (wanted, wanted_lse, *gradients(wanted, (q, k, v))))


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_packed_sequences_by_varlen_attn(on_cpu, window):
    q, k, v = leaves(*[(16, 4, 16)] * 3)
    offsets = torch.tensor([0, 3, 11, 16], dtype=torch.int32)
    with foci.observe() as log:
        out = varlen_attn(q, k, v, offsets, offsets, 8, 8, **attends(window))
        grads = gradients(out, (q, k, v))
    assert len(log.calls) == len(log.backward_calls) == 1
    wanted, _ = by_sequence(q, k, v, [3, 8, 5], [3, 8, 5], left=window[0], right=window[1])
    close((out, *grads), (wanted, *gradients(wanted, (q, k, v))))


def test_keys_in_use_and_results_in_place(on_cpu):
    q, k, v = (t.detach() for t in leaves((8, 2, 16), (12, 2, 16), (12, 2, 16)))
    cu_q, cu_k, used = torch.tensor([0, 3, 8]), torch.tensor([0, 5, 12]), torch.tensor([4, 7])
    out, lse, *_ = flash.flash_forward(q, k, v, cu_q, cu_k, 5, 7, 0.0, True, False, seqused_k=used)
    kept = [0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11]
    close((out, lse), by_sequence(q, k[kept], v[kept], [3, 5], [4, 7], is_causal=True))
    into = torch.full_like(q, torch.nan)
    actual = flash.flash_forward_into(into, q, k, v, cu_q, cu_k, 5, 7, 0.0, True, False, seqused_k=used)
    close((into, actual), (out, lse))


def test_autocast_has_had_its_turn(on_cpu):
    q, k, v = leaves(*[(1, 2, 8, 16)] * 3, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = aten._scaled_dot_product_flash_attention(q, k, v)[0]
    assert out.dtype is torch.float32
    assert [g.dtype for g in gradients(out, (q, k, v))] == [torch.float32] * 3


def test_use_restricts_and_torchs_own_kernels_are_never_taken(on_cpu):
    q, k, v = leaves(*[(1, 2, 8, 16)] * 3)
    with foci.use("blocked"), foci.observe() as log:
        aten._scaled_dot_product_flash_attention(q, k, v)
    assert [call.backend for call in log.calls] == ["blocked"]
    with foci.use("aten"), pytest.raises(foci.NoViableBackend):
        aten._scaled_dot_product_flash_attention(q, k, v)


DENSE = [torch.ones(1, 2, 8, 16) for _ in range(3)]
ROWS = [torch.ones(8, 2, 16) for _ in range(3)]
OFFSETS = torch.tensor([0, 8])
PACKED = (*ROWS, OFFSETS, OFFSETS, 8, 8)
NO_GRADIENT = (torch.ones(1, 2, 8, 16), *DENSE, torch.ones(1, 2, 8, 16), torch.ones(1, 2, 8), None, None, 8, 8)


@pytest.mark.parametrize(
    "call, names",
    [
        (lambda: flash.dense_forward(*DENSE, 0.1), "dropout_p"),
        (lambda: flash.dense_forward(*DENSE, 0.0, False, True), "return_debug_mask"),
        (lambda: flash.dense_forward(*DENSE[:2], DENSE[2][..., :8]), "value"),
        (lambda: flash.dense_forward(DENSE[0].expand(2, -1, -1, -1), *DENSE[1:]), "batch size"),
        (lambda: flash.dense_backward(*NO_GRADIENT, 0.1, False, OFFSETS, OFFSETS), "dropout_p"),
        (lambda: flash.flash_forward(*PACKED, 0.1, False, False), "dropout_p"),
        (lambda: flash.flash_forward(*PACKED, 0.0, False, True), "return_debug_mask"),
        (lambda: flash.flash_forward(*PACKED, 0.0, False, False, alibi_slopes=OFFSETS), "alibi_slopes"),
        (lambda: flash.flash_forward(*PACKED, 0.0, False, False, block_table=OFFSETS), "block_table"),
        (lambda: flash.flash_forward(*PACKED, 0.0, False, False, window_size_left=-2), "window_size"),
        (lambda: flash.flash_forward(*ROWS, OFFSETS, None, 8, 8, 0.0, False, False), "cum_seq_k is None"),
        (lambda: flash.flash_forward(*DENSE, None, None, 8, 8, 0.0, False, False, seqused_k=OFFSETS), "seqused_k"),
        (lambda: flash.flash_forward(*ROWS, None, None, 8, 8, 0.0, False, False), "query"),
        (
            lambda: flash.flash_forward(ROWS[0].clone().requires_grad_(), *PACKED[1:], 0.0, False, False, seqused_k=OFFSETS[1:]),
            "seqused_k has no gradients",
        ),
    ],
)
def test_what_is_not_served_is_an_error_that_names_it(call, names):
    with foci.observe() as log, pytest.raises(ValueError, match=names):
        call()
    assert log.calls == []


@pytest.fixture
def active():
    register_flash_attention()
    registry.activate_flash_attention_impl("FOCI")
    yield
    registry.restore_flash_attention_impl()


@pytest.mark.gpu
@needs_registry
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("kv_heads, head_dim", [(4, 64), (2, 128), (4, 36)])
def test_scaled_dot_product_attention_on_a_gpu(active, kv_heads, head_dim, is_causal):
    shapes = (2, 4, 192, head_dim), (2, kv_heads, 192, head_dim), (2, kv_heads, 192, head_dim)
    tensors = [t.detach().cuda().requires_grad_() for t in leaves(*shapes, dtype=torch.bfloat16)]
    with foci.observe() as log, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=kv_heads != 4)
        grads = gradients(out, tensors)
    assert len(log.calls) == len(log.backward_calls) == 1
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    wanted, _ = plain(*exact, is_causal=is_causal)
    close([t.cpu().double() for t in (out, *grads)], [wanted, *gradients(wanted, exact)], 4e-2)
    registry.restore_flash_attention_impl()
    with foci.observe() as log, sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        close([F.scaled_dot_product_attention(*tensors, is_causal=is_causal, enable_gqa=kv_heads != 4)], [out], 4e-2)
    assert log.calls == []
    registry.activate_flash_attention_impl("FOCI")


@pytest.mark.gpu
@needs_registry
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0)])
def test_varlen_attn_on_a_gpu(active, window):
    lengths = [70, 128, 33]
    tensors = [t.detach().cuda().requires_grad_() for t in leaves(*[(231, 4, 64)] * 3, dtype=torch.bfloat16)]
    offsets = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    with foci.observe() as log:
        out = varlen_attn(*tensors, offsets, offsets, 128, 128, **attends(window))
        grads = gradients(out, tensors)
    assert len(log.calls) == len(log.backward_calls) == 1
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    wanted, _ = by_sequence(*exact, lengths, lengths, left=window[0], right=window[1])
    close([t.cpu().double() for t in (out, *grads)], [wanted, *gradients(wanted, exact)], 4e-2)


@pytest.mark.gpu
@needs_registry
def test_compiled_and_by_focis_own_entry_point_on_a_gpu(active):
    tensors = [t.detach().cuda().requires_grad_() for t in leaves(*[(2, 4, 128, 64)] * 3, dtype=torch.bfloat16)]

    # one length: how torch's registry calls foci on a GPU depends on no length
    @torch.compile(fullgraph=True)
    def layer(q, k, v):
        return F.scaled_dot_product_attention(q * 1.5, k, v, is_causal=True)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        out = layer(*tensors)
        grads = gradients(out, tensors)
    exact = [t.detach().cpu().double().requires_grad_() for t in tensors]
    wanted, _ = plain(exact[0] * 1.5, *exact[1:], is_causal=True)
    close([t.cpu().double() for t in (out, *grads)], [wanted, *gradients(wanted, exact)], 4e-2)
    ours = foci.attention(*tensors, mask=foci.masks.causal(), scale=1.5 / 8)  # whichever backend: no call goes in circles
    close([ours.cpu().double()], [wanted], 4e-2)
