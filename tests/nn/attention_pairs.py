"""torch.nn's MultiheadAttention and foci's with one state, their inputs, and what both compute."""

import torch
from twins import rand

import foci
import foci.nn

B, L, S, E, H = 3, 5, 7, 12, 3


def pair(dtype=torch.float64, **options):
    """torch.nn's module and foci's with its state."""
    torch.manual_seed(1)
    theirs = torch.nn.MultiheadAttention(E, H, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.4)
    ours = foci.nn.MultiheadAttention(E, H, dtype=dtype, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def tensors(kind, *, batch_first=False, kdim=E, vdim=E, dtype=torch.float64):
    """Query, key and value; the same tensor twice or thrice where `kind` says so."""

    def make(length, dim, seed):
        shape = (length, dim) if kind == "unbatched" else (B, length, dim) if batch_first else (length, B, dim)
        return rand(*shape, dtype=dtype, seed=seed).requires_grad_()

    if kind == "self":
        x = make(L, E, 0)
        return x, x, x
    query, key = make(L, E, 0), make(S, kdim, 1)
    return query, key, key if kind == "memory" else make(S, vdim, 2)


def padding(length, kind="bool", dtype=torch.float64):
    mask = torch.zeros(B, length, dtype=torch.bool)
    mask[0, length - 2 :] = True
    mask[1, 0] = mask[1, 2] = True
    return mask if kind == "bool" else rand(B, length, dtype=dtype, seed=5).masked_fill(mask, -torch.inf)


def explicit(lengths, kind, rank=2, dtype=torch.float64):
    shape = lengths if rank == 2 else (B * H, *lengths)
    blocked = rand(*shape, seed=3) > 0.8
    blocked[..., 1] = False  # no row without a key, where torch gives NaN
    return blocked if kind == "bool" else rand(*shape, dtype=dtype, seed=4).masked_fill(blocked, -torch.inf)


def outcome(module, inputs, weights_too=True, **kwargs):
    """Output, weights and the gradients of inputs and parameters."""
    distinct = list(
        {id(t): t for t in (*inputs, *(t for t in kwargs.values() if isinstance(t, torch.Tensor) and t.requires_grad))}.values()
    )
    out, weights = module(*inputs, **kwargs)
    loss = (out * rand(*out.shape, dtype=out.dtype, seed=8)).sum()
    if weights is not None and weights_too:
        loss = loss + (weights * rand(*weights.shape, dtype=weights.dtype, seed=9)).sum()
    names, parameters = zip(*module.named_parameters())
    grads = torch.autograd.grad(loss, [*distinct, *parameters])
    return {"out": out, "weights": weights, **dict(zip([*map(str, range(len(distinct))), *names], grads))}


def same(theirs, ours, inputs, **kwargs):
    expected, got = outcome(theirs, inputs, **kwargs), outcome(ours, inputs, **kwargs)
    assert expected.keys() == got.keys()
    for name in expected:
        if expected[name] is None:
            assert got[name] is None, name
        else:
            assert got[name].shape == expected[name].shape, name
            torch.testing.assert_close(got[name], expected[name], msg=lambda text, name=name: f"{name}: {text}")
