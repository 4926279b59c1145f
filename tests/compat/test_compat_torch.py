"""foci.compat.torch gives the same answers by private names and by public means, or the careful answer."""

# NOW-03

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from without import load_without

from foci.compat import torch as compat

public = load_without("torch", "torch.*")

QUESTIONS = ("are_transforms_open", "is_any_autocast_enabled", "is_forward_ad_open", "is_jit_tracing")
SWITCHES = ("is_math_sdp_enabled", "is_flash_sdp_enabled", "is_mem_efficient_sdp_enabled", "is_cudnn_sdp_enabled")
"""Where the answer must be the same."""


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def careful():
    """Questions that a module answers with yes, or with what it counts."""
    return {name: bool(getattr(compat, name)()) for name in (*QUESTIONS, "count_dispatch_modes", "count_function_modes")}


def test_nobody_looks_on():
    assert not any(careful().values())


@pytest.mark.parametrize(
    ("context", "question"),
    [
        (Functions, "count_function_modes"),
        (Operators, "count_dispatch_modes"),
        (lambda: torch.autocast("cpu", torch.bfloat16), "is_any_autocast_enabled"),
        (forward_ad.dual_level, "is_forward_ad_open"),
    ],
)
def test_who_looks_on_is_seen_by_either(context, question):
    with context():
        assert getattr(compat, question)()
        assert getattr(public, question)()
    assert not getattr(compat, question)()


def test_without_names_somebody_may_look_on():
    assert public.count_dispatch_modes() and public.count_function_modes() and public.are_transforms_open() and public.is_forward_ad_open()
    assert not public.is_any_autocast_enabled() and not public.is_jit_tracing()  # these are public


def test_tracing_is_seen_by_either():
    seen = []

    def function(x):
        seen.extend([compat.is_jit_tracing(), public.is_jit_tracing()])
        return x + 1

    torch.jit.trace(function, torch.zeros(2), check_trace=False)
    assert seen == [True, True]


@pytest.mark.parametrize("transform", [torch.func.grad, torch.vmap], ids=["grad", "vmap"])
def test_tensors_of_transforms_are_told_by_either(transform):
    seen = []

    def function(x):
        seen.extend([compat.is_transformed(x), public.is_transformed(x), compat.are_transforms_open()])
        seen.append([str(kind) for kind in compat.open_transforms((x,))] != [])
        seen.append(public.open_transforms((x,)) is None)
        return (x * x).sum()

    transform(function)(torch.ones(3, 2))
    assert all(seen) and len(seen) == 5
    plain = torch.ones(2)
    assert not compat.is_transformed(plain) and not public.is_transformed(plain)
    assert compat.open_transforms((plain,)) == public.open_transforms((plain,)) == []


def test_batches_of_gradients_are_told_by_either():
    seen = []

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            seen.append((compat.is_legacy_batched(grad), public.is_legacy_batched(grad)))
            return 2 * grad

    x = torch.ones(3, requires_grad=True)
    torch.autograd.grad(Doubled.apply(x), x, torch.eye(3), is_grads_batched=True)
    torch.autograd.grad(Doubled.apply(x).sum(), x)
    assert seen == [(True, True), (False, False)]


def test_tangents_are_told_by_either():
    with forward_ad.dual_level():
        primal = torch.ones(2)
        dual = forward_ad.make_dual(primal, torch.ones(2))
        for t, has in ((dual, True), (primal, False), (torch.arange(3), False)):
            assert compat.has_tangent(t) is public.has_tangent(t) is has
    assert not compat.has_tangent(torch.ones(2)) and not public.has_tangent(torch.ones(2))


def test_a_version_counts_or_is_never_the_same():
    x = torch.zeros(2)
    before = compat.version_of(x)
    assert compat.version_of(x) == before
    x.add_(1)
    assert compat.version_of(x) != before
    assert public.version_of(x) != public.version_of(x)
    assert (id(x), public.version_of(x)) != (id(x), public.version_of(x))


@pytest.mark.parametrize("name", SWITCHES)
def test_switches_of_sdpa(name):
    kernel = name.removeprefix("is_").removesuffix("_enabled")
    enable = getattr(torch.backends.cuda, f"enable_{kernel}")
    was = getattr(compat, name)()
    try:
        for on in (True, False):
            enable(on)
            assert getattr(compat, name)() is getattr(public, name)() is on
    finally:
        enable(was)


def test_functions_of_torch_are_seen_or_an_error_says_that_they_are_not():
    seen = []

    class Watched(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            seen.append(func)
            return NotImplemented if kwargs else torch.Tensor(1)

    x = torch.ones(1).as_subclass(Watched)
    with torch._C.DisableTorchFunction():
        torch.sin(x)
        assert not seen
        with compat.enabled_torch_function():
            torch.sin(x)
        assert len(seen) == 1
        with pytest.raises(RuntimeError, match="DisableTorchFunction"), public.enabled_torch_function():
            pass
    with public.enabled_torch_function():
        torch.sin(x)
    assert len(seen) == 2
    for module in (compat, public):
        with module.disabled_torch_function(), module.disabled_torch_function_subclass():
            torch.sin(torch.ones(1))


@pytest.mark.parametrize("module", [compat, public], ids=["private", "public"])
def test_autograd_inside_of_operators(module):
    def differentiated():
        x = torch.full((2,), 3.0).requires_grad_()
        return torch.autograd.grad((x * x).sum(), x)[0]

    library = torch.library.Library("foci_compat_test", "FRAGMENT")
    library.define("f(Tensor x) -> Tensor")
    library.impl("f", lambda x: x * module.with_autograd(differentiated), "CompositeExplicitAutograd")
    with torch.no_grad():
        torch.testing.assert_close(torch.ops.foci_compat_test.f(torch.ones(2)), torch.full((2,), 6.0))
    library._destroy()


@pytest.mark.parametrize("module", [compat, public], ids=["private", "public"])
def test_a_mode_of_operators(module):
    seen = []

    class Watch(module.OperatorMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Watch():
        torch.sin(torch.ones(2))
    assert len(seen) >= 1
