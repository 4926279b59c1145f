"""Code is known by its identity, and equal code by its value."""

import types

import pytest

from foci.ir import function_fingerprint
from foci.ir.function_fingerprint import fingerprint

SOURCE = "lambda b, h, i, j: i - j < 5"


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    monkeypatch.setattr(function_fingerprint, "_known", {})


def make(source=SOURCE):
    function = eval(source, {})
    assert isinstance(function, types.FunctionType)
    return function


def test_equal_code_has_one_fingerprint():
    one, other = make(), make()
    assert one.__code__ is not other.__code__
    assert fingerprint(one).structure == fingerprint(other).structure
    assert fingerprint(one).structure != fingerprint(make(SOURCE.replace("5", "6"))).structure


def test_known_code_is_bounded(monkeypatch):
    monkeypatch.setattr(function_fingerprint, "_CODES", 16)
    for n in range(100):
        assert fingerprint(make(f"lambda b, h, i, j: i < j + {n}")) is not None
        assert len(function_fingerprint._known) <= 17
