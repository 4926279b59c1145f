"""The plain formula with its S x S matrix, in any dtype and on any device: what every other backend is measured against.

    w = softmax(where(mask, score_fn(scale * q k^T), -inf)),    out = dropout(w) v

Sums are kept in float32, float64 for float64. Gradients are those of autograd through these lines. Excluded positions never contribute,
whatever they hold (`foci.backends.excluded`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foci.backends import excluded
from foci.backends.contract import Backend, Kernel, Plan
from foci.backends.paged_gather import Gathered, jagged_plan
from foci.backends.sequences import Sequence, coordinates, narrow, pack, sequences, shapeless_weights
from foci.blocks import FULL, PARTIAL
from foci.compat.torch import with_autograd
from foci.dropout import keep
from foci.ir.eager import Env, evaluate
from foci.problem import Cotangents, Formula, Gradients, Layout, Operands, Problem, Results, Target, accumulation_dtype, lay_out

__all__ = ["BACKEND", "attend", "formula"]


def formula(operands: Operands, formula: Formula, /) -> Results:
    """Attention as one composite of differentiable torch functions: no in-place writes, nothing cut from the graph.

    Usable under `torch.func` transforms, forward-mode AD and double backward. Takes B Hq Sq Skv elements of memory
    several times over.

    Args:
        operands: the call.
        formula: what to compute of it.

    Returns:
        The results, those not asked for None.
    """
    if formula.layout is Layout.DENSE:
        return attend(operands, formula, sequences(operands, formula.layout)[0])
    parts = [(s, attend(narrow(operands, s), formula, s)) for s in sequences(operands, formula.layout)]
    return pack(operands, formula.outputs, parts)


def attend(operands: Operands, formula: Formula, sequence: Sequence) -> Results:
    """The formula on one sequence, or on the whole batch of a dense call; the tensors hold its tokens alone."""
    query, acc, outputs = operands.query, accumulation_dtype(operands.query.dtype), formula.outputs
    groups = query.shape[1] // max(1, operands.key.shape[1])
    key, value = (t.to(acc).repeat_interleave(groups, dim=1) for t in (operands.key, operands.value))
    at = coordinates(sequence, query.shape[0], query.shape[1], query.device)
    shape = (*query.shape[:3], key.shape[2])
    allowed = _allowed(operands, formula, Env(at, operands.captures, operands.ints, operands.floats, acc))
    excludes = formula.block_size is not None or not formula.variant.is_plain
    raw = operands.scale * excluded.scores(query.to(acc), key, allowed if excludes else None)
    # Masked scores are set to 1 first, so that a score function singular there cannot turn a zero gradient into NaN.
    env = Env({**at, "score": torch.where(allowed, raw, 1.0)}, operands.captures, operands.ints, operands.floats, acc)
    (score,) = evaluate((formula.variant.score,), env)
    score = torch.where(allowed, score.expand(shape), -torch.inf)
    attended = score != -torch.inf if excludes else None
    if attended is not None:
        score = torch.where(attended, score, -torch.inf)  # no gradient passes where the score function gives -inf

    row_max = score.amax(-1) if score.shape[-1] else score.new_full(score.shape[:-1], -torch.inf)
    empty = row_max == -torch.inf
    exponentials = torch.exp(score - torch.where(empty, 0.0, row_max)[..., None])
    total = torch.where(empty, 1.0, exponentials.sum(-1))
    lse = torch.where(empty, -torch.inf, row_max + torch.log(total))
    weights = exponentials / total[..., None]
    if attended is not None:
        weights = torch.where(attended, weights, 0.0)
    kept = _dropped(operands, weights, at) if formula.dropout else weights
    out = excluded.weighted_values(kept, value, attended).to(query.dtype)
    return Results(
        out=lay_out(out, query),
        lse=lse,
        row_max=row_max if outputs.row_max else None,
        column_sums=weights.sum(2) if outputs.column_sums else None,
        weights=weights.to(query.dtype) if outputs.weights else None,
    )


def _allowed(operands: Operands, formula: Formula, env: Env) -> Tensor:
    (mask,) = evaluate((formula.variant.mask,), env)
    if formula.block_size is None:
        return mask
    assert operands.blocks is not None
    rows = env.variables["q_idx"].flatten() // formula.block_size[0]
    columns = env.variables["kv_idx"].flatten() // formula.block_size[1]
    classes = operands.blocks.index_select(2, rows).index_select(3, columns)
    return (classes == FULL) | ((classes == PARTIAL) & mask)


def _dropped(operands: Operands, weights: Tensor, at: dict[str, Tensor]) -> Tensor:
    assert operands.seed is not None
    p = operands.dropout_p
    kept = keep(operands.seed, p, at["b"], at["h"], at["q_idx"], at["kv_idx"])
    return torch.where(kept, weights * (0.0 if p >= 1 else 1 / (1 - p)), 0.0)


@dataclass(frozen=True)
class _Kernel(Kernel):
    problem: Problem

    def forward(self, operands: Operands, /) -> Results:
        return formula(operands, self.problem.formula)

    def backward(self, operands: Operands, results: Results, cotangents: Cotangents, /) -> Gradients:
        """Autograd through the formula, computed again."""
        asked = (self.problem.query_grad, self.problem.key_grad, self.problem.value_grad, *self.problem.capture_grads)

        def differentiate() -> Gradients:
            inputs = (operands.query, operands.key, operands.value, *operands.captures)
            leaves = [t.detach().requires_grad_(on) for t, on in zip(inputs, asked + (False,) * len(inputs), strict=False)]
            fresh = replace(operands, query=leaves[0], key=leaves[1], value=leaves[2], captures=tuple(leaves[3:]))
            again = formula(fresh, self.problem.formula)
            pairs = [(getattr(again, name), g) for name, g in vars(cotangents).items() if g is not None]
            pairs = [(output, g) for output, g in pairs if output.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            leaf_grads = torch.autograd.grad([o for o, _ in pairs], wanted, [g for _, g in pairs], materialize_grads=True) if pairs else ()
            grads = iter(leaf_grads if pairs else [torch.zeros_like(leaf) for leaf in wanted])
            gradients = [next(grads) if leaf.requires_grad else None for leaf in leaves]
            return Gradients(gradients[0], gradients[1], gradients[2], tuple(gradients[3:]))

        return with_autograd(differentiate)


class _Reference(Backend):
    name = "reference"

    def reject(self, problem: Problem, target: Target, /) -> str | None:
        return shapeless_weights(problem.formula)

    def cost(self, problem: Problem, target: Target, /) -> float:
        """Seconds: 1 ms, the flops at 20 GFLOP/s (2 TFLOP/s on an accelerator), and 20 passes over the S x S matrix at
        2 GB/s (100 GB/s), all of it three times with a backward.

        That is several times what is measured, a penalty for the memory it takes: the reference is chosen only when
        nothing else fits.
        """
        pairs = float(problem.batch) * problem.q_heads * problem.q_len * problem.kv_len
        flops, passes = (2e10, 2e9) if target.device == "cpu" else (2e12, 1e11)
        seconds = 1e-3 + problem.flops / flops + 20 * pairs * problem.dtype.itemsize / passes
        return 3 * seconds if problem.needs_backward else seconds

    def build(self, plan: Plan, /) -> Kernel:
        if plan.problem.formula.layout is Layout.PAGED:
            return Gathered(plan, _Kernel(jagged_plan(plan).problem))
        return _Kernel(plan.problem)


BACKEND = _Reference()
