"""What the tests of recognition share: a spelling of attention, its run under the backend, and the comparison with eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

import foci
from foci.fusion import Compiler
from foci.fusion.fake_values import with_values
from foci.fusion.verify import Float64
from summed_terms import record_bias_terms

BATCH, HEADS, DIM = 2, 4, 8
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
# A few times what eager loses, and units in the last place of the largest value.
FACTOR = {torch.float32: 10.0, torch.bfloat16: 4.0, torch.float16: 4.0}
ULPS = {torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 7 * sum(shape)))


def qkv(length: int, batch: int = BATCH, heads: int = HEADS, dim: int = DIM) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, S, D], three times."""
    return draw(batch, heads, length, dim, seed=1), draw(batch, heads, length, dim, seed=2), draw(batch, heads, length, dim, seed=3)


def hidden(length: int, batch: int = BATCH) -> tuple[Tensor]:
    """[B, S, H * D]."""
    return (draw(batch, length, HEADS * DIM, seed=4),)


def lengths_mask(length: int, batch: int = BATCH) -> Tensor:
    """[B, S], True for tokens; each row has some."""
    keep = torch.arange(length) < torch.tensor([length - 3 * n - 1 for n in range(batch)])[:, None]
    return keep.contiguous()


@dataclass(frozen=True)
class Spelling:
    """Attention as somebody writes it, and a near twin that is something else.

    Attributes:
        name: of the spelling.
        run: a function of tensors, or a class of module without arguments.
        inputs: of (length, batch).
        twin: the same with one small change, after which no site may be fused, or only `twin_fused`.
        why: a word of the reason that the twin's report gives; None where nothing like attention is left to report.
        fused: how many sites there are, all of them fused.
        variant: words that the printed expression has.
        reason: for a spelling that is declined as documented, a word of its reason.
        dtypes: all that it is written for.
        grows: whether it takes another length without a new compilation.
        trains_on_cpu: whether eager torch has a backward for it on the CPU.
    """

    name: str
    run: Any
    inputs: Callable[..., tuple[Any, ...]]
    twin: Any = None
    why: str | None = None
    fused: int = 1
    variant: tuple[str, ...] = ()
    reason: str | None = None
    dtypes: tuple[torch.dtype, ...] = FLOATS
    grows: bool = True
    twin_fused: int = 0
    trains_on_cpu: bool = True


def built(run: Any) -> Callable[..., Any]:
    """The function itself, or a module of the class with fixed parameters."""
    if not isinstance(run, type):
        return run
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return run()


def cast(inputs: tuple[Any, ...], dtype: torch.dtype, device: str = "cpu", *, grad: bool = False) -> tuple[Any, ...]:
    def one(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        moved = value.to(device, dtype) if value.is_floating_point() else value.to(device)
        return moved.detach().clone().requires_grad_(grad and moved.is_floating_point())

    return tuple(one(value) for value in inputs)


@dataclass
class Counted:
    """A backend that counts the graphs it compiled."""

    backend: Any
    graphs: int = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled = self.backend(*args, **kwargs)
        self.graphs += 1
        return compiled


def fused_only(graph_module: torch.fx.GraphModule, example_inputs: Any) -> Any:
    """A backend that runs the fused graph as it is, under ordinary autograd: a tenth of the time of a compilation."""
    fusion = foci.fusion.fuse(graph_module, example_inputs)
    foci.fusion.report.tell(fusion.sites)
    return fusion.graph_module


def compiled(function: Callable[..., Any], *, dynamic: bool | None = None, backend: Any = None) -> tuple[Callable[..., Any], Counted]:
    torch._dynamo.reset()
    counted = Counted(Compiler(rest="eager") if backend is None else backend)
    # one length: those who call this are asked for lengths
    return torch.compile(function, backend=counted, dynamic=dynamic, fullgraph=True), counted


def results(function: Callable[..., Any], inputs: tuple[Any, ...], *, backward: bool) -> dict[str, Tensor]:
    """Floating outputs, and the gradients of all floating inputs and parameters."""
    outputs = [t for t in torch.utils._pytree.tree_leaves(function(*inputs)) if isinstance(t, Tensor) and t.is_floating_point()]
    tensors = {f"output {n}": t.detach() for n, t in enumerate(outputs)}
    if backward:
        leaves = {f"grad {n}": t for n, t in enumerate(inputs) if isinstance(t, Tensor) and t.requires_grad}
        if isinstance(function, nn.Module):
            leaves |= {f"grad {name.removeprefix('_orig_mod.')}": p for name, p in function.named_parameters() if p.requires_grad}
        flowing = [t for t in outputs if t.requires_grad]
        cotangents = [draw(*t.shape, seed=5).to(t) for t in flowing]
        gradients = torch.autograd.grad(flowing, list(leaves.values()), cotangents, allow_unused=True)
        tensors |= {name: g for name, g in zip(leaves, gradients) if g is not None}
    return tensors


def exact_results(function: Callable[..., Any], inputs: tuple[Any, ...], *, backward: bool) -> tuple[dict[str, Tensor], dict[str, float]]:
    """In float64, whatever the program says, of the very same numbers; and the largest terms of the gradients of biases."""
    wide = copy.deepcopy(function).double() if isinstance(function, nn.Module) else function
    with Float64(), record_bias_terms(wide if isinstance(wide, nn.Module) else nn.Module()) as terms:
        exact = results(wide, cast(inputs, torch.float64, _device(inputs), grad=backward), backward=backward)
    return exact, {f"grad {name}": term for name, term in terms.items()}


def _device(inputs: tuple[Any, ...]) -> str:
    return next(t.device.type for t in inputs if isinstance(t, Tensor))


def distance(actual: Tensor, exact: Tensor) -> float:
    counted = torch.isfinite(exact) & (exact.abs() < 1e30)
    apart = torch.where(counted, (actual.double() - exact.double()).abs(), 0.0).nan_to_num(nan=torch.inf)
    return float(apart.max()) if apart.numel() else 0.0


def assert_equal(
    actual: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype, terms: dict[str, float]
) -> None:
    """Each result within the budget: a few times what eager is off from float64, plus rounding of the largest element or term."""
    assert actual.keys() == plain.keys() == exact.keys()
    for name, value in actual.items():
        assert value.shape == plain[name].shape, f"{name}: {tuple(value.shape)}, eager {tuple(plain[name].shape)}"
        assert value.dtype == plain[name].dtype, f"{name}: {value.dtype}, eager {plain[name].dtype}"
        finite = exact[name][torch.isfinite(exact[name]) & (exact[name].abs() < 1e30)]
        largest = max(float(finite.abs().max()) if finite.numel() else 0.0, terms.get(name, 0.0))
        of_plain = distance(plain[name], exact[name])
        budget = FACTOR[dtype] * of_plain + ULPS[dtype] * torch.finfo(dtype).eps * largest + 1e-12
        off = distance(value, exact[name])
        assert off <= budget, f"{name}: off by {off:.3g}, eager by {of_plain:.3g}, budget {budget:.3g}"


def compare(function: Callable[..., Any], inputs: tuple[Any, ...], dtype: torch.dtype, run: Callable[..., Any], *, backward: bool) -> None:
    """Runs eager, float64 and the compiled function on the same numbers."""
    device = _device(inputs)
    inputs = cast(inputs, dtype, device)
    actual = results(run, cast(inputs, dtype, device, grad=backward), backward=backward)
    plain = results(function, cast(inputs, dtype, device, grad=backward), backward=backward)
    exact, terms = exact_results(function, inputs, backward=backward)
    assert_equal(actual, plain, exact, dtype, terms)


def sites_of(function: Callable[..., Any], inputs: tuple[Any, ...], **options: Any) -> list[foci.fusion.Site]:
    run, _ = compiled(function, **options)
    with foci.observe() as log:
        run(*inputs)
    return log.fusions


def graph_of(function, *tensors):
    """The graph of a function of tensors, each node with an example value."""

    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    tracer = fx.Tracer()
    root = Module()
    names = [f"x{n}" for n in range(len(tensors))]
    space = {"f": function}
    exec(f"def forward(self, {', '.join(names)}):\n    return f({', '.join(names)})", space)
    Module.forward = space["forward"]
    graph = tracer.trace(root)
    module = fx.GraphModule(root, graph)
    with_values(module, tensors)
    return module


def dynamo_graph_of(function, *tensors):
    """The same as Dynamo makes it, with what the function creates itself."""
    torch._dynamo.reset()
    modules = []

    def keep(module, inputs):
        modules.append(module)
        return module.forward

    # one length: it only makes a graph
    torch.compile(lambda *args: (function(*args), args[0].sum())[0], backend=keep, fullgraph=True)(*tensors)
    return modules[0]
