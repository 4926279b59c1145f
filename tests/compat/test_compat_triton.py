"""Names of Triton and Gluon that are not public, and what foci does where they are missing. What kernels become without them:
`tests/backends/hopper/test_forward_compile.py` and `tests/backends/triton_backend/test_triton_compiling.py`."""

# NOW-03

import pytest
from without import load_without

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from foci.compat import gluon, lookup
from foci.compat import triton as compat


def test_the_installed_triton_has_every_name():
    assert compat.async_compile_mode().get() is None
    assert gluon.CallerContext(num_warps=4) is not None
    assert gluon.HAS_ADD and callable(gluon.begin_add)
    missing = [name for path, name in lookup.NAMES.items() if path.startswith("triton.") and not name.is_found]
    assert missing == []


def test_without_them_there_is_a_way_or_none_is_taken(monkeypatch):
    public = load_without("gluon", "triton.*")
    assert public.CallerContext is None
    # Triton 3.6 and 3.7 have no public name for the copy that adds
    assert public.HAS_ADD is (compat.release() > (3, 7))
    monkeypatch.setattr(lookup, "_patterns", ["triton.*"])
    assert compat.async_compile_mode.__wrapped__() is None


@pytest.mark.parametrize("name", ["reinterpret", "_reinterpret"])
def test_a_buffer_is_viewed_by_the_method_it_has(name):
    buffer = type("Buffer", (), {name: lambda self, *args: args})()
    assert gluon.reinterpreted(buffer)(1, 2) == (1, 2)


def test_a_buffer_is_viewed_by_the_public_method_if_it_has_both():
    buffer = type("Buffer", (), {"reinterpret": lambda self: "public", "_reinterpret": lambda self: "private"})()
    assert gluon.reinterpreted(buffer)() == "public"
