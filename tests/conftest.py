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


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
