"""NVIDIA's driver is given by foci what Triton's own launcher gives it. No GPU is needed: stand-ins take the place of the driver, and of the C
functions under Triton's launcher; compiler, `JITFunction` and launcher are Triton's."""

import ctypes
import gc
import os
import warnings
from types import SimpleNamespace

import pytest
import torch

import foci
from foci import masks, scores, weak_cache
from foci.backends.contract import Plan
from foci.compat.triton import TESTED, MapFacts, defer_driver, launch_facts, release
from foci.problem import Formula, Layout, Operands, Outputs, Problem, Program, Target
from foci.trace_functions import bind

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)
if release() not in TESTED:
    pytest.skip("foci does not know how this release's own launcher is asked", allow_module_level=True)

from driver_stand_ins import NEW_DRIVER, OLD_DRIVER, STREAM, Cuda, TritonDriver  # noqa: E402
from kernel_stand_ins import is_address, run_backward, run_forward  # noqa: E402
from triton import language as tl  # noqa: E402
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
    for name in ("_loaded", "_misfits"):
        monkeypatch.setattr(load_kernel, name, type(getattr(load_kernel, name))())
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
    with pytest.raises(
        cuda_driver.CudaError, match=r"kernel attention_forward in \[16, 1, 1\] programs of 128 .* out of everything \(CUDA error 700\)"
    ):
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
    load_kernel._warn.cache_clear()
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
def test_a_driver_that_tells_no_parameters_launches_kernels_of_known_releases(driver, cuda, monkeypatch):
    """As one from before CUDA 12.4."""
    monkeypatch.delattr(Cuda, "cuFuncGetParamInfo")
    attention, operands = posed("causal", build_kernel, grads=False)
    run_forward(attention, operands)
    assert not driver.launches
    assert [launch[0] for launch in cuda.launches if launch[0] not in TABLES] == ["attention_forward", "mend_rows"]


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
    assert bool(ctypes.c_uint64.from_address(made + 8).value >> 21 & 1) == is_marked
    assert cuda.maps == [(4096, 9, [rows, 64], [128], [16, 64], 3)]


def test_numbers_become_their_bits():
    for kind, number, wanted in (
        ("fp32", 0.125, 0x3E000000),
        ("fp32", -2.0, 0xC0000000),
        ("fp64", 1.0, 0x3FF0000000000000),
    ):
        assert load_kernel.bits(kind, number) % 2**32 == wanted % 2**32


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
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: True))
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


def test_numbers_too_large_for_their_type_are_infinities():
    assert load_kernel.bits("fp32", -1e300) & 0xFFFFFFFF == 0xFF800000
    assert load_kernel.bits("fp32", 1e300) == 0x7F800000


# START-02
@pytest.mark.slow
@pytest.mark.parametrize(
    "mask", [foci.Mask(lambda b, h, q, k: torch.where(q >= k, q * 1.0, -1e300) > -1e30), foci.Mask(lambda b, h, q, k: q - k < 2**61)],
    ids=["a float", "an integer"],
)  # fmt: skip
def test_large_numbers_reach_the_kernel(driver, cuda, mask, monkeypatch):
    monkeypatch.setitem(CASES, "large", {"mask": mask})
    attention, operands = posed("large", build_kernel, grads=False)
    run_forward(attention, operands)
    parameters = next(launch[-1] for launch in cuda.launches if launch[0] == "attention_forward")
    monkeypatch.setattr(stream_state, "free_stream_on", lambda device: None)
    monkeypatch.setattr(launch_builder, "has_launch_hooks", lambda: True)
    run_forward(attention, operands)
    wanted = next(launch[-1] for launch in driver.launches if launch[0] == "attention_forward")
    numbers = [(one, other) for one, other in zip(parameters, wanted, strict=True) if one != other and not isinstance(one, tuple)]
    assert all(is_address(one) or (one - other) % 2**64 == 0 for one, other in numbers)


# START-02
@pytest.mark.slow
def test_what_is_refused_is_not_kept_loaded(driver, cuda):
    cuda.most_threads = 16
    attention, operands = posed("causal", build_kernel, grads=False)
    with pytest.raises(OutOfResources, match="threads"):
        run_forward(attention, operands)
    assert cuda.loaded
    assert len(cuda.unloaded) == len(cuda.loaded)


# NOW-02
@pytest.mark.slow
def test_a_release_that_says_other_things_is_left_to_triton(driver, cuda, monkeypatch):
    load_kernel._warn.cache_clear()
    monkeypatch.setattr(load_kernel, "release", lambda: (3, 99))
    monkeypatch.setattr(load_kernel, "launch_facts", lambda compiled: None)
    attention, operands = posed("causal", build_kernel, grads=False)
    with pytest.warns(RuntimeWarning, match=r"Triton 3.99 says other things of its kernels than foci knows, so Triton launches them"):
        run_forward(attention, operands)
    assert driver.launches
    assert not cuda.loaded


def facts_of(**changed):
    """`launch_facts` of a kernel that says this."""
    metadata = {
        "instrumentation_mode": "", "tensordesc_meta": [], "target": SimpleNamespace(backend="cuda"), "num_ctas": 1, "name": "k", "shared": 0,
        "global_scratch_size": 0, "profile_scratch_size": 0, "tmem_size": 0, "launch_cooperative_grid": False, "launch_pdl": False,
        "num_warps": 4, **changed,
    }  # fmt: skip
    signature = {"x": "*fp32", "c": ("constexpr", ("constexpr",)), "n": ("i32", "constexpr")}
    if "described" in changed:
        signature["d"] = "tensordesc<bf16[64, 64]>"
    return launch_facts(SimpleNamespace(metadata=SimpleNamespace(**metadata), asm={"cubin": b""}, src=SimpleNamespace(signature=signature)))


def test_facts_are_of_kernels_that_need_no_more(driver):
    facts = facts_of()
    assert facts is not None
    assert facts.signature == ("*fp32", "constexpr", ("i32", "constexpr"))
    described = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [64, 64], "fp4_padded": False}
    assert facts_of(described=True, tensordesc_meta=[described]).maps == (MapFacts(9, 2, (64, 64), 3),)
    for more in (
        {"num_ctas": 2}, {"global_scratch_size": 8}, {"instrumentation_mode": "fpsan"}, {"tmem_size": 832}, {"shared": 1 << 18},
        {"described": True}, {"described": True, "tensordesc_meta": [{**described, "fp4_padded": True}]},
        {"described": True, "tensordesc_meta": [{**described, "new": 1}]}, {"target": SimpleNamespace(backend="hip")},
    ):  # fmt: skip
        assert facts_of(**more) is None, more


@pytest.mark.parametrize("default", [None, "amd"])
def test_a_driver_of_another_kind_is_not_replaced(monkeypatch, default):
    active = triton.runtime.driver
    monkeypatch.setattr(active, "_active", None)
    monkeypatch.setattr(active, "_default", None)
    monkeypatch.setattr(nvidia.CudaDriver, "is_active", staticmethod(lambda: default is not None))
    if default is not None:
        monkeypatch.setenv("TRITON_DEFAULT_BACKEND", default)
    defer_driver()
    assert active._active is None
