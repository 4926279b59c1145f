"""Stand-ins for kernels, which note what they are launched with; passes to launch."""

import ctypes
import os
from pathlib import Path

import pytest
import torch

import foci
from foci import cache_check, call_cache, execution, masks, planner, scores, weak_cache
from foci.backends.contract import Given, Plan
from foci.problem import Cotangents, Formula, Gradients, Operands, Problem, Program, Results, Target

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)

from launched import LAUNCHED
from triton.runtime.jit import JITFunction

from foci.backends.gpu import launch_builder, mend_launches, portable_passes, tile_tables
from foci.backends.gpu.symbolic_tokens import Count
from foci.backends.gpu.tensor_descriptors import packed_dims
from foci.backends.triton.kernel import build_kernel
from foci.compat.triton import COMPILE_OPTIONS

MODULES = {module: LAUNCHED[module] for module in (portable_passes, mend_launches, tile_tables)}


class Compiled:
    """Stands in for a compiled kernel: notes what its launcher is given."""

    packed_metadata = (4, 1, 0)
    function = 7

    def __init__(self, name, launched, count, options=()):
        self.name, self.launched, self.count, self.options = name, launched, count, options

    def run(self, x, y, z, stream, function, metadata, *rest):
        assert rest[:3] == (None, None, None)
        assert len(rest[3:]) == self.count
        assert_plain((x, y, z, rest[3:]))
        self.launched.append((self.name, (x, y, z), flat(rest[3:]) + self.options))


class Noted(tuple):
    """A launch, with what it was given: while a log keeps it, no other tensor is allocated where a temporary one lay. `is_launch`: whether
    Triton launches it; else it compiles it alone."""

    arguments: tuple
    is_launch: bool


class Function:
    """Stands in for a kernel: notes what Triton is given to launch or to compile, and compiles to a `Compiled`, which notes its launches.
    Options such as num_warps follow the arguments. `asked`: what Triton is given to compile alone, in `worked_out` unless it is given."""

    def __init__(self, function, worked_out, launched, asked=None):
        self.signature, self.name = function.signature, function.__name__
        self.worked_out, self.launched, self.compiled = worked_out, launched, {}
        self.asked = worked_out if asked is None else asked

    def __getitem__(self, grid):
        return lambda *args, **options: self.noted(self.worked_out, grid, args, options, is_launch=True)

    def warmup(self, *args, grid, **options):
        return self.noted(self.asked, grid, args, options, is_launch=False)

    def noted(self, log, grid, args, options, *, is_launch):
        assert_plain((grid, args))
        bound = self.signature.bind(*args)
        bound.apply_defaults()
        chosen = tuple(sorted(options.items()))
        noted = Noted((self.name, (*grid, 1, 1)[:3], flat(tuple(bound.arguments.values())) + chosen))
        noted.arguments, noted.is_launch = args, is_launch
        log.append(noted)
        if chosen not in self.compiled:
            self.compiled[chosen] = Compiled(self.name, self.launched, len(self.signature.parameters), chosen)
        return self.compiled[chosen]


def is_described(value):
    """Whether it is a tensor descriptor, of Triton or of Gluon."""
    return type(value).__name__ == "TensorDescriptor"


def assert_plain(value):
    """Triton knows int, and nothing that is one besides; launchers take such for longer."""
    assert not isinstance(value, int) or type(value) in (int, bool)
    for part in value if isinstance(value, (tuple, list)) else value.shape if is_described(value) else ():
        assert_plain(part)


def flat(value):
    if isinstance(value, (tuple, list)):
        return tuple(map(flat, value))
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    if is_described(value):
        return (value.base.data_ptr(), *value.shape, *value.strides, *value.block_shape)
    return value


def put_stand_ins(monkeypatch):
    """In place of the kernels, with nothing kept from before: what was worked out, and what was launched at once."""
    worked_out, launched = [], []
    replace_kernels(monkeypatch, lambda function: Function(function, worked_out, launched), MODULES)
    forget_launches(monkeypatch)
    return worked_out, launched


def replace_kernels(monkeypatch, stand_in, modules=LAUNCHED):
    """stand_in(kernel) in place of each kernel of the backend triton that these modules launch."""
    monkeypatch.setattr(cache_check, "ENABLED", False)  # stand-ins compute nothing that a second launch could be compared with
    monkeypatch.setattr(launch_builder, "make_launch", NotedLaunch)
    monkeypatch.setattr(launch_builder, "compile_and_load", load_stand_in)
    for module, names in modules.items():
        for name in names:
            monkeypatch.setattr(module, name, stand_in(getattr(module, name)))


def replace_hopper_kernels(monkeypatch, stand_in):
    """The same of all kernels of the backend hopper, where its Gluon is installed."""
    for host in ("forward_pass", "backward_pass"):
        module = pytest.importorskip(f"foci.backends.hopper.{host}")
        for name, function in list(vars(module).items()):
            if isinstance(function, JITFunction):
                monkeypatch.setattr(module, name, stand_in(function))


def forget_launches(monkeypatch):
    """Empties the cache of what was computed from tensors; a call whose launches are kept has its own."""
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())


class NotedLaunch:
    """In place of `launch_builder.make_launch` and the launch that it makes: the arguments of each launch are those that Triton would be given,
    tensors as addresses, descriptors as `flat` has them."""

    maps = ()

    def __init__(self, compiled, grid, stream, args, find, *, between=False):
        self.compiled, self.place, self.between = compiled, ((*grid, 1, 1)[:3], stream), between
        self.args = self.without_tensors(args, find)

    def without_tensors(self, value, find):
        """Functions of (tokens, kept, addresses) in place of what a launch fills in, and of tuples."""
        if isinstance(value, tuple):
            parts = [self.without_tensors(part, find) for part in value]
            return lambda *known: tuple([part(*known) for part in parts])
        if isinstance(value, torch.Tensor):
            place = find(value)
            if isinstance(place, str):
                return lambda tokens, kept, addresses: eval(place, {"t": tokens, "k": kept})
            return lambda tokens, kept, addresses: addresses[place]
        if is_described(value):
            place, rest = find(value.base), (*value.shape, *value.strides, *value.block_shape)
            numbers = self.without_tensors(rest, find)
            return lambda tokens, kept, addresses: (addresses[place], *numbers(tokens, kept, addresses))
        if isinstance(value, Count):
            return lambda tokens, kept, addresses: value.of(tokens)
        return lambda *known: value

    def bound(self, tokens, kept, maps):
        (grid, stream), compiled = self.place, self.compiled
        x, y, z = (n.of(tokens) if isinstance(n, Count) else n for n in grid)

        def launch(addresses):
            arguments = self.args(tokens, kept, addresses)
            compiled.run(x, y, z, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)

        return launch


def load_stand_in(function, grid, args, options):
    """In place of `load_kernel.compile_and_load`, for stand-ins that compile to a `Compiled`."""
    compiled = function.warmup(*args, grid=grid, **COMPILE_OPTIONS, **options)
    return compiled if hasattr(compiled, "packed_metadata") else None


def plan_for_a_gpu(monkeypatch, arch=90, *features):
    """Calls of tensors on the CPU are planned for a GPU, with nothing kept from before, and launch by address."""
    monkeypatch.setitem(planner._targets, torch.device("cpu"), Target("cuda", arch, frozenset({"triton", *features})))
    for module, name in ((execution, "_plans"), (call_cache, "_calls")):
        monkeypatch.setattr(module, name, type(getattr(module, name))())


def build_attention(operands, variant, **formula):
    q, k = operands.query, operands.key
    grads = tuple(False for _ in operands.captures)
    asked = Problem(
        Formula(variant, **formula), q.dtype, q.shape[3], q.shape[3], q.shape[1], k.shape[1], q.shape[0], q.shape[2], k.shape[2],
        True, True, True, grads,
    )  # fmt: skip
    return build_kernel(Plan("triton", asked, Target("cuda", 90, frozenset({"triton"}))))


def operands_of(bound, *, lengths=(256, 256), heads=4, offsets=None, step=8, seed=None, program=None):
    q, k, v = (
        torch.zeros(1 if offsets is not None else 2, n, heads, 64, dtype=torch.bfloat16).transpose(1, 2) for n in (*lengths, lengths[1])
    )
    jagged = {} if offsets is None else {"cu_q": offsets, "cu_kv": offsets, "max_q": 200, "max_kv": 200}
    jagged["program"] = program or Program()
    return Operands(q, k, v, bound.captures, bound.ints, bound.floats, 0.125, 0.1 if seed is not None else 0.0, seed, **jagged)


def run_forward(attention, operands):
    """The forward of a kernel as foci runs it: launched again, or built."""
    tensors = attention.launch_forward(operands.program, operands.tensors, operands.optional)
    return attention.forward(operands) if tensors is None else Results(*tensors)


def run_backward(attention, operands, results, dout):
    """The backward likewise."""
    grad_inputs = Given(results.out, results.lse, dout)
    tensors = attention.launch_backward(operands.program, operands.tensors, operands.optional, grad_inputs)
    return attention.backward(operands, results, Cotangents(dout)) if tensors is None else Gradients(*tensors)


def addressed(log, tensors):
    """Launches with the addresses of tensors replaced by their numbers: two passes then compare equal."""
    numbers = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}

    def replaced(value):
        return tuple(map(replaced, value)) if isinstance(value, tuple) else numbers.get(value, value)

    return [replaced(entry) for entry in log]


def flatten(arguments):
    """Arguments of a launch without their nesting."""
    return [leaf for part in arguments for leaf in flatten(part)] if isinstance(arguments, tuple) else [arguments]


def first_address():
    """Where the heap begins: far below 4 GiB in a Python that is linked to a fixed place, such as Debian's."""
    maps = Path("/proc/self/maps")
    heaps = [line for line in maps.read_text().splitlines() if line.endswith("[heap]")] if maps.exists() else []
    return int(heaps[0].partition("-")[0], 16) if heaps else 1 << 32


FIRST_ADDRESS = first_address()
heap_end = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_ssize_t)(("sbrk", ctypes.CDLL(None)))
SIZES_OF_PACKED = packed_dims(0, 0, (0, 0))[0]  # in descriptors


def is_address(value):
    """Whether an argument of a kernel is an address."""
    if type(value) is not int:
        return False
    return value >= 1 << 32 or (FIRST_ADDRESS <= value < heap_end(0) and value not in SIZES_OF_PACKED)


def placed(log, tensors):
    """Launches with addresses within tensors as these' numbers and distances; those of what only the pass reads differ from run to run."""

    def plain(value):
        if isinstance(value, tuple):
            return tuple(map(plain, value))
        if not is_address(value):
            return value
        inside = [(n, value - t.data_ptr()) for n, t in enumerate(tensors) if 0 <= value - t.data_ptr() < t.nbytes]
        return inside[0] if inside else "elsewhere"

    return list(map(plain, log))


SLOPES = torch.rand(4)

DOCUMENTS = torch.arange(256) // 50

VARIANTS = {
    "plain": (None, None, {}),
    "causal": (None, masks.causal(), {}),
    "alibi": (scores.alibi(SLOPES), masks.causal(), {}),
    "document": (None, foci.Mask(lambda b, h, q, k, ids=DOCUMENTS: ids[q] == ids[k]), {}),
    "decode": (None, None, {"lengths": (1, 4096)}),
    "split": (None, masks.causal_lower_right(), {"lengths": (128, 4096)}),
    "jagged": (None, masks.causal(), {"offsets": torch.tensor([0, 56, 256])}),
    "dropout": (None, None, {"seed": torch.tensor([1])}),
}


def packed_call(q, k, v, offsets, **options):
    return foci.varlen_attn(q, k, v, offsets, offsets, 200, 200, **options)


def leaves(*, packed=False, wanted=(True, True, True)):
    shape = (256, 4, 64) if packed else (2, 256, 4, 64)
    tensors = [torch.zeros(shape, dtype=torch.bfloat16).requires_grad_(on) for on in wanted]
    return tensors if packed else [t.detach().transpose(1, 2).requires_grad_(on) for t, on in zip(tensors, wanted, strict=True)]


OFFSETS, USED = torch.tensor([0, 56, 256]), torch.tensor([50, 190])
