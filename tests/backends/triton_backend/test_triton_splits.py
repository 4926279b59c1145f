"""Keys split over programs for few queries: who takes that way, and its numbers, in Triton's interpreter or on a GPU."""

import math
import os

import pytest
import torch

import foci
from compiled import several
from foci import masks, scores

pytest.importorskip("triton", reason="Triton is not installed")

from foci.backends.compile_priority import wait_for_background
from foci.backends.gpu.architectures import ARCHITECTURES
from foci.backends.gpu.schedules import split_kind, splits_for

HAS_GPU = torch.cuda.is_available()
IS_RUN = HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")


@pytest.mark.parametrize(
    ("batch", "heads", "lengths", "kind"),
    [
        (1, (32, 8), (1, 1024), "decode"),
        (512, (32, 8), (16, 1024), "decode"),  # a decode whatever the batch
        (1, (32, 8), (1, 1023), None),
        (1, (32, 1), (4, 8192), "split"),
        (512, (32, 1), (4, 8192), None),
        (2, (16, 16), (128, 4096), "split"),
        (2, (16, 16), (64, 4096), "decode"),  # in one tile
        (1, (16, 16), (128, 8192), "split"),
        (1, (32, 8), (64, 8192), "split"),
        (1, (16, 16), (256, 4096), "split"),
        (1, (16, 16), (257, 8192), None),
        (4, (16, 16), (128, 4096), "split"),
        (5, (16, 16), (128, 4096), None),  # tiles of eight entries
        (8, (16, 16), (128, 4096), None),
        (1, (16, 16), (128, 1025), "split"),
        (1, (16, 16), (128, 1024), None),
        (1, (0, 0), (128, 4096), None),
    ],
)
def test_keys_are_split_where_few_queries_leave_multiprocessors_idle(batch, heads, lengths, kind):
    assert split_kind(batch, heads, lengths, 90) == kind


@pytest.mark.parametrize("tiles", [1, 4, 16, 32, 64, 66])
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch])
def test_there_are_two_splits_at_least(tiles, arch):
    # the fewest keys, in tiles of 128, of rows that leave half of a device idle
    if 2 * tiles <= ARCHITECTURES[arch].sms:
        assert splits_for(tiles, 9, arch, 100000, 1) == 2


def test_registers_limit_programs_as_shared_memory_does():
    assert splits_for(64, 32, 90, 75000) == 6
    assert splits_for(64, 32, 90, 75000, 2) == 4


CASES = {
    # batch, heads, lengths, head dims, then options
    "plain": (2, (2, 2), (17, 140), (16, 16), {}),
    "groups": (1, (6, 2), (23, 150), (16, 16), {}),
    "one key head": (1, (5, 1), (16, 200), (16, 16), {}),
    "dims": (1, (4, 2), (32, 129), (24, 40), {}),
    "causal": (1, (6, 2), (24, 170), (16, 16), {"mask": masks.causal()}),
    "lower right": (2, (6, 2), (29, 171), (16, 16), {"mask": masks.causal_lower_right()}),
    "window": (1, (6, 2), (24, 170), (16, 16), {"mask": masks.window(9, 9)}),
    "list": (1, (6, 2), (24, 170), (16, 16), {"mask": foci.Mask(lambda b, h, q, k: ((k // 16) % 3 == 0) | (q % 5 == k % 7))}),
    "rows without keys": (1, (6, 2), (24, 170), (16, 16), {"mask": foci.Mask(lambda b, h, q, k: (q % 3 > 0) & (k > 40) & (k < 150))}),
    "entries": (2, (6, 2), (24, 170), (16, 16), {"mask": foci.Mask(lambda b, h, q, k: k < 60 + 90 * b)}),
    "alibi": (1, (6, 2), (24, 170), (16, 16), {"score": scores.alibi(6), "mask": masks.causal_lower_right()}),
    "softcap": (1, (6, 2), (24, 170), (16, 16), {"score": scores.softcap(5.0)}),
    "negative scale": (1, (6, 2), (24, 170), (16, 16), {"scale": -0.3}),
    "dropout": (1, (6, 2), (24, 170), (16, 16), {"dropout_p": 0.3}),
}
LONG = {
    "D 64": (2, (16, 16), (128, 4096), (64, 64), {}),
    "D 64, not in 64s": (1, (12, 12), (100, 4001), (64, 64), {"mask": masks.causal_lower_right()}),
    "D 128": (1, (16, 16), (128, 8192), (128, 128), {}),
    "grouped": (1, (32, 8), (64, 8192), (128, 128), {"mask": masks.causal_lower_right()}),
    "256 queries": (1, (16, 16), (256, 4096), (128, 128), {"score": scores.softcap(20.0)}),
    "window": (1, (16, 4), (200, 3000), (128, 128), {"mask": masks.window(1500, 1500)}),
    "list": (1, (16, 16), (128, 4096), (64, 64), {"mask": foci.Mask(lambda b, h, q, k: ((k // 128) % 3 == 0) | (q % 5 == k % 7))}),
    "dropout": (1, (16, 16), (128, 2048), (64, 64), {"dropout_p": 0.2}),
    "dropout, D 128": (1, (16, 16), (128, 2048), (128, 128), {"dropout_p": 0.2}),
    "wide": (1, (4, 4), (128, 2048), (256, 256), {}),
    "one tile": (1, (16, 16), (50, 4096), (128, 128), {}),
    "one key head": (1, (32, 1), (4, 8192), (128, 128), {}),
}


@pytest.fixture
def taken(monkeypatch):
    """The kernels that split keys, pass by pass."""
    from foci.backends.gpu.portable_passes import PortableForward

    kinds = []
    original = PortableForward._decode

    def note(self, call, kind, outputs):
        kinds.append(kind)
        original(self, call, kind, outputs)

    monkeypatch.setattr(PortableForward, "_decode", note)
    return kinds


def tensors(case, dtype):
    batch, (heads, kv_heads), (length, keys), (dim, value_dim), _ = case
    generator = torch.Generator().manual_seed(1)
    shapes = (batch, heads, length, dim), (batch, kv_heads, keys, dim), (batch, kv_heads, keys, value_dim)
    return [torch.randn(shape, generator=generator).to(DEVICE, dtype).requires_grad_() for shape in shapes]


def passes(backend, inputs, options, bias=None):
    """out, lse, row_max and gradients, of lse too."""
    torch.manual_seed(5)
    with foci.use(backend):
        out, aux = foci.attention(*inputs, **options, return_aux=foci.AuxRequest(lse=True, row_max=True))
    finite = torch.where(aux.lse.isfinite(), aux.lse, 0.0)
    learned = () if bias is None else (bias,)
    return [out, aux.lse, aux.row_max, *torch.autograd.grad((out.float() * 0.5).square().sum() + finite.sum(), (*inputs, *learned))]


def assert_close(actual, sought, atol):
    for n, (a, b) in enumerate(zip(actual, sought, strict=True)):
        torch.testing.assert_close(a.double(), b.double(), atol=atol, rtol=atol, msg=lambda said, n=n: f"{n}: {said}")


runs = pytest.mark.skipif(not IS_RUN, reason="kernels run on a GPU or in the interpreter")


@runs
@pytest.mark.skipif(HAS_GPU, reason="so few keys are split in the interpreter alone")
@pytest.mark.parametrize("name", CASES)
def test_split_keys_give_the_numbers_of_the_formula(name, taken):
    case = CASES[name]
    inputs = tensors(case, torch.float32)
    actual = passes("triton", inputs, case[-1])
    assert taken == ["split" if case[1][0] // case[1][1] * case[2][0] > 64 else "decode"]
    assert_close(actual, passes("reference", inputs, case[-1]), 2e-4)


@runs
@pytest.mark.skipif(HAS_GPU, reason="so few keys are split in the interpreter alone")
def test_captured_tensors_learn_where_keys_are_split(taken):
    case = (1, (6, 2), (24, 170), (16, 16), {})
    inputs, bias = tensors(case, torch.float32), torch.randn(6, 24, 170, requires_grad=True)
    options = {"score": foci.Score(lambda s, b, h, q, k: s + bias[h, q, k]), "mask": masks.causal_lower_right()}
    actual = passes("triton", inputs, options, bias)
    assert taken == ["split"]
    assert_close(actual, passes("reference", inputs, options, bias), 2e-4)


@runs
@pytest.mark.skipif(HAS_GPU, reason="so few keys are split in the interpreter alone")
@pytest.mark.parametrize(("large", "apart"), [(1e3, 0.5), (1e6, 0.25), (8e6, 0.5), (8e8, 64.0)])
def test_large_scores_of_two_splits_are_told_apart(large, apart, taken):
    query, key, value = torch.zeros(1, 1, 17, 16), torch.zeros(1, 1, 160, 16), torch.zeros(1, 1, 160, 16)
    query[..., 0], key[..., 0], value[..., 3, 0] = 1.0, -large, 1.0
    key[..., 3, 0], key[..., 155, 0] = large + 2 * apart, large + apart  # numbers that float32 has
    with foci.use("triton"):
        out, aux = foci.attention(query, key, value, scale=1.0, return_aux=foci.AuxRequest(lse=True))
    assert taken == ["decode"]
    torch.testing.assert_close(out[..., 0], torch.full((1, 1, 17), apart).sigmoid(), atol=1e-6, rtol=0)
    torch.testing.assert_close(aux.lse, torch.full((1, 1, 17), large + 2 * apart), rtol=2e-3 if large < 1e4 else 1e-6, atol=0)


@runs
@pytest.mark.skipif(HAS_GPU, reason="so few keys are split in the interpreter alone")
@pytest.mark.parametrize(
    "options", [{"mask": foci.Mask(lambda b, h, q, k: k <= q + 20 * h)}, {"block_mask": True}], ids=["heads", "blocks"]
)
def test_masks_of_heads_and_block_masks_split_nothing(options, taken):
    inputs = tensors((1, (6, 2), (24, 170), (16, 16), {}), torch.float32)
    if "block_mask" in options:
        options = {"mask": foci.create_block_mask(masks.causal_lower_right(), 1, 1, 24, 170, device="cpu", BLOCK_SIZE=16)}
    with foci.use("triton"):
        foci.attention(*inputs, **options)
    assert not taken


def on_gpu(test):
    """A test of tiles as a GPU has them."""
    return pytest.mark.gpu(pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")(test))


@on_gpu
@pytest.mark.parametrize("backend", ["triton", "hopper"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", LONG)
def test_long_keys_are_split_on_a_gpu(name, dtype, backend, taken):
    """Both backends: that of Hopper takes such forwards from this one, where gradients are wanted."""
    if backend == "hopper" and (torch.cuda.get_device_capability()[0] != 9 or dtype == torch.float32):
        pytest.skip("needs compute capability 9.0, and half precision")
    case = LONG[name]
    if dtype == torch.float32 and max(case[3]) > 128:
        pytest.skip("of heads of 128 at most")
    inputs = tensors(case, dtype)
    actual = passes(backend, inputs, case[-1])
    assert taken == ["split" if case[1][0] // case[1][1] * case[2][0] > 64 else "decode"]
    exact = passes("reference", [t.detach().double().requires_grad_() for t in inputs], case[-1])
    assert_close(actual[:3], exact[:3], 2e-2 if dtype == torch.bfloat16 else 1e-4)
    for got, want in zip(actual[3:], exact[3:], strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        assert error < (2e-2 if dtype == torch.bfloat16 else 1e-4)
    again = passes(backend, inputs, case[-1])
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))  # a known call, and the same bits


@on_gpu
def test_known_calls_and_new_lengths_are_split_as_they_are(taken):
    for keys in (4096, 4000, 4096, 2100, 4000):
        for queries in (128, 90, 128):
            inputs = [t.detach() for t in tensors((1, (16, 4), (queries, keys), (64, 64), {}), torch.bfloat16)]
            with foci.use("triton"):
                out = foci.attention(*inputs, mask=masks.causal_lower_right())
            with foci.use("reference"):
                sought = foci.attention(*inputs, mask=masks.causal_lower_right())
            torch.testing.assert_close(out, sought, atol=2e-2, rtol=2e-2)


@on_gpu
def test_new_lengths_compile_nothing_where_keys_are_split():
    from foci.backends.gpu import decode

    def compiled():
        functions = (decode.attention_decode, decode.combine_splits)
        return sum(len(cache[0]) for function in functions for cache in function.device_caches.values())

    def attend(batch, queries, keys):
        inputs = [t.detach() for t in tensors((batch, (16, 16), (queries, keys), (64, 64), {}), torch.bfloat16)]
        with foci.use("triton"):
            foci.attention(*inputs)

    attend(1, 100, 4000)
    wait_for_background()  # Triton counts what compiles ahead, too
    before = compiled()
    for sizes in ((2, 128, 4096), (1, 65, 1025), (1, 256, 2048), (1, 128, 16384)):
        attend(*sizes)
    assert compiled() == before


@on_gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_a_cuda_graph_replays_split_keys(dim):
    inputs = [t.detach() for t in tensors((1, (16, 16), (128, 4096), (dim, dim), {}), torch.bfloat16)]
    with foci.use("triton"):
        foci.attention(*inputs)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = foci.attention(*inputs)
        for t in inputs:
            t.copy_(torch.randn_like(t))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, foci.attention(*inputs))
    sought = torch.nn.functional.scaled_dot_product_attention(*(t.double() for t in inputs), scale=1 / math.sqrt(dim))
    torch.testing.assert_close(captured.double(), sought, atol=2e-2, rtol=2e-2)


@on_gpu
def test_compiled_code_splits_keys():
    def attend(q, k, v):
        return foci.attention(q, k, v, mask=masks.causal_lower_right())

    step = torch.compile(attend, dynamic=True, fullgraph=True)
    for queries, keys in several((128, 4096), (100, 3000), (128, 512)):
        inputs = [t.detach() for t in tensors((1, (16, 4), (queries, keys), (64, 64), {}), torch.bfloat16)]
        with foci.use("triton"):
            torch.testing.assert_close(step(*inputs), attend(*inputs))
