"""Every field of a call's spec, and everything that a call may differ in, through every way into the library: a call after another one
computes what it computes alone."""

import dataclasses

import pytest
import torch

from changed_calls import BASE, BASES, DOORS, changes, enter, run
from foci import call_cache
from foci.environment import Environment
from foci.problem import Formula
from foci.spec import CallSpec, spec_of_operator
from foci.variant import PLAIN


def may_differ_at_a_fixed_place(first, changed):
    """Whether sizes, strides and dtypes stay, as they do at a place of compiled code that has no symbols."""
    different = {name for name in vars(first) if getattr(first, name) != getattr(changed, name)}
    return different <= {"environment", "grad_mode"} or (different == {"views"} and set(changed.views) == {"plain", "offset"})


CASES = [
    pytest.param(base, changed, door, id=f"{base}: {changed}, {door}")
    for base in BASES
    for changed in changes(base)
    for door in DOORS
    if door != "fixed place" or may_differ_at_a_fixed_place(BASES[base], changed)
]


def assert_same(got, want):
    (tensors, backends), (wanted, wanted_backends) = got, want
    assert backends == wanted_backends
    assert len(tensors) == len(wanted)
    for one, other in zip(tensors, wanted, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert (one.dtype, one.shape, one.stride(), one.requires_grad) == (
                other.dtype,
                other.shape,
                other.stride(),
                other.requires_grad,
            )
            assert torch.equal(one.nan_to_num(123.0), other.nan_to_num(123.0))


# FLEX-09, FLEX-10, SDPA-17
@pytest.mark.parametrize(("base", "changed", "door"), CASES)
def test_a_call_computes_what_it_computes_alone(base, changed, door, monkeypatch):
    first = BASES[base]
    alone = []
    for call in (first, changed):
        with monkeypatch.context() as patch:
            enter(patch, door)
            alone.append(run(call))
    enter(monkeypatch, door)
    for n in (0, 0, 1, 1, 0):
        assert_same(run((first, changed)[n]), alone[n])


def specs_of(call, door, monkeypatch):
    """The specs that a call and its backward are looked up by."""
    seen, recall = [], call_cache.recall
    with monkeypatch.context() as patch:
        enter(patch, door)
        patch.setattr(call_cache, "recall", lambda spec: seen.append(spec) or recall(spec))
        run(call)
    return seen


def differing(specs, other_specs):
    """Names of the fields, those of the environment among them, in which calls differ."""
    names = set()
    for one, other in zip(specs, other_specs, strict=False):
        names |= {name for name in CallSpec._fields if getattr(one, name) != getattr(other, name)}
        names |= {name for name in Environment._fields if getattr(one.environment, name) != getattr(other.environment, name)}
    return names


def test_the_changes_reach_every_field(monkeypatch):
    changed_fields = set()
    for door in ("eager", "operator"):
        for base, first in BASES.items():
            specs = specs_of(first, door, monkeypatch)
            for changed in changes(base):
                changed_fields |= differing(specs, specs_of(changed, door, monkeypatch))
    assert {*CallSpec._fields, *Environment._fields} - changed_fields == {"devices", "is_joined"}


@pytest.mark.parametrize(
    ("field", "first", "change"),
    [
        ("function", BASE, {"score": "times"}),
        ("outputs", BASE, {"outputs": ("lse",)}),
        ("scale", BASE, {"scale": 0.3}),
        ("dropout_p", BASES["dropout"], {"dropout_p": 0.5}),
        ("requires_grad", dataclasses.replace(BASE, requires_grad=(False,) * 4), {"requires_grad": (True, True, True, False)}),
        ("block_mask", BASES["blocks"], {"block_size": 16}),
        ("environment", BASE, {"environment": "reference"}),
        ("environment", BASE, {"environment": "registered"}),
    ],
)
def test_a_key_without_a_field_is_found(field, first, change, monkeypatch):
    """So the tests above can fail: with a narrower key, a call computes something else than alone, or is refused."""
    changed, position = dataclasses.replace(first, **change), CallSpec._fields.index(field)
    recall, keep = call_cache.recall, call_cache.keep

    def narrow(spec):
        return (*spec[:position], *spec[position + 1 :])

    enter(monkeypatch, "eager")
    alone = run(changed)
    enter(monkeypatch, "eager")
    monkeypatch.setattr(call_cache, "recall", lambda spec: recall(narrow(spec)))
    monkeypatch.setattr(call_cache, "keep", lambda spec, call: keep(narrow(spec), call))
    run(first)
    with pytest.raises((AssertionError, IndexError, ValueError, RuntimeError)):
        assert_same(run(changed), alone)


def test_gradients_in_rows_are_another_call():
    """As a graph asks for them where query, key and value are parts of one product."""
    rows = torch.randn(2, 24, 3 * 64)
    query, key, value = (t.unflatten(2, (4, 16)).transpose(1, 2) for t in rows.split(64, 2))
    args = (query, key, value, [], *(None,) * 7, [], [], 0.25, 0.0, 0, 0, Formula(PLAIN).line, "blocked")
    out, lse = torch.ops.foci.attention(*args)[:2]
    inputs = (torch.randn_like(out), None, None, None, out, lse, "111", *args)
    for _ in range(2):
        apart = torch.ops.foci.attention_backward(*inputs)
        joined = torch.ops.foci.attention_backward_rows(*inputs)
        assert torch.equal(joined, torch.cat([t.transpose(1, 2).flatten(2) for t in apart], 2))
    one, other = (spec_of_operator(args, None, "111", is_joined=on) for on in (False, True))
    assert one != other
