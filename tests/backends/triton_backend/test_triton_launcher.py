"""NVIDIA's driver is given by foci what Triton's own launcher gives it. No GPU is needed: stand-ins take the place of the driver, and of the C
functions under Triton's launcher; compiler, `JITFunction` and launcher are Triton's."""

import ctypes
import gc
import os
import re
import threading
import warnings
from types import SimpleNamespace

import pytest
import torch

from foci import masks, scores, weak_cache
from foci.backends.contract import Plan
from foci.compat.triton import TESTED, defer_driver, release
from foci.problem import Formula, Layout, Operands, Outputs, Problem, Program, Target
from foci.trace_functions import bind

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)
if release() not in TESTED:
    pytest.skip("foci does not know how this release's own launcher is asked", allow_module_level=True)

from kernel_stand_ins import run_backward, run_forward  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler.compiler import CompiledKernel  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from foci.backends.gpu import (  # noqa: E402
    cuda_driver,
    kernel,
    launch_builder,
    layernorm,
    load_kernel,
    stream_state,
    tile_tables,
)  # fmt: skip
from foci.backends.hopper.kernel import build_kernel as build_hopper_kernel  # noqa: E402
from foci.backends.triton.kernel import build_kernel  # noqa: E402

STREAM = 4711
SHARED = 232448
OLD_DRIVER, NEW_DRIVER = 12080, 13020


def of_binary(binary):
    """What Triton's object of a compiled kernel says; it keeps that object from nothing."""
    compiled = next(each for each in gc.get_objects() if type(each) is CompiledKernel and getattr(each, "kernel", None) is binary)
    return SimpleNamespace(metadata=compiled.metadata, signature=compiled.src.signature, ptx=compiled.asm["ptx"])


class TritonDriver(nvidia.CudaDriver):
    """Stands in for Triton's driver of a GPU: notes launches as (name, grid, threads, shared memory, switches, parameters)."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self):
        self.launches, self.loaded = [], []
        self.utils = SimpleNamespace(
            launch=self.launch,
            load_binary=self.load,
            unload_module=lambda module: None,
            get_device_properties=lambda device: {"max_shared_mem": SHARED},
            fill_tma_descriptor=self.describe,  # 3.6
            fill_tma_descriptor_tiled=self.describe,
            build_signature_metadata=tuple,
        )

    def launch(self, x, y, z, stream, function, cooperative, dependent, *rest):
        assert stream == STREAM
        compiled = self.loaded[function - 1]
        metadata = compiled.metadata
        if release() == (3, 6):
            arguments = rest[6:]
        else:
            *_, arguments = rest
        switches = (bool(cooperative), bool(dependent))
        parameters = [*of_signature(arguments, expanded(compiled))]
        self.launches.append((metadata.name, (x, y, z), 32 * metadata.num_warps, metadata.shared, switches, parameters))

    def load(self, name, binary, shared, device):
        self.loaded.append(of_binary(binary))
        return None, len(self.loaded), 32, 0, 1024

    def describe(self, address, swizzle, item_bytes, dtype, tile, shape, strides, padding):
        assert padding == 0
        return (address, dtype, [*shape], [item_bytes * step for step in strides[:-1]], [*tile], swizzle)

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return STREAM


def expanded(compiled):
    """Types of the arguments of Triton's C functions, which take a descriptor as a map, lengths and strides."""
    for kind in compiled.signature.values():
        if isinstance(kind, str) and kind.startswith("tensordesc"):
            rank = re.search(r"\[([^]]*)\]", kind)[1].count(",") + 1
            yield from ("map", *["i32"] * rank, *["i64"] * rank)
        else:
            yield kind


def of_signature(arguments, kinds):
    """The parameters among arguments, as numbers."""
    for value, kind in zip(arguments, kinds, strict=True):
        if isinstance(kind, tuple):
            yield from of_signature(value, kind)
        elif kind == "fp32":
            yield ctypes.c_float(value).value
        elif kind != "constexpr":
            yield value.data_ptr() if isinstance(value, torch.Tensor) else value


class Cuda:
    """Stands in for NVIDIA's driver, whose functions read and write memory: notes launches as `TritonDriver` does. `errors`: what the next
    launches return."""

    def __init__(self, version=NEW_DRIVER):
        self.version = version
        self.launches, self.loaded, self.maps, self.errors, self.entered = [], [], [], [], []
        self.context, self.spare = 1, 0

        def launch(config, function, pointers, extra):
            assert extra is None
            return self.launch(config, function, pointers)

        self.cuLaunchKernelEx = launch  # a function, so that it takes attributes

    def cuCtxGetCurrent(self, context):
        context._obj.value = self.context
        return 0

    def cuDeviceGet(self, number, device):
        number._obj.value = device
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):
        context._obj.value = 77
        return 0

    def cuCtxSetCurrent(self, context):
        self.context = context.value
        self.entered.append(threading.current_thread())
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute == 97
        value._obj.value = SHARED
        return 0

    def cuModuleLoadData(self, module, binary):
        self.loaded.append(of_binary(binary))
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleGetFunction(self, function, module, name):
        assert name.decode() == self.loaded[module.value - 1].metadata.name
        function._obj.value = module.value
        return 0

    def cuFuncSetCacheConfig(self, function, config):
        return 0

    def cuFuncSetAttribute(self, function, attribute, value):
        assert (attribute, value) == (8, self.loaded[function.value - 1].metadata.shared)
        return 0

    def cuFuncGetAttribute(self, value, attribute, function):
        value._obj.value = 1024
        return 0

    def cuFuncGetParamInfo(self, function, number, offset, size):
        sizes = ptx_sizes(self.loaded[function.value - 1])
        if number.value >= len(sizes):
            return 1
        size._obj.value = sizes[number.value] + self.spare
        return 0

    def cuDriverGetVersion(self, version):
        version._obj.value = self.version
        return 0

    def cuGetErrorString(self, error, text):
        text._obj.value = b"out of everything"
        return 0

    def cuTensorMapEncodeTiled(self, place, dtype, rank, address, shape, strides, tile, ones, interleave, swizzle, promotion, fill):
        assert place.value % 64 == 0
        assert ([*ones], interleave.value, promotion.value, fill.value) == ([1] * rank.value, 0, 2, 0)
        self.maps.append((address.value, dtype.value, shape[::-1], strides[: rank.value - 1][::-1], tile[::-1], swizzle.value))
        ctypes.memset(place.value, 0xFF, 128)
        ctypes.c_uint64.from_address(place.value).value = len(self.maps)
        return 0

    def launch(self, config, function, pointers):
        if self.errors and (error := self.errors.pop(0)):
            return error
        grid, threads = (c_uint3.from_address(config + at) for at in (0, 12))
        assert [*threads][1:] == [1, 1]
        (shared,), (stream, attributes) = (ctypes.c_uint * 1).from_address(config + 24), (ctypes.c_uint64 * 2).from_address(config + 32)
        assert stream == STREAM
        on = set()
        for n in range(ctypes.c_uint.from_address(config + 48).value):
            assert ctypes.c_int.from_address(attributes + 72 * n + 8).value == 1
            on.add(ctypes.c_int.from_address(attributes + 72 * n).value)
        compiled = self.loaded[function - 1]
        parameters = [*self.parameters(compiled, pointers)]
        assert parameters[-2:] == [0, 0], "scratch memory"
        switches = (2 in on, 6 in on)
        assert on <= {2, 6}
        self.launches.append((compiled.metadata.name, (*grid,), threads[0], shared, switches, parameters[:-2]))
        return 0

    def parameters(self, compiled, pointers):
        kinds = [kind for kind in flat_kinds(expanded(compiled)) if kind != "constexpr"]
        for n, (kind, size) in enumerate(zip([*kinds, "*", "*"], ptx_sizes(compiled), strict=True)):
            place = ctypes.c_uint64.from_address(pointers + 8 * n).value
            content = ctypes.string_at(place, size)
            if kind == "map":
                yield self.maps[int.from_bytes(content[:8], "little") - 1]
            elif kind == "fp32":
                yield ctypes.c_float.from_buffer_copy(content).value
            else:
                yield int.from_bytes(content, "little", signed=not kind.startswith("*"))


c_uint3 = ctypes.c_uint * 3


def flat_kinds(kinds):
    for kind in kinds:
        yield from flat_kinds(kind) if isinstance(kind, tuple) else (kind,)


def ptx_sizes(compiled):
    """Bytes of each parameter of the kernel in PTX."""
    entry = compiled.ptx.partition(".entry")[2].partition(")")[0]
    found = re.findall(r"\.param(?: \.align \d+)? \.[a-z](\d+)[^\n]*?(?:\[(\d+)\])?,?\n", entry)
    return [int(count or 1) * int(bits) // 8 for bits, count in found]


@pytest.fixture
def cuda(monkeypatch):
    """The driver's stand-in."""
    stand_in = Cuda()
    monkeypatch.setattr(cuda_driver, "_driver", lambda: stand_in)
    monkeypatch.setattr(cuda_driver, "_launch", lambda: stand_in.cuLaunchKernelEx)
    monkeypatch.setattr(cuda_driver, "_version", lambda: stand_in.version)
    monkeypatch.setattr(load_kernel, "current_device", lambda: 0)
    return stand_in


@pytest.fixture
def driver(monkeypatch, cuda):
    """The stand-in for Triton's driver, for kernels that nothing knows from before."""
    stand_in, active = TritonDriver(), triton.runtime.driver
    before = active.__dict__.copy()
    active.set_active(stand_in)
    if release() == (3, 6):  # its launcher is a C module compiled for each kernel
        monkeypatch.setattr(nvidia, "library_dirs", list)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **options: SimpleNamespace(launch=stand_in.launch))
    # set by the C code that a real driver loads
    for name, value in (("PyKernelArg", SimpleNamespace), ("ARG_CONSTEXPR", 0), ("ARG_KERNEL", 1), ("ARG_TUPLE", 2)):
        monkeypatch.setattr(nvidia, name, value, raising=False)
    for module in (kernel, tile_tables, launch_builder):
        monkeypatch.setattr(module, "current_stream", lambda tensor: STREAM)
    monkeypatch.setattr(stream_state, "free_stream_on", lambda device: STREAM)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
    monkeypatch.setattr(load_kernel, "_loaded", type(load_kernel._loaded)())
    yield stand_in
    forget_compiled()
    for value in gc.get_objects():
        if issubclass(type(value), CompiledKernel):
            value.module = None  # whatever still holds it has nothing to unload
    active.__dict__.clear()
    active.__dict__.update(before)


def forget_compiled():
    """Triton keeps no compiled kernel in memory."""
    for value in gc.get_objects():
        if issubclass(type(value), JITFunction):
            value.device_caches.clear()
    gc.collect()


CASES = {
    "causal": {"mask": masks.causal()},
    "alibi": {"score": scores.alibi(torch.rand(2)), "mask": masks.causal()},
    "jagged": {"mask": masks.causal(), "cu": torch.tensor([0, 56, 256])},
}


def posed(name, make, *, grads):
    case = CASES[name]
    bound, cu = bind(case.get("score"), case.get("mask"), torch.device("cpu")), case.get("cu")
    tensors = [torch.zeros(1 if cu is not None else 2, 256, 2, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    packed = {} if cu is None else {"cu_q": cu, "cu_kv": cu, "max_q": 200, "max_kv": 200}
    packed["program"] = Program()
    operands = Operands(*tensors, bound.captures, bound.ints, bound.floats, 0.125, 0.0, None, **packed)
    formula = Formula(bound.variant, Layout.DENSE if cu is None else Layout.JAGGED, Outputs(lse=True))
    captures = (False,) * len(bound.captures)
    asked = Problem(formula, torch.bfloat16, 64, 64, 2, 2, 2, 256, 256, grads, grads, grads, captures)
    return make(Plan("any", asked, Target("cuda", 90, frozenset({"triton"})))), operands


def numbered(launches, tensors):
    """Launches with the numbers of tensors in place of addresses, which differ from run to run."""
    numbers = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}

    def replaced(value):
        if isinstance(value, (tuple, list)):
            return tuple(map(replaced, value))
        return numbers.get(value, "elsewhere" if type(value) is int and value > 1 << 40 and value != 1 << 63 else value)

    return [replaced(launch) for launch in launches]


TABLES = ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences")  # made once


# NOW-02
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "grads"),
    [("causal", build_kernel, True), ("alibi", build_kernel, False), ("jagged", build_kernel, False)]
    + [("causal", build_hopper_kernel, True), ("jagged", build_hopper_kernel, False)],
    ids=lambda value: getattr(value, "__name__", value) if not isinstance(value, bool) else "backward" if value else "forward",
)
def test_the_driver_is_given_what_triton_gives_it(driver, cuda, name, make, grads, monkeypatch):
    attention, operands = posed(name, make, grads=grads)

    def run(tensors):
        results = run_forward(attention, tensors)
        all_tensors = [tensors.query, tensors.key, tensors.value, results.out, results.lse, *tensors.captures]
        if grads:
            dout = torch.zeros_like(results.out)
            gradients = run_backward(attention, tensors, results, dout)
            all_tensors += [dout, gradients.query, gradients.key, gradients.value]
        return all_tensors

    kept = [run(operands)]
    first = [*cuda.launches]
    kept.append(run(operands))
    second = cuda.launches[len(first) :]
    assert not driver.launches
    first = [launch for launch in first if launch[0] not in TABLES]
    monkeypatch.setattr(stream_state, "free_stream_on", lambda device: None)
    monkeypatch.setattr(launch_builder, "has_launch_hooks", lambda: True)
    kept.append(run(operands))
    assert len(cuda.launches) == len(first) + len(second) + len([launch for launch in cuda.launches if launch[0] in TABLES])
    wanted = [launch for launch in driver.launches if launch[0] not in TABLES]
    assert wanted
    expected = numbered(wanted, kept[2])
    assert numbered(first, kept[0]) == expected
    assert numbered(second, kept[1]) == expected
    assert cuda.maps


# NOW-02
@pytest.mark.slow
def test_row_kernels_give_the_driver_what_triton_gives_it(driver, cuda, monkeypatch):
    config = layernorm.kernels.NormConfig(*map(tl.constexpr, (64, 64, 4, False, False, False, True, True)))
    tensors = [torch.zeros(64, 64, dtype=torch.bfloat16) for _ in range(6)]
    numbers = (64, 1, 1e-5)

    def launched(times):
        row_kernel = layernorm._Kernel(layernorm.kernels.norm_sum, (torch.bfloat16,) * 6, (1, 0, 1e-5), {"c": config}, 4)
        for _ in range(times):
            row_kernel.launch(0, STREAM, 3, tensors, numbers)

    launched(2)
    assert not driver.launches
    monkeypatch.setattr(cuda_driver, "is_there", lambda: False)
    load_kernel._loaded.clear()
    launched(1)
    first, second = cuda.launches
    assert first == second == driver.launches[0]


# NOW-02
@pytest.mark.slow
def test_a_kernel_stays_loaded_as_long_as_it_may_be_launched_again(driver, cuda):
    attention, operands = posed("causal", build_kernel, grads=False)
    attention.forward(operands)
    forget_compiled()
    loaded = len(cuda.loaded)
    attention.forward(operands)
    assert len(cuda.loaded) == loaded, "the second call launches what the first one loaded"


@pytest.mark.slow
def test_what_the_driver_refuses(driver, cuda):
    attention, operands = posed("causal", build_kernel, grads=False)
    run_forward(attention, operands)
    count = len(cuda.launches)
    cuda.errors[:] = [700]
    with pytest.raises(cuda_driver.CudaError, match=r"cannot launch a kernel: out of everything \(CUDA error 700\)"):
        run_forward(attention, operands)
    assert len(cuda.launches) == count


@pytest.mark.slow
def test_a_thread_without_a_context_gets_one(driver, cuda, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    attention, operands = posed("causal", build_kernel, grads=False)
    run_forward(attention, operands)
    cuda.launches.clear()
    cuda.context, cuda.errors[:] = None, [201]
    run_forward(attention, operands)
    assert [launch[0] for launch in cuda.launches] == ["attention_forward", "mend_rows"]
    assert cuda.context == 77


@pytest.mark.slow
@pytest.mark.parametrize("case", ["other parameters", "old driver"])
def test_triton_launches_what_foci_cannot(driver, cuda, case, monkeypatch):
    if case == "old driver":
        monkeypatch.setattr(cuda_driver, "is_there", lambda: False)
    cuda.spare = 8 if case == "other parameters" else 0
    attention, operands = posed("causal", build_kernel, grads=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            run_forward(attention, operands)
    assert not cuda.launches
    assert [launch[0] for launch in driver.launches if launch[0] not in TABLES] == ["attention_forward", "mend_rows"] * 2
    assert any("so Triton launches them" in str(each.message) for each in said) == (case == "other parameters")


@pytest.mark.slow
def test_a_device_with_too_little_shared_memory(driver, cuda, monkeypatch):
    monkeypatch.setattr(cuda_driver, "shared_memory", lambda device: 1000)
    attention, operands = posed("causal", build_kernel, grads=False)
    with pytest.raises(OutOfResources, match="shared memory"):
        run_forward(attention, operands)
    assert "attention_forward" not in {launch[0] for launch in cuda.launches}


@pytest.mark.parametrize(("rows", "version", "is_marked"), [(64, OLD_DRIVER, False), (2048, OLD_DRIVER, True), (64, NEW_DRIVER, True)])
def test_old_drivers_mark_small_tensors_wrongly(cuda, rows, version, is_marked):
    cuda.version = version
    made = cuda_driver.encode_tiles(4096, 9, 2, (rows, 64), (64, 1), (16, 64), 3)
    assert bool(ctypes.c_uint64.from_address(made.address + 8).value >> 21 & 1) == is_marked
    assert cuda.maps == [(4096, 9, [rows, 64], [128], [16, 64], 3)]


def test_numbers_become_their_bits():
    for kind, number, wanted in (
        ("fp32", 0.125, 0x3E000000),
        ("fp32", -2.0, 0xC0000000),
        ("fp64", 1.0, 0x3FF0000000000000),
        ("fp16", 1.0, 0x3C00),
    ):
        assert load_kernel.bits(kind, number) == wanted


# START-02
@pytest.mark.slow
def test_a_driver_of_somebody_else_is_left_to_triton(driver, cuda):
    """As where kernels are compiled without a GPU, with tensors on the CPU."""
    launched = []

    class Launcher:
        def __init__(self, *_):
            pass

        def __call__(self, *args):
            launched.append(args)

    utils = SimpleNamespace(load_binary=driver.load, get_device_properties=driver.utils.get_device_properties)
    same = {name: getattr(driver, name) for name in ("get_current_target", "get_current_device", "get_current_stream")}
    triton.runtime.driver.set_active(SimpleNamespace(launcher_cls=Launcher, utils=utils, **same))
    attention, operands = posed("causal", build_kernel, grads=False)
    run_forward(attention, operands)
    assert launched
    assert not cuda.loaded


# START-02
def test_triton_compiles_its_driver_when_it_launches(monkeypatch):
    built = []
    monkeypatch.setattr(nvidia, "CudaUtils", lambda: built.append(1) or SimpleNamespace(load_binary=None))
    active = triton.runtime.driver
    before = active.__dict__.copy()
    try:
        active._active = active._default = None
        defer_driver()
        ours = active.active
        assert isinstance(ours, nvidia.CudaDriver)
        assert callable(ours.get_current_stream)
        assert not built
        assert ours.launcher_cls is nvidia.CudaLauncher
        assert ours.utils.load_binary is None
        assert built == [1]
        defer_driver()
        assert active.active is ours
    finally:
        active.__dict__.update(before)
