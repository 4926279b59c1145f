"""torch.compile with foci: attention is recognised in Dynamo's graph, the rest goes to Inductor or runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, get_args

import torch
from torch import fx

from foci.fusion import inductor_backend, precompile, report, verify
from foci.fusion.fuse_pass import fuse
from foci.fusion.inductor_backend import Rest

__all__ = ["Compiler", "compile"]

_OWN: Final = ("verify", "rest")


@dataclass(frozen=True)
class Compiler:
    """A backend of torch.compile: fuses every attention of a graph and hands the rest on.

    Attributes:
        verify: compares each fused graph with the original on its first inputs before it is used.
        rest: who compiles what is not attention: "inductor", "eager", or "auto" for Inductor where the compiler it needs is there.
        mode: of torch.compile, for the rest.
        options: Inductor's, by name.

    torch.compile hands on its own `mode` and `options`; the latter may hold `verify` and `rest`, too.

    Raises:
        TypeError: for an argument or an option of another type.
        ValueError: for a mode, an option or a `rest` that does not exist.

    Example:
        >>> import foci, torch
        >>> from foci.fusion import Compiler
        >>> def attend(q, k, v):
        ...     return torch.softmax(q @ k.mT / 8, dim=-1) @ v
        >>> q = torch.randn(1, 2, 64, 64)
        >>> with foci.observe() as log:
        ...     out = torch.compile(attend, backend=Compiler(verify=True, rest="eager"))(q, q, q)
        >>> [site.fused for site in log.fusions]
        [True]
    """

    verify: bool = False
    rest: Rest = "auto"
    mode: str | None = None
    options: tuple[tuple[str, Any], ...] = field(default=())

    def __post_init__(self) -> None:
        _check_flag("verify", self.verify)
        if self.rest not in get_args(Rest):
            raise ValueError(f"rest must be one of {', '.join(get_args(Rest))}, not {self.rest!r}")
        if not isinstance(self.options, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in self.options):
            raise TypeError(f"options must be pairs of a name and a value; got {type(self.options).__name__}")
        for name, _ in self.options:
            if name in _OWN:
                raise ValueError(f"options: {name} is an argument of Compiler itself")
        inductor_backend.settings(self.mode, dict(self.options))

    @property
    def __name__(self) -> str:
        return "foci"

    def __call__(
        self,
        graph_module: fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        """The compiled graph.

        Raises:
            VerificationError: if `verify` finds a difference beyond rounding.
        """
        if mode is not None or options:
            return self._with(mode, dict(options or {}))(graph_module, example_inputs)
        inductor = (
            inductor_backend.settings(self.mode, dict(self.options)) if inductor_backend.is_inductor(self.rest, example_inputs) else None
        )
        if inductor is not None:
            inductor_backend.start_workers(example_inputs, inductor)
        fused = fuse(graph_module, example_inputs)
        if self.verify:
            verify.verify(graph_module, fused, example_inputs)
        finish = precompile.begin(fused.graph_module, inductor)
        try:
            compiled = inductor_backend.hand_over(fused.graph_module, example_inputs, inductor)
        finally:
            finish()
        report.tell(fused.sites)  # now: Dynamo may ask for a better graph by an exception from below, and call again
        return compiled

    def _with(self, mode: str | None, options: dict[str, Any]) -> Compiler:
        fields = {name: options.pop(name) for name in _OWN if name in options}
        merged = {**dict(self.options), **options}
        return replace(self, mode=self.mode if mode is None else mode, options=tuple(merged.items()), **fields)


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    verify: bool = False,
    rest: Rest = "auto",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """torch.compile, with every attention that can be recognised as one call of foci, in training and in inference.

    Args:
        model: a module or a function; without one, a decorator is returned.
        mode, dynamic, fullgraph: as in torch.compile.
        verify: compares each fused graph with the original on its first inputs: outputs and gradients, in the error budget.
        rest: who compiles what is not attention: "inductor", "eager", or "auto" for Inductor where the compiler it needs is there.
        options: Inductor's, by name; also `verify` and `rest`, which count for more than the arguments of these names.

    Returns:
        The compiled model, as torch.compile returns it.

    Raises:
        TypeError: for a model that cannot be called, and for an argument or an option of another type.
        ValueError: for a mode, an option or a `rest` that does not exist, at once.

    Example:
        >>> import foci, torch
        >>> class Attention(torch.nn.Module):
        ...     def forward(self, x):
        ...         scores = (x @ x.transpose(-2, -1)) * x.shape[-1] ** -0.5
        ...         return scores.softmax(-1) @ x
        >>> with foci.observe() as log:
        ...     out = foci.compile(Attention(), rest="eager")(torch.randn(2, 4, 64, 16))
        >>> log.fusions[0].fused
        True
    """
    if model is not None and not callable(model):
        raise TypeError(f"model must be a module or a function; got {type(model).__name__}")
    if dynamic is not None and not isinstance(dynamic, bool):
        raise TypeError(f"dynamic must be True, False or None; got {type(dynamic).__name__}")
    _check_flag("fullgraph", fullgraph)
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a mapping of names to values; got {type(options).__name__}")
    backend = Compiler(verify, rest, mode)._with(None, dict(options or {}))
    return torch.compile(model, backend=backend, dynamic=dynamic, fullgraph=fullgraph)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False; got {type(value).__name__}")
