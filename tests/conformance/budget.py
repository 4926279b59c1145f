"""How far from float64 a backend may be: a factor of what the plain formula loses in the same dtype, plus rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from foci.backends.sequences import coordinates, narrow, pack, sequences
from foci.blocks import FULL, PARTIAL
from foci.dropout import keep
from foci.ir.eager import Env, evaluate
from foci.problem import Formula, Layout, Operands, Results, accumulation_dtype

HALF_FACTORS = {"query": 2.5, "key": 4.0, "value": 4.0, "captures": 4.0}
HALF_FORWARD = 1.1
FULL_FACTOR = 10.0
# Units in the last place of the largest result that rounding alone may cost.
FLOOR = {torch.float16: 1.0, torch.bfloat16: 1.0, torch.float32: 32.0, torch.float64: 64.0}


def factor(name: str, dtype: torch.dtype) -> float:
    """How many times the plain formula's error a result may have; names as in `Results` and `Gradients`."""
    return HALF_FACTORS.get(name, HALF_FORWARD) if dtype in (torch.float16, torch.bfloat16) else FULL_FACTOR


def error(actual: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; infinite where one is NaN or only one is infinite."""
    actual, exact = actual.double(), exact.double()
    same = (actual == exact) | ~(torch.isfinite(exact) | torch.isfinite(actual)) & (actual == exact)
    distance = torch.where(same, 0.0, (actual - exact).abs()).nan_to_num(nan=torch.inf)
    return float(distance.max()) if distance.numel() else 0.0


def check(
    name: str, dtype: torch.dtype, actual: Tensor, plain: Tensor, exact: Tensor, lse: Tensor | None = None, terms: Tensor | None = None
) -> None:
    """Asserts that `found` is within budget.

    Args:
        name: of the result.
        dtype: of the problem.
        found: what the backend returned.
        plain: what the plain formula gives in the same dtype.
        exact: what it gives in float64.
        lse: of a gradient, the logsumexp: weights that are rebuilt from it carry its rounding, which grows with the scores.
        terms: of a gradient, what is summed to it, before differences are taken: rounding is a share of that, also where the sum is zero.
    """
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    finite = exact[torch.isfinite(exact)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    if terms is not None and terms.numel():
        largest = max(largest, float(terms.abs().max()))
    # Sums kept in float32 next to half inputs need not be better than a sixteenth of the inputs' rounding.
    rounding = max(torch.finfo(actual.dtype).eps, torch.finfo(dtype).eps / 16)
    floor = FLOOR[dtype] * rounding * largest + 1e-30
    if lse is not None:
        size = lse.abs().nan_to_num(posinf=0.0)
        floor += 4 * torch.finfo(accumulation_dtype(dtype)).eps * (float(size.max()) if size.numel() else 0.0) * largest
    budget = factor(name, dtype) * error(plain, exact) + floor
    distance = error(actual, exact)
    assert distance <= budget, f"{name}: off by {distance:.3g}, plain formula by {error(plain, exact):.3g}, budget {budget:.3g}"


def plain(operands: Operands, formula: Formula) -> Results:
    """What a user would write: products, softmax and weights in the inputs' dtype, functions in float32."""
    if formula.layout is Layout.DENSE:
        return _plain(operands, formula, sequences(operands, formula.layout)[0])
    parts = [(s, _plain(narrow(operands, s), formula, s)) for s in sequences(operands, formula.layout)]
    return pack(operands, formula.outputs, parts)


def _plain(operands: Operands, formula: Formula, sequence) -> Results:
    query, acc = operands.query, accumulation_dtype(operands.query.dtype)
    groups = query.shape[1] // max(1, operands.key.shape[1])
    key, value = (t.repeat_interleave(groups, dim=1) for t in (operands.key, operands.value))
    at = coordinates(sequence, query.shape[0], query.shape[1], query.device)
    raw = ((query @ key.mT) * operands.scale).to(acc)
    env = Env({**at, "score": raw}, operands.captures, operands.ints, operands.floats, acc)
    score, mask = evaluate((formula.variant.score, formula.variant.mask), env)
    if formula.block_size is not None:
        rows, columns = (at[name].flatten() // size for name, size in zip(("q_idx", "kv_idx"), formula.block_size))
        classes = operands.blocks[:, :, rows][..., columns]
        mask = (classes == FULL) | ((classes == PARTIAL) & mask)
    score = torch.where(mask, score.expand(raw.shape), -torch.inf).to(query.dtype)
    some = (score > -torch.inf).any(-1)
    weights = torch.where(some[..., None], torch.softmax(torch.where(some[..., None], score, 0.0), dim=-1), 0.0)
    dropped = weights
    if formula.dropout:
        p = operands.dropout_p
        kept = keep(operands.seed, p, at["b"], at["h"], at["q_idx"], at["kv_idx"])
        dropped = torch.where(kept, weights / (1 - p if p < 1 else 1), 0.0)
    return Results(
        out=dropped @ value,
        lse=torch.where(some, torch.logsumexp(torch.where(some[..., None], score, 0.0).to(acc), dim=-1), -torch.inf),
        row_max=score.amax(-1).to(acc) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf, dtype=acc),
        column_sums=weights.to(acc).sum(2),
        weights=weights,
    )
