"""Every attention of transformers' models written in plain torch is fused, in inference and in training, and nothing else changes."""

import warnings

import pytest
import torch

pytest.importorskip("transformers")

from architectures import FURTHER, TESTED, attentions, first
from spelling_harness import assert_equal, draw, fused_only
from torch._dynamo.utils import counters

import foci
from foci.graph import Compiler
from foci.graph.verify import Float64

FEW = ("mpt", "xlnet", "swinv2", "clip", "longt5", "falcon")  # of the others, kinds of attention that the first ten do not have


def cast(inputs, dtype):
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in inputs.items()}


def results(model, inputs, *, training):
    """The output, and the gradients of all parameters in training."""
    model.zero_grad()
    with torch.set_grad_enabled(training):
        out = first(model(**inputs))
    found = {"output": out.detach()}
    if training:
        out.backward(draw(*out.shape, seed=3).to(out))
        found |= {name.removeprefix("_orig_mod."): p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def undropped(model):
    """Without dropout, which draws from another generator when it is fused."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("dropout", "attention_dropout", "attn_dropout", "activation_dropout", "layerdrop"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model


def graph_breaks(model, inputs, backend):
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        compiled(**inputs)
    return sum(counters["graph_break"].values())


def check(architecture, dtype, *, training):
    """One model: all sites fused, no graph break added, outputs equal."""
    warnings.simplefilter("ignore")
    plain = undropped(architecture.model()).to(dtype).train(training)
    inputs = cast(architecture.inputs(plain), dtype)
    expected = attentions(plain, inputs)
    assert expected >= 2
    torch._dynamo.reset()
    counters.clear()
    with foci.observe() as log:
        found = results(torch.compile(plain, backend=Compiler(rest="eager") if training else fused_only), inputs, training=training)
    breaks = sum(counters["graph_break"].values())
    assert [site.reason for site in log.fusions if not site.fused] == []
    assert len(log.calls) == expected  # a frame that runs for each layer is compiled, and reported, once
    assert breaks == graph_breaks(plain, inputs, "eager")
    eager = results(plain, inputs, training=training)
    wide = undropped(architecture.model()).double().train(training)
    wide.load_state_dict(plain.state_dict())
    wide.config._experts_implementation = "eager"  # the grouped product knows no float64
    with Float64():
        exact = results(wide, cast(inputs, torch.float64), training=training)
    # What nobody differentiates has zeros for a gradient under AOTAutograd, and none in eager.
    assert all(not found.pop(name).any() for name in found.keys() - eager.keys())
    assert_equal(found, eager, exact, dtype)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", TESTED, ids=lambda a: a.kind)
def test_all_sites_are_fused(architecture, dtype, training):
    check(architecture, dtype, training=training)


@pytest.mark.parametrize("architecture", [a for a in FURTHER if a.kind in FEW], ids=lambda a: a.kind)
def test_others_train_too(architecture):
    check(architecture, torch.float32, training=True)
