"""The backward kernels compiled for sm_90 without a GPU: products by wgmma, shared memory within the device's, few spills."""

import os

import pytest
import torch

import foci
from foci import masks, scores
from foci.backends.contract import Plan
from foci.backends.hopper import VERSIONS
from foci.binding import bind
from foci.problem import Cotangents, Formula, Layout, Operands, Problem, Results, Target

triton = pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile", allow_module_level=True)

from foci.backends.hopper import backward  # noqa: E402
from foci.backends.triton import sparsity  # noqa: E402
from foci.backends.triton.schedules import LIMITS  # noqa: E402

GRADIENTS = (
    "attention_key_gradient",
    "attention_query_gradient",
    "attention_gradients",
    "attention_split_gradient",
)
TABLES = ("mark_tiles", "pack_queries", "rank_packed", "rank_tiles")
# bytes that releases of Triton which the backend is not written for spill besides
SPARE = 0 if triton.__version__.startswith(VERSIONS) else 320
LAUNCHED = {
    backward: (*GRADIENTS, "begin_gradients", "clear_turns", "finish_query_gradient", *TABLES),
    sparsity: ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences"),
}


DOCUMENTS = torch.arange(2048) // 100
CASES = {
    "plain": {"fused": True},
    "causal": {"mask": masks.causal(), "fused": True},
    "causal D 64": {"mask": masks.causal(), "dim": 64, "fused": True},
    "grouped heads": {"kv_heads": 2, "fused": True},
    "grouped heads, causal": {"mask": masks.causal(), "kv_heads": 2, "fused": True},
    "D 16": {"dim": 16},
    "D 96": {"dim": 96, "fused": True},
    "D 72, Dv 80, causal": {"mask": masks.causal(), "dim": 72, "value_dim": 80, "fused": True},
    "D 192": {"dim": 192},
    "D 192, Dv 128": {"dim": 192, "value_dim": 128, "mask": masks.causal(), "stack": 32, "keys": "attention_key_gradient"},
    "D 160, Dv 192, softcap": {"score": scores.softcap(20.0), "dim": 160, "value_dim": 192},
    "D 256": {"mask": masks.causal(), "dim": 256},
    "D 256, Dv 64, softcap": {"score": scores.softcap(20.0), "dim": 256, "value_dim": 64},
    "D 128, Dv 64": {"value_dim": 64},
    "float16 causal alibi": {"mask": masks.causal(), "score": scores.alibi(4), "dtype": torch.float16, "fused": True},
    "softcap": {"mask": masks.causal(), "score": scores.softcap(20.0), "stack": 400, "fused": True},
    "softcap, D 64": {"mask": masks.causal(), "score": scores.softcap(20.0), "dim": 64, "fused": True},
    "document": {"mask": foci.Mask(lambda b, h, q, k, ids=DOCUMENTS: ids[q] == ids[k]), "fused": True},
    "window": {"mask": foci.Mask(lambda b, h, q, k: (q >= k) & (q - k < 100)), "fused": True},
    "jagged causal": {"mask": masks.causal(), "jagged": True, "fused": True},
    "jagged window": {"mask": masks.window(100), "jagged": True, "fused": True},
    "dropout": {"dropout": 0.1, "fused": True},
    "dropout, jagged, causal, D 64": {"dropout": 0.1, "mask": masks.causal(), "jagged": True, "fused": True, "dim": 64},
    "document D 64": {"mask": foci.Mask(lambda b, h, q, k, ids=DOCUMENTS: ids[q] == ids[k]), "fused": True, "dim": 64},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_backward_kernels_compile_within_bounds(name, stand_in, monkeypatch):
    case = CASES[name]
    found = stand_in(LAUNCHED, 90)
    monkeypatch.setattr(sparsity, "_WHOLE", sparsity.Sequences())
    launch(case)
    keys = case.get("keys", "attention_split_gradient" if case.get("dim", 128) > 128 else "attention_key_gradient")
    wanted = {"begin_gradients"} if case.get("dropout") else {keys, "attention_query_gradient", "begin_gradients"}
    wanted |= {"attention_gradients", "finish_query_gradient"} if case.get("fused") else set()
    wanted |= {"assign_tasks"} if case.get("jagged") else set()
    assert wanted <= {one.name for one in found}
    for one in found:
        assert one.shared <= LIMITS[90], one.name
        if one.name in GRADIENTS:
            assert "wgmma.mma_async" in one.ptx, one.name
            assert ("cp.reduce.async.bulk" in one.ptx) == (one.name == "attention_gradients"), one.name
        if one.stack is not None:
            # what one kernel keeps for all gradients fits the registers, but for random numbers or half as many more scores in a tile
            most = 32 if one.name == "attention_gradients" and not case.keys() & {"dim", "dropout", "score"} else case.get("stack", 320)
            assert one.stack <= (most if one.name in GRADIENTS else 32) + SPARE, one.name


@pytest.mark.parametrize(
    ("case", "one"),
    [
        ({}, True),
        ({"mask": masks.causal()}, True),
        ({"kv_heads": 2}, True),
        ({"mask": masks.causal(), "kv_heads": 2}, True),
        ({"mask": masks.causal(), "kv_heads": 2, "dim": 64}, False),
        ({"dim": 64, "jagged": True}, True),
        ({"dim": 80}, True),
        ({"score": scores.softcap(20.0)}, True),
        ({"score": scores.softcap(20.0), "dropout": 0.1}, False),
        ({"score": scores.softcap(20.0), "dim": 64}, True),
        ({"score": scores.softcap(20.0), "kv_heads": 2}, True),
        ({"mask": CASES["document"]["mask"]}, True),
        ({"mask": CASES["document"]["mask"], "jagged": True}, False),
        ({"mask": masks.window(100), "jagged": True}, True),
        ({"mask": masks.causal_lower_right(), "jagged": True, "dim": 64}, True),
        ({"mask": masks.causal(), "score": scores.alibi(4)}, True),
        ({"mask": masks.causal(), "score": scores.alibi(4), "kv_heads": 2}, False),
        ({"score": foci.Score(lambda s, b, h, q, k, ids=DOCUMENTS: s + ids[k])}, True),
        ({"score": foci.Score(lambda s, b, h, q, k, ids=DOCUMENTS: s + ids[q])}, True),
        ({"score": foci.Score(lambda s, b, h, q, k, ids=DOCUMENTS: s + ids[q] * ids[k])}, True),
        ({"dim": 256}, False),
        ({"value_dim": 64}, False),
    ],
)
def test_one_kernel_where_it_is_ahead_and_triton_can_add_by_tma(case, one, monkeypatch):
    assert (posed(case)[0].fused is not None) == one
    monkeypatch.setattr(backward, "HAS_ADD", False)
    assert posed(case)[0].fused is None


def posed(case):
    """(kernel, operands, out) of a case."""
    dim, dtype = case.get("dim", 128), case.get("dtype", torch.bfloat16)
    query, key = (
        torch.zeros(1 if case.get("jagged") else 2, 4, 512, dim, dtype=dtype),
        torch.zeros(1 if case.get("jagged") else 2, case.get("kv_heads", 4), 512, dim, dtype=dtype),
    )
    value = torch.zeros(*key.shape[:3], case.get("value_dim", dim), dtype=dtype)
    cu = torch.tensor([0, 200, 512])
    jagged = {"cu_q": cu, "cu_kv": cu, "max_q": 312, "max_kv": 312} if case.get("jagged") else {}
    bound = bind(case.get("score"), case.get("mask"), torch.device("cpu"))
    dropout = case.get("dropout", 0.0)
    seed = torch.tensor([1]) if dropout else None
    operands = Operands(query, key, value, bound.captures, bound.ints, bound.floats, 0.1, dropout, seed, **jagged)
    formula = Formula(bound.variant, Layout.JAGGED if jagged else Layout.DENSE, dropout=dropout > 0)
    problem = Problem(
        formula, dtype, dim, value.shape[-1], 4, key.shape[1], 2, 512, 512, True, True, True, tuple(False for _ in bound.captures)
    )
    gradients = backward.HopperGradients(Plan("hopper", problem, Target("cuda", 90, frozenset({"triton"}))))
    return gradients, operands, torch.zeros(*query.shape[:3], value.shape[-1], dtype=dtype)


def launch(case):
    """Compiles what a backward launches."""
    gradients, operands, out = posed(case)
    query = operands.query
    if case.get("fused"):
        assert gradients.fused is not None
        gradients.backward(operands, Results(out, torch.zeros(query.shape[:3])), Cotangents(out))
    if case.get("dropout"):
        return
    gradients.fused = None
    gradients.backward(operands, Results(out, torch.zeros(query.shape[:3])), Cotangents(out))
