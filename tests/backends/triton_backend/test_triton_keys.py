"""A kernel has one key in Triton's cache, whatever was compiled before it."""

import os

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no keys", allow_module_level=True)

from triton.runtime.jit import JITCallable  # noqa: E402

from foci.backends.gpu import backward, forward, mend, row_stats, tile_tables, tiles  # noqa: E402
from foci.backends.gpu.triton_cache_key import fill_cache_keys  # noqa: E402

KERNELS = (
    forward.attention_forward,
    backward.attention_key_gradient,
    backward.attention_query_gradient,
    row_stats.prepare_rows,
    mend.mend_rows,
    mend.mend_gradients,
    tile_tables.classify_tiles,
)


@pytest.fixture
def unasked(monkeypatch):
    """A function that has every function of these modules as if nobody had asked for its key."""

    def forget():
        for module in (forward, backward, mend, row_stats, tile_tables, tiles):
            for function in vars(module).values():
                if isinstance(function, JITCallable):
                    monkeypatch.setattr(function, "hash", None)
                    monkeypatch.setattr(function, "used_global_vals", {})

    return forget


def test_the_key_of_a_kernel_does_not_depend_on_those_before_it(unasked):
    keys = []
    for order in (KERNELS, KERNELS[::-1], KERNELS[2:] + KERNELS[:2]):
        unasked()
        for kernel in order:
            fill_cache_keys([kernel])
        keys.append([kernel.cache_key for kernel in KERNELS])
    assert keys[0] == keys[1] == keys[2]


def test_constants_of_what_is_called_are_part_of_the_key(unasked):
    unasked()
    fill_cache_keys([forward.attention_forward, None, 3])
    assert {name for name, _ in tiles.find_task.used_global_vals} >= {"HEAD_GROUP", "RECORD"}
