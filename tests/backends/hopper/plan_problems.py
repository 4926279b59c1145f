"""Problems for the tests of the Hopper backend's plans, by name."""

from dataclasses import replace

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.contract import Plan
from foci.backends.hopper import VERSIONS
from foci.problem import Formula, Layout, Outputs, Problem, Target
from foci.trace_functions import bind

TABLE = torch.zeros(64, 64)
H200 = Target("cuda", 90, frozenset({"triton", f"triton-{VERSIONS[0]}"}))


def problem(mask=None, score=None, layout=Layout.DENSE, outputs=None, **rest):
    bound = bind(score, mask, torch.device("cpu"))
    formula = Formula(bound.variant, layout, outputs or Outputs())
    asked = Problem(formula, torch.bfloat16, 128, 128, 16, 16, 2, 8192, 8192, capture_grads=(False,) * len(bound.captures))
    return replace(asked, **rest)


NARROW = {"head_dim": 64, "value_dim": 64}
OWNERS = torch.zeros(8192)
DOCUMENT = foci.Mask(lambda b, h, q, k: OWNERS[q] == OWNERS[k])
TRAINED = {"query_grad": True, "key_grad": True, "value_grad": True}
KINDS = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(1023)},
    "document": {"mask": DOCUMENT},
    "added": {"mask": masks.causal(), "score": scores.alibi(16)},
    "score": {"mask": masks.causal(), "score": scores.softcap(20.0)},
    "pair": {"score": foci.Score(lambda s, b, h, q, k: s + TABLE[q % 64, k % 64])},
    "mask": {"mask": foci.Mask(lambda b, h, q, k: TABLE[q % 64, k % 64] > 0)},
}


def built(asked, **options):
    kernel = pytest.importorskip("foci.backends.hopper.kernel", reason="needs a Triton with Gluon")
    return kernel.build_kernel(Plan("hopper", asked, H200), **options)


def passes(asked):
    """Names of the classes of both passes."""
    kernel = built(asked)
    return type(kernel.forward_pass).__name__, type(kernel.backward_pass).__name__


JAGGED = {"layout": Layout.JAGGED}


def keys(count):
    return {"batch": 64, "q_len": count, "kv_len": count}
