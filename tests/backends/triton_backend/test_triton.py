"""The Triton backend without a GPU: what it declines, its table of schedules, its generated functions, its kernels compiled."""

import importlib.util
import math
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.gpu.architectures import ARCHITECTURES
from foci.backends.gpu.exp2_rewrite import log2_weight, scaled_derivative
from foci.backends.gpu.mask_convexity import begins_late, is_convex
from foci.backends.gpu.schedules import KINDS, SCHEDULES, padded_dim, schedule_for, schedule_rows, shared_bytes, splits_for
from foci.backends.triton import BACKEND
from foci.ir.derivative import score_derivative
from foci.ir.expr import DType
from foci.problem import Formula, Layout, Outputs, Problem, Target
from foci.trace_functions import bind

CPU = torch.device("cpu")
HOPPER = Target("cuda", 90, frozenset({"triton"}))
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def problem(score=None, mask=None, **changes):
    variant = bind(score, mask, CPU).variant
    options = {
        "dtype": torch.bfloat16,
        "head_dim": 128,
        "value_dim": 128,
        "q_heads": 4,
        "kv_heads": 4,
        "batch": 2,
        "q_len": 512,
        "kv_len": 512,
    }
    formula = {k: changes.pop(k) for k in ("layout", "outputs", "dropout", "block_size") if k in changes}
    return Problem(Formula(variant, **formula), **(options | changes))


@pytest.mark.parametrize(
    ("changes", "target", "words"),
    [
        ({}, Target("cpu"), "NVIDIA GPU"),
        ({}, Target("mps"), "not mps"),
        ({}, Target("cuda", 90), "not installed"),
        ({}, Target("cuda", 75, frozenset({"triton"})), "8.0 or newer"),
        ({"dtype": torch.float64}, HOPPER, "float64"),
        ({"head_dim": 513}, HOPPER, "512"),
        ({"outputs": Outputs(weights=True), "layout": Layout.JAGGED}, HOPPER, "weights"),
        ({"block_size": (100, 128)}, HOPPER, "multiples of 16"),
        ({"block_size": (128, 128), "layout": Layout.JAGGED}, HOPPER, "dense layout"),
    ],
)
@pytest.mark.skipif(IS_INTERPRETED, reason="the interpreter takes CPU problems")
def test_what_it_cannot_do_is_declined_in_words(changes, target, words):
    assert words in BACKEND.reject(problem(**changes), target)


def test_everything_else_is_accepted_and_costs_what_its_flops_cost():
    small, large = problem(scores.alibi(4), masks.causal()), problem(kv_len=8192, q_len=8192)
    assert BACKEND.reject(small, HOPPER) is None
    assert BACKEND.reject(problem(layout=Layout.JAGGED, dropout=True), HOPPER) is None
    assert 0 < BACKEND.cost(small, HOPPER) < BACKEND.cost(large, HOPPER) < 1


def test_gradients_through_row_reductions_and_under_block_masks_are_taken():
    rows, columns = torch.randn(8, 4), torch.randn(8, 4)
    dot = foci.Score(lambda s, b, h, q, k: s + torch.dot(rows[q], columns[k]))
    assert BACKEND.reject(problem(dot, capture_grads=(True, True)), HOPPER) is None
    assert BACKEND.reject(problem(dot, capture_grads=(True, True), block_size=(128, 128)), HOPPER) is None


# FLEX-12
@pytest.mark.parametrize("arch", [arch for arch in ARCHITECTURES if arch])
@pytest.mark.parametrize("dims", [(1, 1), (64, 64), (72, 40), (128, 128), (192, 128), (256, 256), (512, 512)])
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("scratch", [0, 4])
def test_every_problem_has_a_schedule_that_fits_shared_memory(arch, dims, itemsize, scratch):
    for kind in sorted({kind for _, kind, _, _ in SCHEDULES} | {"captures", "decode"}):
        wide = (padded_dim(dims[0]), padded_dim(dims[1]))
        schedule = schedule_for(kind, arch, wide, itemsize, scratch=scratch)
        if schedule is None:
            assert itemsize == 4
            assert sum(wide) > 256  # float32 with large heads: declined, with the reason
            continue
        assert shared_bytes(kind, schedule, wide, itemsize, scratch=scratch) <= ARCHITECTURES[arch].shared_bytes


# FLEX-14
@pytest.mark.parametrize(("groups", "tiles", "wanted"), [(512, 64, 1), (32, 512, 4), (8, 1024, 16), (8, 8, 2), (100, 1024, 9), (1, 3, 1)])
def test_a_decode_is_split_until_few_multiprocessors_idle(groups, tiles, wanted):
    splits = splits_for(groups, tiles, 90, 200000)
    rounds = -(-groups * splits // 132)
    assert splits == wanted
    assert splits == max(1, tiles // 4) or rounds * 132 <= 1.05 * groups * splits
    assert splits_for(8, 1024, 90, 100000) == 32  # a multiprocessor has room for two


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_half_precision_is_never_left_to_the_smallest_tiles(arch, width):
    apart = {
        "key_gradient_alone",
        "value_gradient_alone",
        "captures",
        "decode",
        "key_gradient",
        "key_gradient_scored",
        "key_gradient_dropped",
    }
    for kind in set(KINDS) - apart:
        assert schedule_rows(arch, kind, 2, width), kind


@pytest.mark.parametrize(
    "score",
    [
        scores.softcap(20.0),
        scores.alibi(4),
        scores.softcap(5.0) >> scores.alibi(4),
        scores.alibi(4) >> scores.softcap(5.0),
        foci.Score(lambda s, b, h, q, k: (s - 0.25 * (q - k)) / 3.0 + (q * 0.5 - s)),
        foci.Score(lambda s, b, h, q, k: 2.0 - (s * s) / 7.0),
        foci.Score(lambda s, b, h, q, k: s * 0.0 + 1.5),
    ],
)
@pytest.mark.parametrize("half", [True, False])
def test_exponents_and_slopes_are_those_of_the_score(score, half):
    bound = bind(score, None, CPU)
    raw, lse2, scale = torch.randn(4, 6, 6, dtype=torch.float64), torch.randn(6, 1, dtype=torch.float64), 0.37
    places = {"b": 0, "h": torch.arange(4)[:, None, None], "q_idx": torch.arange(6)[:, None], "kv_idx": torch.arange(6)}
    values = places | {"raw": raw, "scale": scale, "lse2": lse2, "score": raw * scale, "q_len": 6, "kv_len": 6}
    natural = (raw * scale).requires_grad_()
    wanted = torch.broadcast_to(evaluated(bound.variant.score, values | {"score": natural}, bound), raw.shape)
    actual = evaluated(log2_weight(bound.variant.score, half=half), values, bound)
    torch.testing.assert_close(torch.broadcast_to(actual, raw.shape), wanted.detach() / math.log(2) - lse2)
    (slope,) = torch.autograd.grad(wanted.sum(), natural)
    actual = evaluated(scaled_derivative(score_derivative(bound.variant.score), half=half), values, bound)
    torch.testing.assert_close(torch.broadcast_to(torch.as_tensor(actual, dtype=torch.float64), raw.shape), slope)


def evaluated(e, values, bound):
    """An expression's value by torch, in float64."""
    if e.op == "var":
        return values[e.value]
    if e.op == "const":
        return e.value
    if e.op == "param":
        return (bound.floats if e.dtype is DType.FLOAT else bound.ints)[e.value]
    args = [evaluated(arg, values, bound) for arg in e.args]
    if e.op == "cast":
        return torch.as_tensor(args[0]).double() if e.dtype is DType.FLOAT else args[0]
    functions = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv, "neg": operator.neg}
    unary = {"tanh": torch.tanh, "exp2": lambda x: torch.exp2(torch.as_tensor(x, dtype=torch.float64))}
    return (functions | unary)[e.op](*args)


@pytest.mark.parametrize(
    ("mask", "convex"),
    [
        (masks.causal(), True),
        (masks.window(3, 0) & masks.causal(), True),
        (foci.Mask(lambda b, h, q, k: (k <= q) & (q - k < 9) & (k < 40)), True),
        (foci.Mask(lambda b, h, q, k: torch.abs(q - k) < 4), True),
        (foci.Mask(lambda b, h, q, k: (q - k) * (q - k) < 16), False),  # true, but not proved
        (foci.Mask(lambda b, h, q, k: (k < 4) | (q == k)), False),
        (foci.Mask(lambda b, h, q, k: k % 2 == 0), False),
    ],
)
def test_only_what_is_proved_an_interval_is_called_one(mask, convex):
    expr = bind(None, mask, CPU).variant.mask
    assert is_convex(expr, "kv_idx") == convex
    q, k = torch.arange(32)[:, None], torch.arange(32)
    kept = torch.as_tensor(mask(0, 0, q, k)).expand(32, 32).int()
    starts = (kept.diff(prepend=torch.zeros(32, 1, dtype=torch.int32), dim=1) == 1).sum(1)
    assert not is_convex(expr, "kv_idx") or int(starts.max()) <= 1
    # a first key behind the first of all, for some query that has keys at all
    begins = bool((kept.any(1) & (kept[:, 0] == 0)).any())
    assert not is_convex(expr, "kv_idx") or begins_late(expr) == begins


needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


@needs_triton
def test_generated_functions_read_as_written():
    """Golden: what a variant becomes, and nothing more."""
    from foci.backends.gpu.functions import build_functions, capture_layouts

    slopes = torch.ones(4)
    bound = bind(foci.Score(lambda s, b, h, q, k: s + slopes[h] * (k - q)), masks.causal(), CPU)
    code = build_functions(bound.variant, capture_layouts(bound.captures), half=True)
    assert code.source.split("\n\n\n")[2].strip() == ("def mask(b, h, q_idx, kv_idx, q_len, kv_len, env):\n    return (kv_idx <= q_idx)")
    # bounds by row or column, so that a tile has comparisons alone
    window = bind(None, foci.Mask(lambda b, h, q, k: (k <= q) & (q - k < 9)), CPU).variant
    by_query, by_key = build_functions(window, (), half=True).source.split("\n\n\n")[3:]
    width = "tl.maximum(tl.minimum(tl.cast(env.ints[0] >> 2, tl.int32), 1073741824), (-1073741824))"
    assert f"v0 = ((q_idx - {width}) + 1)" in by_query
    assert "(tl.maximum(0, v0) <= kv_idx)" in by_query
    assert "(kv_idx <= tl.minimum((kv_len - 1), q_idx))" in by_query
    assert f"v0 = ((kv_idx + {width}) - 1)" in by_key
    assert "(q_idx <= tl.minimum((q_len - 1), v0))" in by_key
    assert "(tl.maximum(0, kv_idx) <= q_idx)" in by_key
    score = code.source.split("\n\n\n")[0]
    assert "tl.load(env.captures[0] + h)" in score
    assert "tl.cast(kv_idx, tl.float32) - tl.cast(q_idx, tl.float32)" in score  # casts of rows and columns, not of tiles
    again = bind(foci.Score(lambda s, b, h, q, k: s + slopes[h] * (k - q)), masks.causal(), CPU)
    assert build_functions(again.variant, capture_layouts(again.captures), half=True) is code


@needs_triton
def test_softcap_takes_one_instruction_in_half_precision_only():
    from foci.backends.gpu.functions import build_functions

    bound = bind(scores.softcap(20.0), None, CPU)
    assert "tanh_half(" in build_functions(bound.variant, (), half=True).source
    assert "tanh_half(" not in build_functions(bound.variant, (), half=False).source


@needs_triton
def test_integers_never_specialise_a_kernel():
    from foci.backends.gpu.kernel_args import encode, encode_word

    for value in (-3, 0, 1, 2, 16, 1024, 4097):
        assert encode(value) not in (1,)
        assert encode(value) % 16 != 0
        assert encode(value) >> 2 == value
    for word in (0, 1, 2**31, 2**32 - 1):
        assert 2**31 < encode_word(word) < 2**63
        assert (encode_word(word) - (1 << 40)) >> 5 == word


CORE = (
    "causal",
    "gqa",
    "bias heads aligned",
    "blocks",
    "dropout",
    "jagged causal gqa",
    "learned bias causal",
    "learned table",
    "decode list dropout",
    "empty rows",
)


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(IS_INTERPRETED, reason="runs the interpreter itself")
@pytest.mark.parametrize("part", range(4))
def test_kernels_in_the_interpreter(part):
    """A core of the cases of benchmarks/gpu_check.py; the whole of it takes minutes: TRITON_INTERPRET=1 python benchmarks/gpu_check.py."""
    numpy = pytest.importorskip("numpy", reason="the interpreter needs NumPy")
    if tuple(map(int, numpy.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of Triton 3.6 needs NumPy below 2.4: it turns arrays of one element into numbers")
    root = Path(__file__).parents[3]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(root / "src")}
    names = CORE[part::4]
    done = subprocess.run(
        [sys.executable, str(root / "benchmarks" / "gpu_check.py"), *names],
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert done.stdout.count("ok  ") == len(names)
