"""Captured modules without a GPU: an engine that runs a recording's function again where CUDA would replay a graph."""

import copy

import torch

import foci
import foci.nn
from foci.nn.cuda_graphs.graphs import Recorded

E, H, FF = 32, 4, 48


class Again:
    """Runs again what it recorded. A pool's memory is its graphs' in turn: what one left is gone when another one's forward runs."""

    def __init__(self):
        self.recordings = 0

    def takes(self, tensor):
        return True

    def pool(self):
        return []

    def warm_up(self, run):
        run()

    def record(self, pool, samples, function):
        self.recordings += 1
        inputs = [t.clone() for t in samples]
        outputs = function(inputs)
        kept = [None if t is None else t.detach().clone() for t in outputs]
        is_forward = len(samples) > 1
        if is_forward:
            pool.append([])
        mine = pool[-1]
        mine += [t for t in (*inputs, *kept) if t is not None and t.is_floating_point()]

        def replay():
            if is_forward:
                for other in pool:
                    for t in other if other is not mine else ():
                        t.fill_(torch.nan)
            for into, t in zip(kept, function(inputs)):
                if into is not None:
                    into.copy_(t.detach())

        return Recorded(replay, inputs, kept)


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def padding(lengths, length):
    return torch.arange(length) >= torch.tensor(lengths)[:, None]


def encoder(dropout=0.0, layers=2, **options):
    torch.manual_seed(0)
    options = {"batch_first": True, **options}
    return foci.nn.TransformerEncoder(foci.nn.TransformerEncoderLayer(E, H, FF, dropout, **options), layers, torch.nn.LayerNorm(E))


def decoder(**options):
    torch.manual_seed(0)
    return foci.nn.TransformerDecoder(foci.nn.TransformerDecoderLayer(E, H, FF, 0.0, batch_first=True, **options), 2)


def graded(model, inputs, *args, **kwargs):
    """Output, and gradients of inputs and parameters."""
    inputs = [x.detach().requires_grad_() for x in inputs]
    out = model(*inputs, *args, **kwargs)
    values = out.values() if out.is_nested else out
    return [values, *torch.autograd.grad((values * rand(*values.shape, seed=5)).sum(), [*inputs, *model.parameters()], allow_unused=True)]


def assert_same(actual, wanted):
    for one, other in zip(actual, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            if one.is_nested:
                one, other = one.values(), other.values()
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def twins(model, **options):
    return model, foci.nn.capture(copy.deepcopy(model), **options)
