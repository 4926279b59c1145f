"""foci.patch(): torch's entry points routed to foci."""

# ECO-01

from __future__ import annotations

import functools
import inspect
import sys
import threading
import time
import types

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention import varlen as varlen_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

import foci
from compiled import several

# one length: a name that is compiled; nothing calls it
compiled_flex_attention = torch.compile(flex_attention)


class Torch:
    """What torch has, out of reach of the patch: not a global of any module."""

    attend = staticmethod(scaled_dot_product_attention)
    flex = staticmethod(flex_attention)
    block_mask = staticmethod(create_block_mask)
    varlen = staticmethod(varlen_attn)


def looked_up(q):
    return F.scaled_dot_product_attention(q, q, q, is_causal=True)


def imported(q):
    return scaled_dot_product_attention(q, q, q, is_causal=True)


def query(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _torch_is_itself_afterwards():
    yield
    assert F.scaled_dot_product_attention is scaled_dot_product_attention is Torch.attend
    assert flex_module.flex_attention is flex_attention is Torch.flex
    assert flex_module.create_block_mask is create_block_mask is Torch.block_mask
    assert varlen_module.varlen_attn is varlen_attn is Torch.varlen
    assert hasattr(compiled_flex_attention, "_torchdynamo_orig_callable")


@pytest.mark.parametrize("call", [looked_up, imported])
def test_calls_reach_foci_inside_and_torch_outside(call):
    q = query(2, 4, 32, 16)
    before = call(q)
    with foci.patch(), foci.observe() as log:
        inside = call(q)
    assert len(log.calls) == 1
    with foci.observe() as log:
        after = call(q)
    assert log.calls == []
    assert torch.equal(before, after)
    torch.testing.assert_close(inside, before, atol=2e-6, rtol=1e-5)


# SDPA-01
def test_every_argument_of_torch_arrives():
    q, k = query(2, 4, 5, 8), query(2, 2, 7, 8)
    bias = query(2, 1, 5, 7)
    arguments = dict(attn_mask=bias, dropout_p=0.0, is_causal=False, scale=0.3, enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, k, **arguments)
    with foci.patch():
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, **arguments), expected)
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, bias, 0.0, False, scale=0.3, enable_gqa=True), expected)
        # Torch takes these two by name alone; torch.jit.script compiles no function that does.
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, k, bias, 0.0, False, 0.3, True), expected)


# SDPA-01
def test_names_and_defaults_are_torchs():
    ours = inspect.signature(foci.scaled_dot_product_attention).parameters
    theirs = torch.ops.aten.scaled_dot_product_attention.default._schema.arguments
    assert list(ours) == [argument.name for argument in theirs]
    for argument in theirs:
        assert ours[argument.name].default == (argument.default_value if argument.has_default_value() else inspect.Parameter.empty)


def test_what_foci_refuses_is_not_given_to_torch():
    q = query(1, 2, 4, 8)
    with foci.patch():
        with pytest.raises(ValueError, match="is_causal=True excludes attn_mask"):
            F.scaled_dot_product_attention(q, q, q, attn_mask=torch.ones(4, 4, dtype=torch.bool), is_causal=True)
        with foci.use(), pytest.raises(foci.NoViableBackend):
            F.scaled_dot_product_attention(q, q, q)


@pytest.mark.parametrize("call", [looked_up, imported])
def test_torch_compile_follows_each_change(call):
    torch._dynamo.reset()
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    counts = []
    for routed, length in several((False, 32), (True, 40), (False, 48)):
        q = query(2, 4, length, 16).requires_grad_()
        with foci.patch() if routed else foci.use("reference"), foci.observe() as log:
            torch.testing.assert_close(compiled(q), call(q), atol=2e-6, rtol=1e-5)
            (gradient,) = torch.autograd.grad(compiled(q).sum(), q)
        counts.append((len(log.calls), len(log.backward_calls)))
        assert gradient.shape == q.shape
    assert counts == [(0, 0), (3, 1), (0, 0)]


def test_flexible_attention():
    q = query(1, 2, 200, 16)
    slopes = torch.tensor([0.5, 0.25])

    def alibi(score, b, h, q_idx, kv_idx):
        return score + slopes[h] * (kv_idx - q_idx)

    def causal(b, h, q_idx, kv_idx):
        return kv_idx <= q_idx

    expected = flex_attention(q, q, q, score_mod=alibi, block_mask=create_block_mask(causal, None, None, 200, 200, device="cpu"))
    with foci.patch(), foci.observe() as log:
        mask = create_block_mask(causal, None, None, 200, 200, device="cpu")
        outs = [
            function(q, q, q, score_mod=alibi, block_mask=mask)
            for function in (flex_attention, flex_module.flex_attention, compiled_flex_attention)
        ]
    assert len(log.calls) == 3
    assert isinstance(mask, BlockMask)
    assert mask.shape == (1, 1, 200, 200)
    for out in outs:
        torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)


def test_block_masks_are_torchs_in_every_list():
    document = torch.arange(300) // 90

    def same_document(b, h, q_idx, kv_idx):
        return document[q_idx] == document[kv_idx]

    arguments = (same_document, None, None, 300, 300)
    expected = create_block_mask(*arguments, device="cpu", BLOCK_SIZE=64)
    with foci.patch():
        block_mask = create_block_mask(*arguments, device="cpu", BLOCK_SIZE=64)
    assert torch.equal(block_mask.to_dense(), expected.to_dense())
    assert block_mask.BLOCK_SIZE == expected.BLOCK_SIZE
    assert torch.equal(block_mask.q_num_blocks, expected.q_num_blocks)
    assert block_mask.sparsity() == expected.sparsity()


def test_flexible_attention_in_one_graph():
    torch._dynamo.reset()
    window = torch.tensor(20)

    # one length: the block mask has its lengths as numbers
    @functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    def layer(q):
        mask = create_block_mask(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < window, None, None, 100, 100, device="cpu")
        return flex_attention(q, q, q, block_mask=mask)

    q = query(1, 2, 100, 16)
    with foci.patch(), foci.observe() as log:
        actual = layer(q)
    assert len(log.calls) == 1
    expected = foci.attention(q, q, q, mask=lambda b, h, q_idx, kv_idx: (q_idx - kv_idx).abs() < 20)
    torch.testing.assert_close(actual, expected)


# JAG-01
def test_packed_sequences():
    q = query(10, 2, 16)
    offsets = torch.tensor([0, 3, 10], dtype=torch.int32)
    with foci.patch(), foci.observe() as log:
        actual = varlen_attn(q, q, q, offsets, offsets, 7, 7, window_size=(-1, 0), num_splits=1)
        with pytest.raises(ValueError, match="block_table"):
            varlen_attn(q, q, q, offsets, offsets, 7, 7, block_table=torch.zeros(2, 1, dtype=torch.int32))
    assert len(log.calls) == 1
    parts = [F.scaled_dot_product_attention(*[t.transpose(0, 1)] * 3, is_causal=True).transpose(0, 1) for t in q.split([3, 7])]
    torch.testing.assert_close(actual, torch.cat(parts))


def test_names_of_focis_own_functions_stay():
    functions = {
        name: getattr(foci, name) for name in ("scaled_dot_product_attention", "flex_attention", "create_block_mask", "varlen_attn")
    }
    with foci.patch():
        assert {name: getattr(foci, name) for name in functions} == functions
    held = globals()
    held.update({f"_held_{name}": function for name, function in functions.items()})
    try:
        with foci.patch():
            pass
        assert all(held[f"_held_{name}"] is function for name, function in functions.items())
    finally:
        for name in functions:
            del held[f"_held_{name}"]


# JAG-01
def test_nested_tensors():
    parts = [query(n, 2, 16) for n in (3, 7)]
    nested = torch.nested.nested_tensor(parts, layout=torch.jagged).transpose(1, 2)
    with foci.patch(), foci.observe() as log:
        actual = F.scaled_dot_product_attention(nested, nested, nested, is_causal=True)
    assert len(log.calls) == 1
    for out, part in zip(actual.transpose(1, 2).unbind(), parts, strict=True):
        expected = Torch.attend(*[part.transpose(0, 1)] * 3, is_causal=True).transpose(0, 1)
        torch.testing.assert_close(out, expected)


def test_modules_in_train_mode():
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True), 2)
    attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = query(3, 9, 16)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    results = []
    for routed in (False, True):
        encoder.zero_grad()
        with foci.patch() if routed else foci.use("reference"), foci.observe() as log:
            out = encoder(x, src_key_padding_mask=padding)
            alone = attention(x, x, x, need_weights=False)[0]
            out[~padding].sum().backward()
        assert (len(log.calls), len(log.backward_calls)) == ((3, 2) if routed else (0, 0))
        results.append((out[~padding], alone, [p.grad.clone() for p in encoder.parameters()]))
    torch.testing.assert_close(results[1], results[0], atol=5e-6, rtol=1e-4)


def test_start_and_stop_nest():
    first, second = foci.patch(), foci.patch()
    first.start()
    with second, first:
        assert F.scaled_dot_product_attention is not Torch.attend
    assert F.scaled_dot_product_attention is not Torch.attend
    with pytest.raises(RuntimeError, match="stop without a start"):
        second.stop()
    first.stop()
    assert F.scaled_dot_product_attention is Torch.attend
    with pytest.raises(RuntimeError, match="stop without a start"):
        first.stop()
    with foci.patch():
        assert F.scaled_dot_product_attention is not Torch.attend


def test_an_error_in_the_block_stops_the_routing():
    with pytest.raises(KeyError), foci.patch():
        raise KeyError
    assert F.scaled_dot_product_attention is Torch.attend


def test_a_module_imported_meanwhile_gets_torchs_function_back():
    late = types.ModuleType("a_module_imported_late")
    sys.modules[late.__name__] = late
    try:
        with foci.patch():
            exec("from torch.nn.functional import scaled_dot_product_attention as attend", vars(late))
            assert late.attend is not Torch.attend
        assert late.attend is Torch.attend
    finally:
        del sys.modules[late.__name__]


def test_a_name_that_the_program_sets_anew_is_kept():
    module = types.ModuleType("a_module_that_rebinds")
    module.attend = Torch.attend
    sys.modules[module.__name__] = module
    try:
        with foci.patch():
            assert module.attend is F.scaled_dot_product_attention
            module.attend = mine = object()
        assert module.attend is mine
    finally:
        del sys.modules[module.__name__]


@pytest.fixture
def passes(monkeypatch):
    """How many passes over all modules were made."""
    module, calls = sys.modules["foci.integrations.patch"], []
    original = module._globals
    monkeypatch.setattr(module, "_globals", lambda: calls.append(1) or original())
    return calls


def named(name):
    """A module of that name, in place."""
    return sys.modules.setdefault(name, types.ModuleType(name))


def test_a_second_start_makes_no_pass_over_the_modules(passes):
    with foci.patch():
        looked_up(query(1, 1, 4, 8))  # whatever is imported by a first call
    with foci.patch():
        pass
    passes.clear()
    seconds = []
    for _ in range(9):
        begin = time.perf_counter()
        with foci.patch():
            seconds.append(time.perf_counter() - begin)
            assert F.scaled_dot_product_attention is not Torch.attend
        assert F.scaled_dot_product_attention is Torch.attend
    assert passes == []
    assert sorted(seconds)[4] < 1e-3


NEW_NAMES = {
    "a module that was there": lambda module: setattr(module, "attend", Torch.attend),
    "a name that was another's": lambda module: setattr(module, "nothing", Torch.flex),
    "an alias of what was compiled": lambda module: setattr(module, "attend", compiled_flex_attention),
    # one length: a name that is set
    "compiled now": lambda module: setattr(module, "attend", torch.compile(Torch.flex)),
    "__main__": lambda module: setattr(sys.modules["__main__"], "attend_by_foci", Torch.attend),
}


@pytest.mark.parametrize("give", NEW_NAMES.values(), ids=NEW_NAMES)
def test_a_name_given_between_two_starts_is_found(give):
    module = named("a_module_that_takes_names")
    module.nothing = None
    try:
        with foci.patch():
            pass
        give(module)
        place = sys.modules["__main__"] if hasattr(sys.modules["__main__"], "attend_by_foci") else module
        before = dict(vars(place))
        with foci.patch():
            changed = [name for name, value in before.items() if vars(place)[name] is not value]
        assert len([name for name in changed if name in ("attend", "nothing", "attend_by_foci")]) == 1
        assert all(vars(place)[name] is value for name, value in before.items())
    finally:
        del sys.modules[module.__name__]
        vars(sys.modules["__main__"]).pop("attend_by_foci", None)


def test_a_name_taken_while_it_was_focis_becomes_torchs_each_time():
    module = named("a_module_that_takes_late")
    try:
        for _ in range(3):
            with foci.patch():
                module.attend = F.scaled_dot_product_attention
            assert module.attend is Torch.attend
            del module.attend
    finally:
        del sys.modules[module.__name__]


@pytest.mark.parametrize("inside", [False, True])
def test_a_name_that_moves_to_another_module_is_found(inside):
    """As many references as before."""
    one, other = named("a_module_that_gives"), named("a_module_that_takes")
    one.attend = Torch.attend

    def move():
        other.attend = vars(one).pop("attend")

    try:
        with foci.patch():
            assert one.attend is not Torch.attend
            if inside:
                move()
        if not inside:
            move()
        assert other.attend is Torch.attend
        with foci.patch():
            assert other.attend is not Torch.attend
        assert other.attend is Torch.attend
    finally:
        del sys.modules[one.__name__], sys.modules[other.__name__]


# ECO-01
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="torch.jit.script is not for Python 3.14")
def test_scripted_modules_run_torchs_operator(tmp_path):
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = query(2, 5, 16)
    expected, _ = layer(x, x, x, need_weights=False)
    with foci.patch():
        scripted = torch.jit.script(layer)
        with foci.observe() as log:
            torch.testing.assert_close(scripted(x, x, x, need_weights=False)[0], expected, atol=2e-6, rtol=1e-5)
        assert log.calls == []
        with foci.observe() as log:
            layer(x, x, x, need_weights=False)
        assert len(log.calls) == 1
    torch.jit.save(scripted, tmp_path / "layer.pt")
    torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(x, x, x, need_weights=False)[0], expected, atol=2e-6, rtol=1e-5)


WRONG = {
    "one dim": lambda: F.scaled_dot_product_attention(query(8), query(2, 8), query(2, 8)),
    "leading dims": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), *[query(2, 3, 6, 8)] * 2),
    "head dims": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), query(2, 4, 6, 4), query(2, 4, 6, 8)),
    "lengths": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), query(2, 4, 6, 8), query(2, 4, 5, 8), torch.ones(6, 6).bool()),
    "dtypes": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), query(2, 4, 6, 8).half(), query(2, 4, 6, 8)),
    "integers": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8).int()] * 3),
    "devices": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), *[query(2, 4, 6, 8).to("meta")] * 2),
    "groups": lambda: F.scaled_dot_product_attention(query(2, 4, 6, 8), *[query(2, 3, 6, 8)] * 2, enable_gqa=True),
    "mask shape": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 3, attn_mask=torch.ones(6, 5).bool()),
    "bias shape": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 3, attn_mask=query(3, 1, 6, 6)),
    "mask dtype": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 3, attn_mask=torch.ones(6, 6).int()),
    "wider bias": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 3, attn_mask=query(6, 6).double()),
    "sparse value": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 2, query(2, 4, 6, 8).to_sparse()),
    "dropout": lambda: F.scaled_dot_product_attention(*[query(2, 4, 6, 8)] * 3, dropout_p=-0.5),
    "flex dims": lambda: flex_module.flex_attention(query(4, 6, 8), query(4, 6, 8), query(4, 6, 8)),
    "flex heads": lambda: flex_module.flex_attention(query(2, 4, 6, 8), *[query(2, 2, 6, 8)] * 2),
    "flex head dims": lambda: flex_module.flex_attention(query(2, 4, 6, 8), query(2, 4, 6, 4), query(2, 4, 6, 8)),
}


# SDPA-01
@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG)
@pytest.mark.filterwarnings("ignore")
def test_errors_can_be_caught_as_torchs(call):
    with pytest.raises(Exception) as torchs:
        call()
    with foci.patch(), pytest.raises((TypeError, ValueError)) as focis:
        call()
    if isinstance(torchs.value, RuntimeError):
        assert isinstance(focis.value, RuntimeError)
    else:
        assert isinstance(focis.value, type(torchs.value))


def test_other_threads_are_routed_too():
    counts = []

    def work():
        with foci.observe() as log:
            looked_up(query(1, 2, 8, 8))
        counts.append(len(log.calls))

    with foci.patch():
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert counts == [1]


def test_the_calling_threads_race_leaves_torch_as_it_was():
    def work():
        for _ in range(3):
            with foci.patch():
                looked_up(query(1, 1, 4, 8))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert F.scaled_dot_product_attention is Torch.attend


def test_what_stays_torchs():
    attend = functools.partial(Torch.attend, is_causal=True)
    q = query(1, 2, 8, 8)
    with foci.patch(), foci.observe() as log:
        attend(q, q, q)
        torch._C._nn.scaled_dot_product_attention(q, q, q)
    assert log.calls == []
