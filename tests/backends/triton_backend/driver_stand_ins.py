"""Stand-ins for NVIDIA's driver, and for the C functions under Triton's launcher: both note launches alike."""

import ctypes
import gc
import re
from types import SimpleNamespace

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.compiler.compiler import CompiledKernel

from foci.compat.triton import release

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
        self.launches, self.loaded, self.maps, self.errors, self.unloaded = [], [], [], [], []
        self.most_threads = 1024
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
        return 0

    def cuDeviceGetAttribute(self, value, attribute, device):
        assert attribute == 97
        value._obj.value = SHARED
        return 0

    def cuModuleLoadData(self, module, binary):
        self.loaded.append(of_binary(binary))
        module._obj.value = len(self.loaded)
        return 0

    def cuModuleUnload(self, module):
        self.unloaded.append(module.value)
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
        value._obj.value = self.most_threads
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
