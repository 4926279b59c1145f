"""What `foci explain` prints: the planner's verdicts on a problem given as numbers and words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text

import foci
from foci.cli.expr_parser import Unknown, given_for, read_mask, read_score
from foci.ir.text import to_infix
from foci.mask_examples import Sizes
from foci.planner import Decision
from foci.trace_functions import bind

__all__ = ["Question", "explain_question", "explained", "verdicts_table"]


@dataclass(frozen=True)
class Question:
    """A call of `foci.attention`, its tensors as sizes and its functions as words (see `foci.cli.expr_parser`)."""

    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    value_dim: int
    dtype: str
    device: str
    mask: str | None
    score: str | None
    dropout_p: float
    train: bool


def explain_question(question: Question) -> foci.Explanation:
    """Return what foci says of the call.

    Raises:
        Unknown: for words that name no mask or score, and for what `foci.attention` would refuse.
    """
    mask, score = _functions(question)
    try:
        return foci.explain(*_tensors(question), mask=mask, score=score, dropout_p=question.dropout_p)
    except (TypeError, ValueError) as error:
        raise Unknown(str(error), "--kv-heads" if question.q_heads % question.kv_heads else None) from error


def explained(question: Question) -> Group:
    """The two functions as foci sees them, with the numbers they carry, and each backend's verdict.

    Raises:
        Unknown: for words that name no mask or score.
    """
    explanation = explain_question(question)
    mask, score = _functions(question)
    bound = bind(score, mask, torch.device(question.device))
    numbers = [
        *(f"i{slot} = {value}" for slot, value in enumerate(bound.ints)),
        *(f"f{slot} = {value}" for slot, value in enumerate(bound.floats)),
    ]
    lines = Text()
    for name, words in (("score", to_infix(bound.variant.score)), ("mask", to_infix(bound.variant.mask)), ("where", ", ".join(numbers))):
        if words:
            lines.append(f"{name:<6}", style="bold")
            lines.append(f"{words}\n")
    notes = [Text(f"note: {note}", style="yellow") for note in explanation.notes]
    return Group(lines, verdicts_table(explanation.decision), *notes)


def _functions(question: Question) -> tuple[foci.Mask | None, foci.Score | None]:
    sizes = Sizes(question.batch, question.q_heads, question.kv_heads, question.q_len, question.kv_len, question.head_dim)
    with given_for("--mask"):
        mask = None if question.mask is None else read_mask(question.mask, sizes)
    with given_for("--score"):
        return mask, None if question.score is None else read_score(question.score, sizes)


def _tensors(question: Question) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dtype, device = getattr(torch, question.dtype), torch.device(question.device)
    shapes = (
        (question.q_heads, question.q_len, question.head_dim),
        (question.kv_heads, question.kv_len, question.head_dim),
        (question.kv_heads, question.kv_len, question.value_dim),
    )
    # One element each, expanded: the planner asks for sizes, never for values.
    query, key, value = (torch.zeros((), dtype=dtype, device=device).expand(question.batch, *shape) for shape in shapes)
    if question.train:
        query, key, value = (t.detach().requires_grad_() for t in (query, key, value))
    return query, key, value


def verdicts_table(decision: Decision) -> Table:
    """One row per backend, in the registry's order: whether it runs; its estimate, and what it says of how it would run, or its reason."""
    table = Table("backend", "verdict", "why")
    for verdict in decision.verdicts:
        if verdict.reason is not None:
            table.add_row(verdict.backend, Text("no", "red"), verdict.reason)
            continue
        runs = decision.plan is not None and decision.plan.backend == verdict.backend
        estimate = f"{'the least estimate,' if runs else 'estimate'} {_milliseconds(verdict.cost)}"
        table.add_row(
            verdict.backend, Text("runs", "green") if runs else "possible", f"{estimate}: {verdict.note}" if verdict.note else estimate
        )
    return table


def _milliseconds(cost: float) -> str:
    return f"{1e3 * cost:,.{0 if cost >= 0.1 else 2}f} ms"
