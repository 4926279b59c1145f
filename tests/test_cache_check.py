"""`FOCI_CHECK_CACHE=1`: what every cache returns is compared with what would be built now."""

import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch

import foci
from foci import cache_check, call_cache, execution, trace_functions
from foci.cache_check import StaleCacheError, compare, compare_tensors
from foci.planner import Decision


@pytest.fixture
def checked(monkeypatch):
    """The mode switched on, with every cache empty."""
    monkeypatch.setattr(cache_check, "ENABLED", True)
    for module, name in ((execution, "_plans"), (call_cache, "_calls"), (trace_functions, "_traces")):
        monkeypatch.setattr(module, name, type(getattr(module, name))())


def softcap(score, b, h, q_idx, kv_idx):
    return 20 * torch.tanh(score / 20)


def test_compare_names_every_field_that_differs():
    compare("a cache", {"scale": 0.5, "names": ("x", math.nan)}, {"scale": 0.5, "names": ("x", math.nan)})
    with pytest.raises(
        StaleCacheError, match=r"a cache returned a stale entry; scale: cached 0\.5, rebuilt 1; zero: cached 0\.0, rebuilt -0\.0$"
    ):
        compare("a cache", {"scale": 0.5, "same": 1, "zero": 0.0}, {"scale": 1, "same": 1, "zero": -0.0})
    tensor = torch.zeros(2)
    compare("a cache", {"t": (tensor,)}, {"t": (tensor,)})
    with pytest.raises(StaleCacheError, match="t: cached"):
        compare("a cache", {"t": (tensor,)}, {"t": (tensor.clone(),)})


def test_compare_tensors_by_their_numbers():
    one = torch.tensor([1.0, math.nan, 3.0])
    compare_tensors("a replay", [one, None], (one.clone(), None))
    for other in ([one + 1, None], [one, one], [one.double(), None], [one[:2], None]):
        with pytest.raises(StaleCacheError, match="a replay returned another tensor"):
            compare_tensors("a replay", [one, None], other)


# FLEX-09
@pytest.mark.usefixtures("checked")
def test_known_calls_pass():
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
    slopes = torch.rand(2)
    for _ in range(3):
        foci.attention(q, k, v)
        foci.attention(q, k, v, score=softcap, mask=foci.masks.window(9))
        foci.attention(q, k, v, score=lambda s, b, h, i, j: s + slopes[h] * (j - i), dropout_p=0.1)
    offsets = torch.tensor([0, 13, 40])
    packed = [t[0].transpose(0, 1) for t in (q, k, v)]
    for _ in range(3):
        foci.varlen_attn(*packed, offsets, offsets, 27, 27)


@pytest.mark.usefixtures("checked")
def test_dropout_draws_the_same_weights_in_this_mode(monkeypatch):
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)

    def draw():
        torch.manual_seed(3)
        return [foci.attention(q, k, v, dropout_p=0.3) for _ in range(3)]

    results = draw()
    monkeypatch.setattr(cache_check, "ENABLED", False)
    for one, other in zip(results, draw(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.usefixtures("checked")
def test_a_wrong_prepared_call_is_found():
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
    foci.attention(q, k, v)
    ((key, known),) = call_cache._calls.items()
    call_cache._calls[key] = known._replace(outline=known.outline._replace(scale=3.0))
    with pytest.raises(StaleCacheError, match=r"the cache of planned calls .* scale: cached 3\.0, rebuilt 0\.25"):
        foci.attention(q, k, v)


@pytest.mark.usefixtures("checked")
def test_a_wrong_trace_is_found():
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
    foci.attention(q, k, v, score=softcap)
    (traces,) = trace_functions._traces.values()
    ((numbers, trace),) = traces.items()
    traces[numbers] = dataclasses.replace(trace, bound=dataclasses.replace(trace.bound, floats=(7.0, 7.0)))
    with pytest.raises(StaleCacheError, match="the cache of traced functions .* floats"):
        foci.attention(q, k, v, score=softcap, scale=0.5)


@pytest.mark.usefixtures("checked")
def test_a_wrong_decision_is_found():
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
    foci.attention(q, k, v)
    ((key, decision),) = [(key, entry) for key, entry in execution._plans.items() if isinstance(entry[0], Decision)]
    execution._plans[key] = (
        dataclasses.replace(decision[0], problem=dataclasses.replace(decision[0].problem, q_heads=9)),
        *decision[1:],
    )
    with pytest.raises(StaleCacheError, match="the cache of decisions .* problem"):
        foci.attention(q, k, v, scale=0.5)


@pytest.mark.usefixtures("checked")
def test_a_wrong_operator_call_is_found():
    q, k, v = torch.randn(3, 1, 2, 40, 16).unbind(0)
    # one length: it spoils the entry of one call
    compiled = torch.compile(foci.attention, backend="aot_eager", fullgraph=True)
    compiled(q, k, v)
    ((key, known),) = call_cache._calls.items()
    call_cache._calls[key] = known._replace(outline=known.outline._replace(scale=3.0))
    with pytest.raises(StaleCacheError, match="the cache of operator calls .* scale"):
        compiled(q, k, v)


@pytest.mark.slow
def test_the_variable_switches_the_mode_on():
    code = "from foci import cache_check; print(cache_check.ENABLED)"
    for value, expected in (("1", "True"), ("0", "False"), ("", "False")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "FOCI_CHECK_CACHE": value}, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected
