"""The short launch gives the driver's function the same arguments as the installed Triton's own launcher. No GPU is needed: stand-ins take
the place of that function and of the loader; compiler, `JITFunction` and launcher are Triton's."""

import gc
import os
from types import SimpleNamespace

import pytest
import torch

from foci import masks, scores, weak_cache
from foci.backends.contract import Plan
from foci.compat.triton import TESTED, release
from foci.problem import Formula, Layout, Operands, Outputs, Problem, Program, Target
from foci.trace_functions import bind

triton = pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter launches nothing", allow_module_level=True)
if release() not in TESTED:
    pytest.skip("with this release of Triton launches go through its own launcher", allow_module_level=True)

from kernel_stand_ins import is_address, run_backward, run_forward  # noqa: E402
from triton import language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia import driver as nvidia  # noqa: E402
from triton.compiler.compiler import CompiledKernel, LazyDict  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from foci.backends.gpu import kernel, launch_builder, layernorm, stream_state, tile_tables  # noqa: E402
from foci.backends.hopper.kernel import build_kernel as build_hopper_kernel  # noqa: E402
from foci.backends.triton.kernel import build_kernel  # noqa: E402

STREAM = 4711
DESCRIPTION = "map of tiles"
TABLES = ("classify_tiles", "list_tiles", "assign_tasks", "place_sequences")  # made once


class Driver:
    """Stands in for Triton's driver of a GPU: notes what would be launched, loaded and unloaded."""

    launcher_cls = nvidia.CudaLauncher

    def __init__(self):
        self.launches, self.loaded, self.unloaded = [], [], []
        self.utils = SimpleNamespace(
            launch=self.launch,
            load_binary=self.load,
            unload_module=self.unloaded.append,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            fill_tma_descriptor=self.describe,  # 3.6
            fill_tma_descriptor_tiled=self.describe,
            build_signature_metadata=plain,
        )

    def launch(self, *args):
        self.launches.append(plain(args))

    def load(self, name, binary, shared, device):
        self.loaded.append(name)
        return f"module {len(self.loaded)}", len(self.loaded), 32, 0, 1024

    def describe(self, *args):
        return (DESCRIPTION, *plain(args))

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return STREAM


def plain(value):
    """Arguments as the driver's function reads them: tensors become addresses; empty chains of hooks, and the arguments of hooks, become None."""
    if isinstance(value, (tuple, list)):
        return tuple(map(plain, value))
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return None if getattr(value, "calls", None) == [] or isinstance(value, LazyDict) else value


@pytest.fixture
def driver(monkeypatch):
    """The stand-in, for kernels that nothing knows from before."""
    stand_in, active = Driver(), triton.runtime.driver
    before = active.__dict__.copy()
    active.set_active(stand_in)
    if release() == (3, 6):  # its launcher is a C module compiled for each kernel
        monkeypatch.setattr(nvidia, "library_dirs", list)
        monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **options: SimpleNamespace(launch=stand_in.launch))
    # set by the C code that a real driver loads
    for name, value in (("PyKernelArg", SimpleNamespace), ("ARG_CONSTEXPR", 0), ("ARG_KERNEL", 1), ("ARG_TUPLE", 2)):
        monkeypatch.setattr(nvidia, name, value, raising=False)
    for module in (kernel, tile_tables):
        monkeypatch.setattr(module, "current_stream", lambda tensor: STREAM)
    monkeypatch.setattr(stream_state, "free_stream_on", lambda device: STREAM)
    monkeypatch.setattr(weak_cache, "_derived", weak_cache.make_store())
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


def without_addresses(launches, tensors):
    """Addresses as the numbers of tensors: those of what only a pass reads differ from run to run."""
    numbers = {t.data_ptr(): f"tensor {n}" for n, t in enumerate(tensors)}

    def replaced(value):
        if isinstance(value, tuple):
            return tuple(map(replaced, value))
        if is_address(value):
            return numbers.get(value, "elsewhere")
        return value

    return [replaced(launch) for launch in launches]


# NOW-02
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "grads"),
    [("causal", build_kernel, True), ("alibi", build_kernel, False), ("jagged", build_kernel, False)]
    + [("causal", build_hopper_kernel, False), ("jagged", build_hopper_kernel, False)],
    ids=lambda value: getattr(value, "__name__", value) if not isinstance(value, bool) else "backward" if value else "forward",
)
def test_the_driver_is_given_what_triton_gives_it(driver, name, make, grads, monkeypatch):
    attention, operands = posed(name, make, grads=grads)
    direct = []
    monkeypatch.setattr(launch_builder, "direct", lambda *args, inner=launch_builder.direct: direct.append(inner(*args)) or direct[-1])

    def run(tensors):
        results = run_forward(attention, tensors)
        all_tensors = [tensors.query, tensors.key, tensors.value, results.out, results.lse]
        if grads:
            dout = torch.zeros_like(results.out)
            gradients = run_backward(attention, tensors, results, dout)
            all_tensors += [dout, gradients.query, gradients.key, gradients.value]
        return all_tensors

    kept = [run(operands)]
    count = len(driver.launches)
    kept.append(run(operands))
    first, second = driver.launches[:count], driver.launches[count:]
    first = [launch for launch in first if driver.loaded[launch[4] - 1] not in TABLES]
    assert direct
    assert all(launch is not None for launch in direct), "the launcher looks other than foci knows it"
    expected = without_addresses(first, kept[0])
    assert expected
    for actual, wanted in zip(without_addresses(second, kept[1]), expected, strict=True):
        assert actual == wanted
    if make is build_hopper_kernel:
        assert DESCRIPTION in str(second)


# NOW-02
@pytest.mark.slow
def test_row_kernels_give_the_driver_what_triton_gives_it(driver):
    config = layernorm.kernels.ColumnConfig(*map(tl.constexpr, (64, 8, 256, 0)))
    row_kernel = layernorm._Kernel(layernorm.kernels.column_sums, (), (), {"c": config}, 4)
    tensors = [torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(64, 64, dtype=torch.bfloat16), torch.zeros(4, 256)]
    numbers = (64, 3, 64, 16, 5, 9)
    row_kernel.launch(0, STREAM, 3, tensors, numbers)
    row_kernel.launch(0, STREAM, 3, tensors, numbers)
    first, second = driver.launches
    assert first == second
    assert row_kernel._known[0][2] == (release() > (3, 6)), "arguments come as one tuple from Triton 3.7 on"


# NOW-02
@pytest.mark.slow
def test_a_kernel_stays_loaded_as_long_as_it_may_be_launched_again(driver):
    attention, operands = posed("causal", build_kernel, grads=False)
    attention.forward(operands)
    forget_compiled()
    loaded = len(driver.loaded)
    attention.forward(operands)
    assert len(driver.loaded) == loaded, "the second call launches what the first one loaded"
    launched = {launch[4] for launch in driver.launches[-1:]}
    ours = [module for module in driver.unloaded if isinstance(module, str)]  # kernels of other tests may be collected meanwhile
    assert launched.isdisjoint(int(module.split()[1]) for module in ours)
