"""What a captured module computes by, and nothing of torch watches: it is captured anew, or refused, when that has changed."""

import types
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from capturing import E, H, encoder, padding, rand

import foci
import foci.nn

FACTORS, BY_NAME, SPACE = [1.0], {"k": 1.0}, types.SimpleNamespace(k=1.0)


def by_list(s, b, h, i, j):
    return s * FACTORS[0]


def by_dict(s, b, h, i, j):
    return s * BY_NAME["k"]


def by_attribute(s, b, h, i, j):
    return s * SPACE.k


def by_default(s, b, h, i, j, *, k=1.0):
    return s * k


class ScoreModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.k = 1.0

    def forward(self):
        k = self.k
        return lambda s, b, h, i, j: s * k


class Callable:
    k = 1.0

    def __call__(self, s, b, h, i, j):
        return s * self.k


class Property:
    k = 1.0

    @property
    def twice(self):
        return 2 * self.k

    def score(self, s, b, h, i, j):
        return s * self.twice


class Activation:
    k = 1.0

    def __call__(self, x):
        return F.relu(x) * self.k


class Scaled(torch.nn.Module):
    def __init__(self, linear):
        super().__init__()
        self.linear, self.alpha = linear, 1.0

    def forward(self, x):
        return self.linear(x) * self.alpha


def of_attentions(change):
    def changed(model):
        for layer in model.layers:
            change(layer.self_attn)

    return changed


def hooked(model):
    """By a dictionary of hooks in place of the one that was there."""
    part = model.layers[0].linear1
    part._forward_hooks = OrderedDict()
    part.register_forward_hook(lambda module, given, out: out * 0)


def other_parameters(model):
    part = model.layers[0].linear1
    part.__setstate__(vars(torch.nn.Linear(part.in_features, part.out_features)))


CHANGES = {
    "an attribute": ({"score": by_attribute}, lambda model: setattr(SPACE, "k", 2.0)),
    "an element": ({"score": by_list}, lambda model: FACTORS.__setitem__(0, 2.0)),
    "an entry": ({"score": by_dict}, lambda model: BY_NAME.__setitem__("k", 2.0)),
    "a keyword's default": ({"score": by_default}, lambda model: by_default.__kwdefaults__.__setitem__("k", 2.0)),
    "a module's attribute": ({"score": ScoreModule()}, of_attentions(lambda attention: setattr(attention.score, "k", 2.0))),
    "a callable object": ({"score": Callable()}, of_attentions(lambda attention: setattr(attention.score, "k", 2.0))),
    "a property": ({"score": Property().score}, of_attentions(lambda attention: setattr(attention.score.__self__, "k", 2.0))),
    "an activation": ({"activation": Activation()}, lambda model: [setattr(layer.activation, "k", 2.0) for layer in model.layers]),
    "a module of another class": ({}, lambda model: [setattr(layer.linear1, "alpha", 2.0) for layer in model.layers]),
    "a norm's epsilon": ({}, lambda model: setattr(model.layers[0].norm1, "eps", 0.5)),
    "hooks": ({}, hooked),
    "parameters": ({}, other_parameters),
}


@pytest.fixture(autouse=True)
def _ones():
    yield
    FACTORS[0] = BY_NAME["k"] = SPACE.k = by_default.__kwdefaults__["k"] = 1.0


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_module_computes_by_has_changed(engine, name):
    options, change = CHANGES[name]
    model = encoder(**options)
    if "another class" in name:
        for layer in model.layers:
            layer.linear1 = Scaled(layer.linear1)
    captured = foci.nn.capture(model)
    x, kwargs = rand(3, 40, E), {"src_key_padding_mask": padding([40, 3, 20], 40)}
    with torch.no_grad():
        before = captured(x, **kwargs)
        count = engine.recordings
        assert torch.equal(captured(x, **kwargs), before)
        assert engine.recordings == count
        change(captured)
        if name == "hooks":
            with pytest.raises(ValueError, match="must have no hooks"):
                captured(x, **kwargs)
            return
        found = captured(x, **kwargs)
        assert engine.recordings > count
        torch.testing.assert_close(found, foci.nn.release(captured)(x, **kwargs))
    assert not torch.allclose(found, before)


def test_a_score_that_makes_its_tensor_anew_is_refused(engine):
    class Slopes:
        @property
        def slopes(self):
            return torch.arange(H) * 0.1

        def score(self, s, b, h, i, j):
            return s + self.slopes[h]

    captured = foci.nn.capture(encoder(score=Slopes().score))
    with torch.no_grad(), pytest.raises(ValueError, match="makes them anew: give it tensors that stay"):
        captured(rand(3, 40, E), src_key_padding_mask=padding([40, 3, 20], 40))
