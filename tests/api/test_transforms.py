"""torch.func, forward-mode AD, double backward, checkpointing, opcheck."""

import pytest
import torch
import torch.nn.functional as F
from drawn import rand
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

import foci
from compiled import compare, several

EVERYTHING = foci.AuxRequest(lse=True, row_max=True, column_sums=True, weights=True)


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with foci.use("blocked", "reference"):
        yield


def same(got, want, **tolerance):
    torch.testing.assert_close(got, want, **(tolerance or {"atol": 1e-10, "rtol": 1e-10}))


def attend(q, k, v, slopes):
    return foci.attention(q, k, v, mask=foci.masks.causal_lower_right(), score=lambda s, b, h, i, j: s.tanh() + slopes[h] * (i - j))


def formula(q, k, v, slopes):
    i, j = torch.arange(q.shape[-2])[:, None], torch.arange(k.shape[-2])
    scores = (q @ k.mT / q.shape[-1] ** 0.5).tanh() + slopes[:, None, None] * (i - j)
    return scores.masked_fill(j > i + k.shape[-2] - q.shape[-2], -torch.inf).softmax(-1) @ v


def small():
    return *(rand(1, 2, n, 3, seed=s) for s, n in enumerate((3, 4, 4))), rand(2)


def many():
    return *(rand(5, 1, 2, n, 3, seed=s) for s, n in enumerate((3, 4, 4))), rand(5, 2)


def loss(function):
    return lambda *args: function(*args).square().sum()


ALL = (0, 1, 2, 3)
TANGENTS = small()
TRANSFORMS = {
    "grad": lambda f: grad(loss(f), ALL)(*small()),
    "vjp": lambda f: vjp(f, *small())[1](rand(1, 2, 3, 3)),
    "jacrev": lambda f: jacrev(f, ALL)(*small()),
    "jacfwd": lambda f: jacfwd(f, ALL)(*small()),
    "jvp": lambda f: jvp(f, small(), small()),
    "hessian": lambda f: hessian(loss(f), ALL)(*small()),
    "jacrev of jacrev": lambda f: jacrev(jacrev(loss(f), ALL), ALL)(*small()),
    "grad of grad of grad": lambda f: grad(loss(grad(loss(grad(loss(f))))))(*small()),
    "grad of jvp": lambda f: grad(lambda *args: jvp(f, args, small())[1].square().sum(), ALL)(*small()),
    "vmap": lambda f: vmap(f)(*many()),
    "vmap of the query": lambda f: vmap(f, (0, None, None, None))(many()[0], *small()[1:]),
    "vmap of keys": lambda f: vmap(f, (None, 0, 0, None))(small()[0], *many()[1:3], small()[3]),
    "vmap of captures": lambda f: vmap(f, (None, None, None, 0))(*small()[:3], many()[3]),
    "vmap of other dims": lambda f: vmap(f, (2, 0, 1, None), out_dims=1)(
        many()[0].movedim(0, 2), many()[1], many()[2].movedim(0, 1), small()[3]
    ),
    "vmap of vmap": lambda f: vmap(vmap(f, (0, None, None, None)), (None, 0, 0, None))(*many()[:3], small()[3]),
    "vmap of grad": lambda f: vmap(grad(loss(f), ALL))(*many()),
    "grad of vmap": lambda f: grad(loss(vmap(f)), ALL)(*many()),
    "vmap of jvp": lambda f: vmap(lambda *args: jvp(f, args, TANGENTS)[1])(*many()),
    "jacrev of vmap": lambda f: jacrev(vmap(f))(*many()),
}


# SDPA-21, SDPA-22
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms(name):
    same(TRANSFORMS[name](attend), TRANSFORMS[name](formula), atol=1e-8, rtol=1e-8)


def scaled_by(number):
    q, k, v, _ = TANGENTS
    return foci.attention(q, k, v, score=lambda s, b, h, i, j: s * number, mask=lambda b, h, i, j: i - j < number + 1)


@pytest.mark.parametrize("name", ["grad", "jacrev", "vmap of grad", "grad of grad of grad"])
def test_transforms_of_what_torch_has_kernels_for(name):
    """These have no gradient of the logsumexp, which nobody wants."""

    def plain(q, k, v, _):
        with foci.use("aten"):
            return foci.attention(q, k, v)

    def by_hand(q, k, v, _):
        return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v

    same(TRANSFORMS[name](plain), TRANSFORMS[name](by_hand), atol=1e-8, rtol=1e-8)


def test_transforms_of_a_captured_number():
    number, tangent = torch.tensor(0.8, dtype=torch.float64), torch.tensor(1.5, dtype=torch.float64)
    slope = jacrev(scaled_by)(number)
    assert slope.abs().max() > 0.1
    same(jvp(scaled_by, (number,), (tangent,))[1], slope * tangent)
    with torch.autograd.forward_ad.dual_level():
        out = scaled_by(torch.autograd.forward_ad.make_dual(number, tangent))
        same(torch.autograd.forward_ad.unpack_dual(out).tangent, slope * tangent)
    numbers = rand(3).abs()
    same(vmap(scaled_by)(numbers), torch.stack([scaled_by(n) for n in numbers]))


# SDPA-21
def test_vmap_of_entry_points():
    q, k, v, _ = many()
    q, k, v = q[:, 0], k[:, 0], v[:, 0]
    same(vmap(foci.scaled_dot_product_attention)(q, k, v), F.scaled_dot_product_attention(q, k, v))
    masks = rand(5, 3, 4) > 0
    got = vmap(lambda *args: foci.scaled_dot_product_attention(*args))(q, k, v, masks)
    same(got, torch.stack([foci.scaled_dot_product_attention(*args) for args in zip(q, k, v, masks, strict=True)]))
    out, lse = vmap(lambda q: foci.flex_attention(q[None], q[None], q[None], return_lse=True))(q)
    one = foci.flex_attention(q, q, q, return_lse=True)
    same((out[:, 0], lse[:, 0]), one)


def test_vmap_that_reads_the_batch_index():
    q = many()[0]
    table = rand(1)
    function = lambda q: foci.attention(q, q, q, score=lambda s, b, h, i, j: s * table[b] + b)
    same(vmap(function)(q), torch.stack([function(one) for one in q]))


def test_vmap_of_dropout():
    q = many()[0]
    function = lambda q: foci.attention(q, q, q, dropout_p=0.5)
    different = vmap(function, randomness="different")(q[:1].expand(4, -1, -1, -1, -1))
    alike = vmap(function, randomness="same")(q[:1].expand(4, -1, -1, -1, -1))
    assert not torch.equal(different[0], different[1]) and torch.equal(alike[0], alike[1])
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(function)(q)


IN_COMPILED = {
    "grad": lambda f: grad(loss(f), ALL),
    "vjp": lambda f: lambda *args: vjp(f, *args)[1](torch.ones_like(args[0])),
    "grad of grad": lambda f: grad(loss(grad(loss(f)))),
    "vmap of the query": lambda f: lambda q, *rest: vmap(f, (0, None, None, None))(q.expand(2, *q.shape), *rest),
}


# SDPA-21, SDPA-22
@pytest.mark.slow
@pytest.mark.parametrize("name", IN_COMPILED)
def test_transforms_inside_compiled_functions(name):
    calls = [(*(rand(1, 2, n, 3, seed=s) for s, n in enumerate((length, length + 1, length + 1))), rand(2)) for length in (3, 5, 6)]
    function, reference = IN_COMPILED[name](attend), IN_COMPILED[name](formula)
    compare(function, calls, reference=reference, tolerance=1e-8, fullgraph=True, backend="aot_eager")


def test_a_mask_function_that_returns_what_it_captures_inside_compiled_transforms():
    q, flag = small()[1], torch.tensor(True)

    def returning(q, scale):
        return foci.attention(q, q, q, mask=lambda b, h, i, j: flag, scale=scale)

    def plain(q, scale):
        return (q @ q.mT * scale).softmax(-1) @ q

    compiled = torch.compile(grad(loss(returning)), fullgraph=True, backend="aot_eager")
    compare(returning, [(q, c) for c in (0.3, 0.5, 2.0)], compiled, reference=grad(loss(plain)), tolerance=1e-8)


# Derivatives of other kinds ----------------------------------------------------------------------------------------


def tracked(args):
    return tuple(a.requires_grad_() for a in args)


def auxiliary(*args):
    out, aux = foci.attention(*args, return_aux=EVERYTHING)
    return out, aux.lse, aux.column_sums, aux.weights


OFFSETS = torch.tensor([0, 2, 2, 5])
GRADCHECKS = {
    "function": (attend, lambda: tracked(small())),
    "auxiliary": (auxiliary, lambda: tracked(small()[:3])),
    "jagged": (
        lambda x: foci.varlen_attn(x, x, x, OFFSETS, OFFSETS, 3, 3, window_size=(-1, 0)),
        lambda: tracked((rand(5, 2, 3),)),
    ),
    "bias": (lambda q, k, v, m: foci.scaled_dot_product_attention(q, k, v, m), lambda: tracked((*small()[:3], rand(2, 1, 4)))),
    "grouped": (lambda q, k, v: foci.attention(q, k[:, :1], v[:, :1]), lambda: tracked(small()[:3])),
    "sink": (lambda q, k, v, s: foci.attention(q, k, v, sink=s), lambda: tracked(small())),
    "empty rows": (lambda q, k, v: foci.attention(q, k, v, mask=lambda b, h, i, j: i > j), lambda: tracked(small()[:3])),
}


# SDPA-22
@pytest.mark.parametrize("name", GRADCHECKS)
def test_forward_mode(name):
    function, make = GRADCHECKS[name]
    assert torch.autograd.gradcheck(function, make(), check_forward_ad=True)


# SDPA-22
@pytest.mark.parametrize("name", GRADCHECKS)
def test_double_backward(name):
    function, make = GRADCHECKS[name]
    assert torch.autograd.gradgradcheck(function, make())


def test_batched_gradients():
    args = tracked(small())
    assert torch.autograd.gradcheck(attend, args, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(attend, args, check_fwd_over_rev=True)


# SDPA-22
def test_derivatives_of_dropout():
    def seeded(q):
        torch.manual_seed(1)
        return foci.attention(q, q, q, dropout_p=0.4)

    (q,) = tracked(small()[:1])
    assert torch.autograd.gradcheck(seeded, (q,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(seeded, (q,))


# SDPA-22
def test_double_backward_through_a_block_mask():
    mask = foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 4, device="cpu", BLOCK_SIZE=2)
    assert torch.autograd.gradgradcheck(lambda q, k, v: foci.flex_attention(q, k, v, block_mask=mask), tracked(small()[:3]))


# SDPA-21
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_checkpointing(reentrant, compiled):
    if compiled and reentrant:
        pytest.skip("torch.compile takes checkpoints with use_reentrant=False")
    slopes = rand(4)
    function = lambda q: foci.attention(q, q, q, dropout_p=0.5, score=lambda s, b, h, i, j: s + slopes[h])

    def run(f, q):
        torch.manual_seed(3)
        out = f(q)
        q.grad = None
        out.square().sum().backward()
        return out, q.grad

    wrapped = lambda q: checkpoint(function, q, use_reentrant=reentrant)
    wrapped = torch.compile(wrapped, fullgraph=True, backend="aot_eager") if compiled else wrapped
    for length in several(9, 12, 17):
        q = rand(1, 4, length, 8).requires_grad_()
        same(run(wrapped, q), run(function, q))


# The operators -----------------------------------------------------------------------------------------------------

SAMPLES = {
    "plain": lambda q, k, v: foci.attention(q, k, v),
    "mask and score": attend,
    "auxiliary": auxiliary,
    "dropout": lambda q, k, v: foci.attention(q, k, v, dropout_p=0.5),
    "grouped": lambda q, k, v: foci.attention(q, k[:, :1], v[:, :1]),
    "blocks": lambda q, k, v: foci.flex_attention(
        q, k, v, block_mask=foci.create_block_mask(lambda b, h, i, j: i >= j, None, None, 3, 4, device="cpu", BLOCK_SIZE=2)
    ),
    "jagged": lambda q, k, v: foci.varlen_attn(*[k[0].transpose(0, 1)] * 3, torch.tensor([0, 1, 4]), None, 3, 3),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name):
    recorded = []

    class Recorder(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.foci.attention.default, torch.ops.foci.attention_backward.default):
                recorded.append((func, args))
            return func(*args, **(kwargs or {}))

    args = tracked(small())[: 4 if name == "mask and score" else 3]
    with Recorder():
        outs = SAMPLES[name](*args)
        outs = (outs,) if torch.is_tensor(outs) else outs
        torch.autograd.grad(outs, args[:1] if name != "jagged" else args[1:2], [torch.ones_like(o) for o in outs], allow_unused=True)
    assert {func for func, _ in recorded} == {torch.ops.foci.attention.default, torch.ops.foci.attention_backward.default}
    for func, values in recorded:
        fresh = torch.utils._pytree.tree_map(
            lambda t: (
                t.detach().requires_grad_(t.requires_grad and t.is_leaf) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            ),
            values,
        )
        torch.library.opcheck(func, tuple(fresh))
