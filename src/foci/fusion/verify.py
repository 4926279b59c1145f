"""The self-check: a fused graph against the original, outputs and gradients, within the error budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor, fx

from foci.compat.fake import is_fake_tensor
from foci.compat.fx import tree_map
from foci.compat.torch import OperatorMode
from foci.fusion.fusion_report import Fused

__all__ = ["Float64", "VerificationError", "verify"]

_LOW: Final = (torch.float16, torch.bfloat16, torch.float32)
# How many times the original graph's own error a fused one may have, in half precision and in full.
_HALF_FACTOR: Final = 4.0
_FULL_FACTOR: Final = 10.0
_ULPS: Final = 64.0


class VerificationError(RuntimeError):
    """A fused graph whose results differ from the original's by more than rounding."""


class Float64(OperatorMode):  # type: ignore[misc]
    """Inside, every floating point operation is one of float64, whatever dtypes the program names."""

    supports_higher_order_operators = True  # flex_attention is one

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*tree_map(_wide, args), **tree_map(_wide, kwargs or {}))


def _wide(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return torch.float64 if value in _LOW else value
    return value.double() if isinstance(value, Tensor) and value.dtype in _LOW else value


def verify(original: fx.GraphModule, fused: Fused, example_inputs: Sequence[Any]) -> None:
    """Runs both graphs on copies of the example inputs.

    The original also runs in float64, so that its own rounding error is known: the fused graph may have a few times that.
    A graph that draws random numbers cannot be compared and passes unchecked, as does one whose inputs have no values.

    Raises:
        VerificationError: naming the result and the sites.
    """
    if not any(site.fused for site in fused.sites) or not _has_values(example_inputs) or _is_random(original):
        return
    exact = _results(original, example_inputs, wide=True)
    plain = _results(original, example_inputs)
    fused_results = _results(fused.graph_module, example_inputs)
    coarsest = max((torch.finfo(t.dtype).eps for t in example_inputs if isinstance(t, Tensor) and t.is_floating_point()), default=0.0)
    for name, value in fused_results.items():
        excess = _excess(value, plain[name], exact[name], coarsest)
        if excess is not None:
            places = ", ".join(site.location or "unknown" for site in fused.sites if site.fused)
            raise VerificationError(f"{name} of the fused graph is {excess}; fused sites: {places}")


def _has_values(inputs: Sequence[Any]) -> bool:
    return not any(is_fake_tensor(t) or (isinstance(t, Tensor) and t.is_meta) for t in inputs)


def _is_random(graph_module: fx.GraphModule) -> bool:
    """Whether two runs from different states of the generators may differ: foci and torch draw dropout in different orders."""
    return any(_draws(node) for node in graph_module.graph.nodes)


def _draws(node: fx.Node) -> bool:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if name == "scaled_dot_product_attention":
        p = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        return bool(p != 0.0)
    if "dropout" in name:
        p = node.args[1] if len(node.args) > 1 else node.kwargs.get("p", 0.5)
        training = node.args[2] if len(node.args) > 2 else node.kwargs.get("training", True)
        return bool(training and p != 0.0)
    return any(word in name for word in ("bernoulli", "rand", "normal_", "multinomial", "uniform_"))


def _concrete(value: Any, wide: bool) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.hint
    if not isinstance(value, Tensor):
        return value
    copy = value.detach().clone()
    if wide and copy.dtype in _LOW:
        copy = copy.double()
    return copy.requires_grad_(value.requires_grad)


def _results(graph_module: fx.GraphModule, example_inputs: Sequence[Any], *, wide: bool = False) -> dict[str, Tensor]:
    """Floating point outputs, and the gradients of all inputs that want one for cotangents that depend on nothing but shapes."""
    inputs = [_concrete(value, wide) for value in example_inputs]
    run: Callable[..., Any] = graph_module
    with torch.random.fork_rng(devices=[]):
        if wide:
            with Float64():
                outputs = list(_tensors(run(*inputs)))
        else:
            outputs = list(_tensors(run(*inputs)))
        results = {f"output {n}": t.detach() for n, t in enumerate(outputs)}
        leaves = {f"the gradient of input {n}": t for n, t in enumerate(inputs) if isinstance(t, Tensor) and t.requires_grad}
        flowing = [t for t in outputs if t.requires_grad]
        if leaves and flowing:
            generator = torch.Generator().manual_seed(0)
            cotangents = [torch.randn(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t) for t in flowing]
            gradients = torch.autograd.grad(flowing, list(leaves.values()), cotangents, allow_unused=True)
            results.update({name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(leaves.items(), gradients)})
    return results


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _excess(fused: Tensor, plain: Tensor, exact: Tensor, coarsest: float) -> str | None:
    """In words, how far a result is beyond its budget, or None."""
    if fused.shape != plain.shape or fused.dtype != plain.dtype:
        return f"{tuple(fused.shape)} {fused.dtype}, the original {tuple(plain.shape)} {plain.dtype}"
    if not fused.numel():
        return None
    eps = torch.finfo(fused.dtype).eps
    rounding = max(eps, coarsest / 16)
    factor = _HALF_FACTOR if coarsest > torch.finfo(torch.float32).eps else _FULL_FACTOR
    finite = exact[torch.isfinite(exact)]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    of_plain, distance = _distance(plain, exact), _distance(fused, exact)
    budget = factor * of_plain + _ULPS * rounding * largest + 1e-30
    return None if distance <= budget else f"off by {distance:.3g}, the original by {of_plain:.3g}, the budget {budget:.3g}"


def _distance(value: Tensor, exact: Tensor) -> float:
    """The largest difference; what float64 alone can hold, or what is no number there, does not count."""
    value, exact = value.double(), exact.double()
    counted = torch.isfinite(exact) & (exact.abs() < 1e30)
    return float(torch.where(counted, (value - exact).abs(), 0.0).nan_to_num(nan=torch.inf).max())
