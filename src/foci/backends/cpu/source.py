"""Plan to translation unit: the generated struct, and which kernel of the headers it is given to."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, Final

import torch

from foci.backends.cpu.classes import add_classes, added_loads
from foci.backends.cpu.functor import ELEMENT_TYPES, Functor
from foci.backends.cpu.sites import add_sites, find_sites
from foci.ir.derivative import score_derivative
from foci.ir.expr import DType, Expr, const, load, variable
from foci.ir.ops import apply
from foci.problem import Problem
from foci.variant import Capture, Variant

__all__ = ["backward_source", "forward_source"]


def _with_blocks(variant: Variant, block_size: tuple[int, int]) -> tuple[Expr, Capture]:
    """The mask that a caller's blocks and the mask function make together, reading the classes as one more capture."""
    slot = len(variant.captures)
    q, kv = (apply("floordiv", variable(name), size) for name, size in zip(("q_idx", "kv_idx"), block_size, strict=True))
    block_class = load(slot, (variable("b"), variable("h"), q, kv), DType.INT32)
    partial = apply("and", apply("eq", block_class, 1), variant.mask)
    return apply("or", apply("eq", block_class, 2), partial), Capture(torch.int8, 4)


class Parts:
    """The parts that all sources of a problem share: score, mask including the caller's blocks, and all captured tensors."""

    def __init__(self, problem: Problem) -> None:
        variant, block_size = problem.variant, problem.formula.block_size
        self.score = variant.score
        self.mask = variant.mask
        self.captures = variant.captures
        if block_size is not None:
            self.mask, capture = _with_blocks(variant, block_size)
            self.captures = (*variant.captures, capture)

    @property
    def is_masked(self) -> bool:
        """Whether any tile may be empty."""
        return self.mask is not const(True) or bool(added_loads(self.score))

    @property
    def is_plain_score(self) -> bool:
        """Whether the score function changes nothing."""
        return self.score is variable("score")


def _constants(problem: Problem, parts: Parts) -> list[str]:
    return [
        f"typedef {ELEMENT_TYPES[problem.dtype]} Storage;",
        f"static constexpr int D = {problem.head_dim}, DV = {problem.value_dim};",
        f"static constexpr bool PLAIN_SCORE = {_bool(parts.is_plain_score)}, MASKED = {_bool(parts.is_masked)};",
        f"static constexpr bool DROPOUT = {_bool(problem.formula.dropout)};",
    ]


def _bool(value: bool) -> str:
    return "true" if value else "false"


def forward_source(problem: Problem) -> str:
    """The forward kernel of a problem."""
    return _forward_source(replace(problem, **_ANY_SIZE, **_NO_GRADIENT))


_EXPORTED: Final = 'extern "C" __attribute__((visibility("default")))'
_PARAMETERS: Final = "const foci::Call* call, const foci::Addresses* at, int threads"
# kernels do not depend on these: one source for all values
_ANY_SIZE: Final[dict[str, Any]] = {"q_heads": 1, "kv_heads": 1, "batch": 1, "q_len": 1, "kv_len": 1, "deterministic": False}
_NO_GRADIENT: Final[dict[str, Any]] = {"query_grad": False, "key_grad": False, "value_grad": False, "capture_grads": ()}


def backward_source(problem: Problem) -> str:
    """Source of the backward kernel. Gradients that are not needed are not computed."""
    return _backward_source(replace(problem, **_ANY_SIZE))


@functools.lru_cache(maxsize=256)
def _backward_source(problem: Problem) -> str:
    parts = Parts(problem)
    functor = Functor(parts.captures)
    sites = find_sites(parts.score, problem.capture_grads)
    slope = score_derivative(parts.score)
    element = "const Call& call, const Row& row, const Col& col"
    functor.function(
        f"static FOCI_INLINE vf derive({element}, vf s, int kv, vf& slope)",
        (parts.score, slope),
        "slope = wide({1}); return wide({0});",
    )
    functor.function(f"static FOCI_INLINE vb mask({element}, int kv)", (parts.mask,), "return wide({0});")
    if sites:
        add_sites(functor, sites)
    add_classes(functor, parts.mask, parts.score)
    grads = [
        f"GRAD_{letter} = {_bool(on)}" for letter, on in zip("QKV", (problem.query_grad, problem.key_grad, problem.value_grad), strict=True)
    ]
    constants = [
        *_constants(problem, parts),
        f"static constexpr bool {', '.join(grads)}, COLUMN_SUMS = {_bool(problem.formula.outputs.column_sums)};",
        f"static constexpr int SITES = {len(sites)};",
        f"static constexpr bool UNIT_SLOPE = {_bool(slope is const(1.0))};",
    ]
    return _unit("interval.h backward.h", [*constants, functor.text()], {"foci_backward": "foci::backward<Plan>"})


@functools.lru_cache(maxsize=256)
def _forward_source(problem: Problem) -> str:
    parts = Parts(problem)
    functor = Functor(parts.captures)
    functor.function(
        "static FOCI_INLINE vf score(const Call& call, const Row& row, const Col& col, vf s, int kv)", (parts.score,), "return wide({0});"
    )
    functor.function(
        "static FOCI_INLINE vb mask(const Call& call, const Row& row, const Col& col, int kv)", (parts.mask,), "return wide({0});"
    )
    add_classes(functor, parts.mask, parts.score)
    entries = {"foci_forward": "foci::forward<Plan>"}
    if problem.formula.outputs.column_sums:
        entries["foci_columns"] = "foci::columns<Plan>"
    return _unit("interval.h decode.h columns.h", [*_constants(problem, parts), functor.text()], entries)


def _unit(headers: str, members: list[str], entries: dict[str, str]) -> str:
    body = "\n".join(members).replace("\n", "\n  ")
    lines = [
        *(f'#include "foci/{header}"' for header in headers.split()),
        "",
        "namespace {",
        "using namespace foci;",
        "",
        "struct Plan {",
        f"  {body}",
        "};",
        "",
        "}  // namespace",
        "",
        *(
            f"{_EXPORTED} int {name}({_PARAMETERS}) {{ return {function}(bound(call, at, threads)); }}"
            for name, function in entries.items()
        ),
        "",
    ]
    return "\n".join(lines)
