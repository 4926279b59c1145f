"""A function run through the pass and beside eager."""

import copy
import math

import torch

from compiled import check_variety, resize
from foci.fusion import fuse

B, H, S, D = 2, 4, 20, 8
LENGTH = 36  # six by six


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(heads=H, kv_heads=H, length=S):
    return draw(B, heads, length, D, seed=1), draw(B, kv_heads, length, D, seed=2), draw(B, kv_heads, length, D, seed=3)


class Fusing:
    """A backend that only fuses, and keeps what it saw."""

    def __init__(self):
        self.before, self.after, self.sites = [], [], []

    def __call__(self, module, inputs):
        text = module.code
        fused = fuse(module, inputs)
        assert module.code == text, "the given graph was changed"
        self.before.append(module)
        self.after.append(fused.graph_module)
        self.sites += fused.sites
        return fused.graph_module.forward


def fused(function, *args, dynamic=None, other_calls=None):
    """The backend after the first call of the fused function, whose results and gradients are compared with eager's.

    So are two further calls of the same compiled function, with other batch sizes and lengths (`compiled.resize`), and the graphs made
    for them must have the same attentions fused.

    Args:
        function, args: what is compiled, and the arguments of the first call; lengths are `S` or `LENGTH`, the batch size is `B`.
        dynamic: as torch.compile takes it.
        other_calls: arguments of further calls, where sizes depend on each other.
    """
    torch._dynamo.reset()
    backend = Fusing()
    compiled = torch.compile(function, backend=backend, dynamic=dynamic)
    beside_eager(function, compiled, args)
    first = copy.copy(backend)
    first.before, first.after, first.sites = list(backend.before), list(backend.after), list(backend.sites)
    calls = [resize(args, {S: S + n, LENGTH: LENGTH + n}, batch=(B, B + n)) for n in (3, 9)] if other_calls is None else other_calls
    check_variety([args, *calls])
    for call in calls:
        beside_eager(function, compiled, call)
    later = [site.fused for site in backend.sites[len(first.sites) :]]
    assert later == [site.fused for site in first.sites] * (len(later) // max(1, len(first.sites)))
    return first


def beside_eager(function, compiled, args):
    """Compares results and gradients."""
    leaves = [
        a.detach().clone().requires_grad_(a.is_floating_point() and a.requires_grad) if isinstance(a, torch.Tensor) else a for a in args
    ]
    want, got = function(*args), compiled(*leaves)
    flat = lambda x: list(x) if isinstance(x, (tuple, list)) else [x]
    for w, g in zip(flat(want), flat(got)):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)
    if flat(want)[0].requires_grad:
        inputs = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        ours = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
        cotangent = draw(*flat(want)[0].shape, seed=9)
        for w, g in zip(
            torch.autograd.grad(flat(want)[0], inputs, cotangent, allow_unused=True),
            torch.autograd.grad(flat(got)[0], ours, cotangent, allow_unused=True),
        ):
            torch.testing.assert_close(g, w, rtol=1e-8, atol=1e-8)


def learned(*tensors):
    return [t.requires_grad_() for t in tensors]


def reasons(backend):
    return [site.reason for site in backend.sites]


def plain(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), -1) @ v
