"""NVIDIA's driver API: loads compiled kernels, describes tensors to the GPU's copy engine, and launches.

Triton's own way to these functions is C code that it compiles on each machine. The functions are public and their binary interface does
not change, so they are called here through ctypes, which needs no compiler. Names and numbers are those of the CUDA Driver API Reference,
13.0.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
import threading
from array import array
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, Final, NamedTuple

import torch

__all__ = [
    "MAP_BYTES", "CudaError", "Kernel", "Launch", "Shape", "TensorMap", "encode_tiles", "is_there", "load", "shared_memory", "unload",
]  # fmt: skip

MAP_BYTES: Final = 128
"""Size of a tensor map, which a kernel takes by value."""
_INVALID_VALUE: Final = 1
_INVALID_CONTEXT: Final = 201
_MAX_SHARED_OPTIN: Final = 97
"""Of the attributes of a device."""
_MAX_THREADS: Final = 0
"""Of the attributes of a function, as the next one."""
_MAX_DYNAMIC_SHARED: Final = 8
_PREFER_SHARED: Final = 1
_SHARED_BY_DEFAULT: Final = 48 * 1024
_COOPERATIVE: Final = 2
"""Of the attributes of a launch, as the next one."""
_PROGRAMMATIC_SERIALIZATION: Final = 6
_L2_PROMOTION_128_BYTES: Final = 2


class CudaError(RuntimeError):
    """The driver refused a call."""


_ATTRIBUTE: Final = struct.Struct("=i4xi60x")
"""CUlaunchAttribute, whose value here is one integer."""
_CONFIG: Final = struct.Struct("=7I4xQQI4x")
"""CUlaunchConfig, which says how to launch: grid, threads, bytes of shared memory, stream, address and number of attributes."""
_PROGRAMS: Final = struct.Struct("=I")
_STREAM: Final = struct.Struct("=Q")
_STREAM_AT: Final = 32


@functools.cache
def _driver() -> Any:
    """The library of the driver; None where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None


def is_there() -> bool:
    """Whether the driver is installed, and knows these functions: of CUDA 11.8 or later."""
    return _driver() is not None and hasattr(_driver(), "cuLaunchKernelEx")


def _check(error: int, what: str) -> None:
    if error:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(error, byref(text))
        raise CudaError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA error {error})")


class Kernel(NamedTuple):
    """A kernel that is loaded on a device, for as long as the process lives: CUDA graphs may launch it.

    Attributes:
        name: of the kernel.
        module, function: the driver's handles.
        parameters: bytes of each parameter; None where the driver does not tell, which is one from before CUDA 12.4.
        most_threads: that a program of it may have.
    """

    name: str
    module: int
    function: int
    parameters: tuple[int, ...] | None
    most_threads: int


def shared_memory(device: int) -> int:
    """The most bytes of shared memory that a program may ask for."""
    number, most = c_int(), c_int()
    _check(_driver().cuDeviceGet(byref(number), device), f"cannot use device {device}")
    _check(_driver().cuDeviceGetAttribute(byref(most), _MAX_SHARED_OPTIN, number), f"cannot ask how much shared memory device {device} has")
    return most.value


def load(device: int, binary: bytes, name: str, shared: int) -> Kernel:
    """Load a kernel.

    Args:
        device: which is the current one.
        binary: cubin with the kernel.
        name: of the kernel in it.
        shared: bytes of shared memory that its launches ask for, at most as many as the device has.

    Raises:
        CudaError: if the driver refuses.
    """
    cuda, module, function, threads = _driver(), c_void_p(), c_void_p(), c_int()
    _enter(device)
    _check(cuda.cuModuleLoadData(byref(module), binary), f"cannot load the kernel {name}")
    try:
        _check(cuda.cuModuleGetFunction(byref(function), module, name.encode()), f"cannot find the kernel {name} in its binary")
        if shared > _SHARED_BY_DEFAULT:
            _check(cuda.cuFuncSetCacheConfig(function, _PREFER_SHARED), f"cannot let the kernel {name} prefer shared memory")
            _check(
                cuda.cuFuncSetAttribute(function, _MAX_DYNAMIC_SHARED, shared), f"cannot give the kernel {name} {shared} B of shared memory"
            )
        _check(cuda.cuFuncGetAttribute(byref(threads), _MAX_THREADS, function), f"cannot ask how many threads the kernel {name} may have")
    except CudaError:
        cuda.cuModuleUnload(module)
        raise
    handle = function.value
    assert handle is not None, "the driver names each function"
    return Kernel(name, module.value or 0, handle, _parameters(function, name), threads.value)


def unload(kernel: Kernel) -> None:
    """Unload a kernel that was never launched."""
    _driver().cuModuleUnload(c_void_p(kernel.module))


def _parameters(function: c_void_p, name: str) -> tuple[int, ...] | None:
    """Bytes of each parameter. The driver refuses the one after the last as an invalid value."""
    if not hasattr(_driver(), "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = c_size_t(), c_size_t()
    while not (error := _driver().cuFuncGetParamInfo(function, c_size_t(len(sizes)), byref(offset), byref(size))):
        sizes.append(size.value)
    if error != _INVALID_VALUE:
        _check(error, f"cannot ask for the parameters of the kernel {name}")
    return tuple(sizes)


def _enter(device: int) -> None:
    """Give this thread the context of a device, unless it has one, as a thread has in which torch has used the device."""
    cuda, context = _driver(), c_void_p()
    _check(cuda.cuCtxGetCurrent(byref(context)), "cannot ask for the context")
    if context.value is None:
        number = c_int()
        _check(cuda.cuDeviceGet(byref(number), device), f"cannot use device {device}")
        _check(cuda.cuDevicePrimaryCtxRetain(byref(context), number), f"cannot use device {device}")
        _check(cuda.cuCtxSetCurrent(context), f"cannot use device {device}")


class TensorMap(int):
    """How tiles of a tensor are copied: the address of a CUtensorMap, valid as long as this object lives."""

    _memory: Any

    def __new__(cls) -> TensorMap:
        memory = (ctypes.c_char * (2 * MAP_BYTES))()
        start = ctypes.addressof(memory)
        made = super().__new__(cls, start + -start % MAP_BYTES)
        made._memory = memory
        return made


@functools.cache
def _version() -> int:
    version = c_int()
    _check(_driver().cuDriverGetVersion(byref(version)), "cannot ask for the driver's version")
    return version.value


def encode_tiles(
    address: int, dtype: int, item_bytes: int, shape: Sequence[int], strides: Sequence[int], tile: Sequence[int], swizzle: int
) -> TensorMap:
    """Describe a tensor whose tiles are copied to and from shared memory; what lies outside of it reads as zeros.

    Args:
        address: of the tensor.
        dtype: CUtensorMapDataType.
        item_bytes: of an element.
        shape, strides, tile: in elements; the last dimension is contiguous.
        swizzle: CUtensorMapSwizzle.

    Raises:
        CudaError: if the driver refuses.
    """
    rank, tensor_map = len(shape), TensorMap()
    lengths = (c_uint64 * rank)(*reversed(shape))
    steps = (c_uint64 * rank)(*[item_bytes * step for step in reversed(strides[:-1])])
    box, ones = (c_uint32 * rank)(*reversed(tile)), (c_uint32 * rank)(*[1] * rank)
    error = _driver().cuTensorMapEncodeTiled(
        c_void_p(tensor_map), c_int(dtype), c_uint32(rank), c_void_p(address), lengths, steps, box, ones, c_int(0), c_int(swizzle),
        c_int(_L2_PROMOTION_128_BYTES), c_int(0),
    )  # fmt: skip
    if error:
        layout = f"shape {tuple(shape)} and strides {tuple(strides)} at {address:#x} in tiles {tuple(tile)}"
        _check(error, f"cannot describe a tensor of {layout}, type {dtype}, swizzle {swizzle}")
    if _version() <= 13010 and item_bytes * sum((n - 1) * step for n, step in zip(shape, strides, strict=True)) < 128 * 1024:
        # drivers up to 13.1 set a flag that small tensors must not have; CUTLASS and Triton take it away too
        (c_uint64 * 2).from_address(tensor_map)[1] &= ~(1 << 21)
    return tensor_map


class Shape(NamedTuple):
    """Settings that all launches of a kernel have in common.

    Attributes:
        threads: of a program.
        shared: bytes of shared memory of a program.
        is_cooperative: all programs run at once.
        is_dependent: the kernel may start before the one before it in the stream has ended.
    """

    threads: int
    shared: int
    is_cooperative: bool
    is_dependent: bool


class Launch:
    """A launch of a kernel, in memory that the driver reads: whoever changes it holds `lock` until `run` has returned.

    Args:
        kernel: a loaded one.
        shape: of its launches.
        grid: number of programs in each direction.
        stream: of the launch.
        values: of the parameters: integers, or the bits of other numbers; 0 for an address or a tensor map that is filled in.

    Attributes:
        slots: the values.
        pointers: addresses of the parameters: of slots, until a tensor map takes a slot's place.
    """

    __slots__ = ("_attributes", "_call", "_config", "_name", "_run", "lock", "pointers", "slots")

    def __init__(self, kernel: Kernel, shape: Shape, grid: Sequence[int], stream: int, values: Sequence[int]) -> None:
        self._name = kernel.name
        self._attributes = attributes = _attributes(shape.is_cooperative, shape.is_dependent)
        address, count = attributes.buffer_info()[0] if attributes else 0, len(attributes) // _ATTRIBUTE.size
        config = _CONFIG.pack(*grid, shape.threads, 1, 1, shape.shared, stream, address, count)
        self._config = array("B", config)
        self.slots = _signed(values)
        start, length = self.slots.buffer_info()
        self.pointers = array("Q", struct.pack(f"={length}Q", *range(start, start + 8 * length, 8)))
        self.lock = threading.Lock()
        self._run, self._call = _launch(), (self._config.buffer_info()[0], kernel.function, self.pointers.buffer_info()[0], None)

    def move(self, programs: int, stream: int, values: Sequence[int]) -> None:
        """Change the number of programs, in the first direction, the stream, and the first values."""
        assert len(values) <= len(self.slots), "more would move the memory"
        _PROGRAMS.pack_into(self._config, 0, programs)
        _STREAM.pack_into(self._config, _STREAM_AT, stream)
        self.slots[: len(values)] = _signed(values)

    def run(self) -> None:
        """Launch the kernel with the values as they are.

        Raises:
            CudaError: if the driver refuses.
        """
        error = self._run(*self._call)
        if error:
            self.recover(error)

    @property
    def call(self) -> tuple[Callable[..., int], tuple[int, int, int, None]]:
        """The driver's function behind `run` and its arguments, for those to whom a call of Python counts. It returns an error for
        `recover`, or 0."""
        return self._run, self._call

    def recover(self, error: int) -> None:
        """Launch again, from a thread that had no context yet.

        Raises:
            CudaError: if that was not why, or the driver refuses again.
        """
        if error == _INVALID_CONTEXT:
            _enter(torch.cuda.current_device())
            error = self._run(*self._call)
        if error:
            *grid, threads, _, _, shared = _CONFIG.unpack(self._config)[:7]
            _check(error, f"cannot launch the kernel {self._name} in {grid} programs of {threads} threads and {shared} B of shared memory")


def _signed(values: Sequence[int]) -> array[int]:
    """Integers of 64 bits, those of the upper half as the negative ones of the same bits."""
    try:
        return array("q", values)
    except OverflowError:
        return array("q", [value - (1 << 64) if value >= 1 << 63 else value for value in values])


@functools.cache
def _attributes(is_cooperative: bool, is_dependent: bool) -> array[int]:
    switches = ((_PROGRAMMATIC_SERIALIZATION, is_dependent), (_COOPERATIVE, is_cooperative))
    return array("B", b"".join(_ATTRIBUTE.pack(number, 1) for number, is_on in switches if is_on))


@functools.cache
def _launch() -> Any:
    function = _driver().cuLaunchKernelEx
    function.argtypes = (c_void_p,) * 4
    return function
