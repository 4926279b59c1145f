"""Kernels to compile, and a driver of a device that launches nothing and notes what is compiled and launched."""

import threading
from collections import OrderedDict
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from foci.backends.gpu import compiling
from foci.backends.gpu.launch_builder import LaunchBuilder
from foci.compat.jit import triton_jit


@triton_jit
def first_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, 16), n)


@triton_jit
def second_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, 16), n + 1)


ADDED = tl.constexpr(1)


@triton_jit
def adding_kernel(x, n: tl.constexpr):
    tl.store(x + tl.arange(0, 16), n + ADDED)


@triton_jit
def wrong_kernel(x, n: tl.constexpr):
    tl.static_assert(n > 100, "of no use")


def device_of(launcher):
    """A driver of a device that launches by `launcher`."""
    return SimpleNamespace(
        utils=SimpleNamespace(
            load_binary=lambda *_: (1, 1, 32, 0, 1024), get_device_properties=lambda _: {"max_shared_mem": 166912, "multiprocessor_count": 1}
        ),
        launcher_cls=launcher, get_current_device=lambda: 0, get_current_stream=lambda _: 0,
        get_current_target=lambda: GPUTarget("cuda", 80, 32),
    )  # fmt: skip


@pytest.fixture
def events(monkeypatch, tmp_path):
    """What compiles, by which thread, and what is launched, in order."""
    notes, others = [], set(threading.enumerate())

    class Launcher:
        def __init__(self, src, metadata):
            self.name = src.name

        def __call__(self, *args):
            notes.append(("launch", self.name))

    def note(*, src, metadata, metadata_group, times, cache_hit):
        notes.append(("compile", src.name, threading.current_thread() is threading.main_thread()))

    device = device_of(Launcher)
    for kernel in (first_kernel, second_kernel, adding_kernel, wrong_kernel):
        kernel.device_caches.clear()
    monkeypatch.setattr(compiling, "_met", set())
    monkeypatch.setattr(compiling, "_begun", OrderedDict())
    monkeypatch.setattr(compiling, "waited_workers", lambda: None)  # as on a machine of few cores
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda _: 166912)
    with triton.knobs.compilation.scope(), triton.knobs.cache.scope():
        triton.knobs.compilation.listener = note
        triton.knobs.cache.dir = str(tmp_path)
        monkeypatch.setattr(driver, "_active", device)
        yield notes
        for thread in set(threading.enumerate()) - others:  # what still compiles would write into the next test's folder
            if thread.name.startswith("ThreadPoolExecutor"):
                thread.join(60)


def launch(kernel, n=1):
    LaunchBuilder((), None).add(kernel, (1,), torch.zeros(16), n, num_warps=1)
