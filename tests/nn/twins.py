"""torch.nn's layers and foci's with the same parameters, and what both compute."""

import warnings

import torch

import foci
import foci.nn

B, S, T, E, H, FF = 3, 6, 5, 8, 2, 12


def rand(*shape, dtype=torch.float64, seed=0):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed + sum(shape)))


def twins(theirs, ours):
    """Both with the same parameters, none of them at a special value."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def quiet(make):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's encoder warns of its own limits
        return make()


def activated(model):
    """torch's decoder layers forget an activation that is a module when they are copied; here they do not."""
    for module in model.modules():
        if "activation" in module._modules:
            vars(module).pop("activation", None)
    return model


def layers(kind, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, **options}
    name = f"Transformer{kind}Layer"
    return twins(*(getattr(nn, name)(E, H, FF, **options) for nn in (torch.nn, foci.nn)))


def stacks(kind, depth=2, **options):
    options = {"dropout": 0.0, "dtype": torch.float64, **options}

    def make(nn):
        layer = getattr(nn, f"Transformer{kind}Layer")(E, H, FF, **options)
        return activated(getattr(nn, f"Transformer{kind}")(layer, depth, torch.nn.LayerNorm(E, dtype=torch.float64)))

    return twins(*(quiet(lambda nn=nn: make(nn)) for nn in (torch.nn, foci.nn)))


PADDINGS = {
    "right": [[0, 0, 0, 0, 0, 0], [0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 1, 1]],
    "left": [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0]],
    "holes": [[0, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0], [0, 0, 0, 0, 0, 1]],
    "trailing columns": [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]],
    "none": [[0] * 6] * 3,
}


def padding(name, length=S):
    return torch.tensor(PADDINGS[name], dtype=torch.bool)[:, :length]


def outcome(module, inputs, rows, **kwargs):
    """Output at `rows` (bool, of the output's first two dims) and every gradient of a loss on them."""
    leaves = [t.detach().requires_grad_() for t in inputs]
    out = module(*leaves, **kwargs)
    picked = out if rows is None else out[rows]
    grads = torch.autograd.grad((picked * rand(*picked.shape, seed=9)).sum(), [*leaves, *module.parameters()])
    return out, picked, grads


def same(theirs, ours, inputs, rows=None, **kwargs):
    """Same outputs at `rows`, same gradients; zeros elsewhere."""
    (_, expected, their_grads), (out, got, our_grads) = (outcome(m, inputs, rows, **kwargs) for m in (theirs, ours))
    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(our_grads, their_grads)
    if rows is not None:
        assert out.shape == (*rows.shape, E)
        assert (out[~rows] == 0).all()


def as_float(mask):
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(mask, -torch.inf)
