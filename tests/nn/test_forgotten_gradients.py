"""`zero_grad` of an encoder: what torch's does."""

import pytest
import torch

import foci.nn


class Hiding(torch.nn.Sequential):
    """Lists no modules, and so no parameters."""

    def named_modules(self, *given, **more):
        return iter(())


def encoder(layers=2, norm=None):
    layer = foci.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    return foci.nn.TransformerEncoder(layer, layers, norm)


def learned(module):
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    return module


def remaining(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def by_torch(module, **given):
    torch.nn.Module.zero_grad(learned(module), **given)
    return remaining(module)


@pytest.mark.parametrize("more", [{}, {"set_to_none": True}, {"set_to_none": False}])
def test_is_torchs(more):
    module = encoder(norm=torch.nn.LayerNorm(16))
    module.layers[1].linear2.weight.requires_grad_(False)
    module.layers[0].linear1 = module.layers[1].linear1  # shared
    module.register_parameter("absent", None)
    want = by_torch(module, **more)
    learned(module).zero_grad(**more)
    found = remaining(module)
    assert [g is None for g in found] == [g is None for g in want]
    assert all(g is None or not g.any() for g in found)


def test_keeps_the_gradients_of_parameters_that_a_module_does_not_list():
    module = encoder()
    hidden = Hiding(torch.nn.Linear(4, 4))
    module.more = hidden
    for p in hidden[0].parameters():
        p.grad = torch.ones_like(p)
    learned(module).zero_grad()
    assert hidden[0].weight.grad is not None
    assert all(p.grad is None for p in module.layers.parameters())


def test_replicas_are_warned_of():
    module = encoder()
    module._is_replica = True
    with pytest.warns(UserWarning, match="DataParallel"):
        learned(module).zero_grad()


def test_of_a_parametrized_module():
    module = encoder()
    torch.nn.utils.parametrizations.weight_norm(module.layers[0].linear1)
    learned(module).zero_grad()
    assert all(p.grad is None for p in module.parameters())
