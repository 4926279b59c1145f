"""What the gradient of a bias sums: rounding is a share of the terms, also where their sum is zero in exact arithmetic.

A softmax does not change when all scores of a row do, so that the bias of a key projection has no gradient: eager and fused models both
return the rounding of its terms, and neither is closer to zero than the other by more than chance.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def record_bias_terms(model: nn.Module) -> Iterator[dict[str, float]]:
    """Fills a dict with the largest term of each bias's gradient, by the bias's name, as backward passes run.

    The terms are the rows of the gradient of what the bias's module returns.
    """
    terms: dict[str, float] = {}

    def watch(name: str) -> Any:
        def record(grad: Tensor) -> None:
            terms[name] = max(terms.get(name, 0.0), float(grad.abs().max()) if grad.numel() else 0.0)

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, Tensor) and output.requires_grad:
                output.register_hook(record)

        return hook

    owners = [(name, module) for name, module in model.named_modules() if isinstance(module._parameters.get("bias"), Tensor)]
    handles = [module.register_forward_hook(watch(f"{name}.bias".lstrip("."))) for name, module in owners]
    try:
        yield terms
    finally:
        for handle in handles:
            handle.remove()
