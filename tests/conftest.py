"""What holds for every test: those of an absent device are skipped, with the reason; drawn examples are the same in every CI run."""

import os
import random
import zlib
from pathlib import Path

import hypothesis
import pytest
import torch

from foci.backends.cpu import build

# Elsewhere each run draws new examples and keeps those that failed. Deadlines measure the machine, not the code.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")

# C++ kernels are compiled with the flags of users where tests are about kernels. For those about what leads to a kernel
# GCC optimises less: a third of its time, which is most of theirs.
FLAGS = build._FLAGS
QUICK = tuple("-Og" if flag == "-O2" else flag for flag in FLAGS)
OF_KERNELS = ("backends", "conformance")

# Tests whose cases are many of one kind, each with kernels of its own to compile: where --sample asks for it, a part of them runs.
OF_MANY_CASES = frozenset(
    {
        "backends/hopper/test_backward_compile.py",
        "backends/hopper/test_forward_compile.py",
        "backends/test_triton_compile.py",
        "conformance/test_conformance.py",
        "graph/test_spellings.py",
        "graph/test_transformers.py",
        "literature/test_published.py",
    }
)


def pytest_addoption(parser):
    parser.addoption("--sample", type=int, default=1, metavar="N", help="of tests of many cases, one case in N, by its name")
    parser.addoption("--draw", type=int, default=0, metavar="K", help="which of the N parts --sample takes, modulo N")


def pytest_runtest_setup(item):
    """Each test draws the numbers of its name, whatever ran before it and in whichever process."""
    build._FLAGS = FLAGS if item.path.relative_to(Path(__file__).parent).parts[0] in OF_KERNELS else QUICK
    seed = zlib.crc32(item.nodeid.encode())
    random.seed(seed)
    torch.manual_seed(seed)


def pytest_make_parametrize_id(val):
    """Names of cases that hold functions must not hold their addresses: workers compare names."""
    return ",".join(f"{key}={getattr(value, '__name__', value)}" for key, value in val.items()) if isinstance(val, dict) else None


def pytest_report_header():
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return f"torch {torch.__version__}, {torch.get_num_threads()} threads, CUDA device: {cuda}"


def pytest_collection_modifyitems(config, items):
    many, draw = config.getoption("--sample"), config.getoption("--draw")
    left = [item for item in items if many > 1 and is_one_of_many(item) and (zlib.crc32(item.nodeid.encode()) - draw) % many]
    if left:
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [item for item in items if item not in gone]
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def is_one_of_many(item):
    return hasattr(item, "callspec") and item.path.relative_to(Path(__file__).parent).as_posix() in OF_MANY_CASES
