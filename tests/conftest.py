"""What holds for every test: those of an absent device are skipped, with the reason; drawn examples are the same in every CI run."""

import gc
import os
import random
import zlib
from pathlib import Path

import hypothesis
import pytest
import torch

from foci.backends.cpu import build
from sampling import drawn_part

# Elsewhere each run draws new examples and keeps those that failed. Deadlines measure the machine, not the code.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# C++ kernels are compiled with the flags of users where tests are about what these kernels compute. For those about what leads to a kernel
# GCC optimises less: a third of its time, which is most of theirs. Where all cases run, more tests compile as users do.
FLAGS = build._FLAGS
QUICK = tuple("-Og" if flag == "-O2" else flag for flag in FLAGS)
OF_KERNELS = (
    "backends/test_cpu.py",
    "backends/test_cpu_bias_gradients.py",
    "backends/test_cpu_headers.py",
    "backends/test_cpu_strides.py",
    "backends/test_cpu_tiles.py",
    "conformance/test_conformance.py",
)
OF_KERNELS_IN_ALL = ("backends/", "conformance/")

# Tests whose cases are many of one kind, each with kernels or graphs of its own to compile or to interpret: where --sample asks for it,
# a part of them runs. All of a file, or one of its tests.
OF_MANY_CASES = frozenset(
    {
        "api/test_call_spec.py::test_a_call_computes_what_it_computes_alone",
        "api/test_compile.py::test_dynamic_lengths_compile_once",
        "api/test_compile.py::test_numbers_of_named_masks_and_scores_may_change",
        "api/test_compile.py::test_one_graph",
        "api/test_default_device.py",
        "api/test_result_layout.py",
        "api/test_transforms.py::test_opcheck",
        "backends/hopper/test_backward_compile.py",
        "backends/hopper/test_forward_compile.py",
        "backends/test_cpu.py",
        "backends/test_cpu_bias_gradients.py",
        "backends/test_cpu_classes.py",
        "backends/test_cpu_headers.py",
        "backends/test_cpu_strides.py",
        "backends/test_cpu_tiles.py",
        "backends/test_excluded.py",
        "backends/test_launch_lists.py::test_launches_are_those_recorded",
        "backends/test_precompile_lengths.py",
        "backends/test_row_gradients.py",
        "backends/test_spec_launches.py",
        "backends/triton_backend/test_triton.py::test_kernels_in_the_interpreter",
        "backends/triton_backend/test_triton_compile.py",
        "backends/triton_backend/test_triton_interpreted.py",
        "backends/triton_backend/test_triton_launcher.py",
        "backends/triton_backend/test_triton_launch_lists.py",
        "conformance/test_conformance.py",
        "conformance/test_grid.py",
        "conformance/test_scores_with_masks.py",
        "fusion/test_calls_by_name.py",
        "fusion/test_joined_gradients.py::test_who_reads_gradients_side_by_side",
        "fusion/test_narrow_integers.py",
        "fusion/test_recognise.py",
        "fusion/test_spellings.py",
        "fusion/test_summed_rows.py",
        "fusion/test_symbolic_numbers.py",
        "fusion/test_transformers.py",
        "integrations/test_transformers_interface.py",
        "literature/test_published.py",
        "nn/test_causal_hint.py",
        "nn/test_node.py",
        "nn/test_transformed.py",
        "padding/test_cases.py",
        "padding/test_growth.py",
        "test_bench.py::test_every_case_is_measured",
    }
)


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=1, metavar="N", help="of tests of many cases, one case in N; of slow tests, one in four")
    parser.addoption(
        "--draw", type=int, default=0, metavar="K", help="number of a commit, which decides which of the N parts --sample takes"
    )


def file_of(item):
    return item.path.relative_to(Path(__file__).parent).as_posix()


def pytest_runtest_setup(item):
    """Each test draws the numbers of its name, whatever ran before it and in whichever process."""
    of_kernels = OF_KERNELS_IN_ALL if item.config.getoption("--sample") == 1 else OF_KERNELS
    build._FLAGS = FLAGS if file_of(item).startswith(of_kernels) else QUICK
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_make_parametrize_id(val):
    """Names of cases that hold functions must not hold their addresses: workers compare names."""
    return ",".join(f"{key}={getattr(value, '__name__', value)}" for key, value in val.items()) if isinstance(val, dict) else None


def pytest_report_header():
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, CUDA device: {cuda}"


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collecting makes two million objects that live as long as the process: the garbage collector looks at none of them, then or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)  # what Dynamo and Inductor make is many small objects: a twelfth of their time
        gc.enable()


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config, items):
    many = config.getoption("--sample")
    left = not_drawn(items, many, drawn_part(config.getoption("--draw"), many)) if many > 1 else set()
    if left:
        config.hook.pytest_deselected(items=list(left))
        items[:] = [item for item in items if item not in left]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


SLOW_PARTS = 4


def not_drawn(items, many, draw):
    """What --sample leaves: the cases of a file are dealt in turns, those of one name or one problem together, as they share kernels and
    what they are compared with. Each round begins one further, as dtypes come in rounds too. Other tests that are marked slow are dealt to
    SLOW_PARTS."""
    left, turns, slow = set(), {}, 0
    for item in items:
        file = file_of(item)
        if hasattr(item, "callspec") and not OF_MANY_CASES.isdisjoint({file, f"{file}::{item.originalname}"}):
            name = getattr(item.callspec.params.get("case"), "id", item.callspec.id)
            of_file = turns.setdefault(file, {})
            turn = of_file.setdefault(name, len(of_file))
            if (turn + turn // many) % many != draw:
                left.add(item)
        elif item.get_closest_marker("slow"):
            slow += 1
            parts = min(SLOW_PARTS, many)
            if slow % parts != draw % parts:
                left.add(item)
    return left
