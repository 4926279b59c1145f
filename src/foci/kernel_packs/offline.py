"""Compiles the kernels of common problems in processes of their own, without a GPU.

Calls of tensors on the CPU are planned for the GPU, and a driver that launches nothing takes the place of Triton's: kernels are compiled
and noted as those of any call (`foci.backends.gpu.kernel_store`), in cache folders that hold nothing else. What is computed is never read.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import foci
from foci import kernel_packs, planner, precompile_lengths
from foci.backends.gpu.architectures import OLDEST
from foci.compat.triton import release
from foci.errors import ArgumentError
from foci.kernel_packs.common import COMMON, names_for
from foci.problem import Target

__all__ = ["check_arch", "compile_common"]


def compile_common(arch: str, select: str, folder: Path, jobs: int) -> None:
    """Compile kernels into `folder`, an empty one, for `foci.kernel_packs.build`, which says what the other arguments are.

    Raises:
        ArgumentError: for an unknown arch, or a `select` that no problem's name holds.
        RuntimeError: if a process fails.
    """
    check_arch(arch)
    names = _selected(select, arch)
    environment = {
        **os.environ, "FOCI_CACHE_DIR": str(folder), "TRITON_CACHE_DIR": str(folder / "triton cache"), "FOCI_QUIET": "1",
        "FOCI_SELF_CHECK": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    begun = [
        subprocess.Popen(
            [sys.executable, "-m", "foci.kernel_packs.offline", arch, *names[n::jobs]],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )
        for n in range(min(jobs, len(names)))
    ]  # fmt: skip
    ended = [(process.communicate()[1], process.returncode) for process in begun]
    for said, code in ended:
        if code:
            raise RuntimeError(f"kernels for {arch} do not compile here: {said.strip()[-2000:]}")


def check_arch(arch: str) -> None:
    """Whether kernels can be compiled for it.

    Raises:
        ArgumentError: if not.
    """
    if arch == "cpu":
        return
    match = re.fullmatch(r"sm_(\d{2,3})", arch)
    if match is None or int(match[1]) < OLDEST:
        raise ArgumentError(f"arch must be cpu, or sm_{OLDEST} or a later compute capability, such as sm_90; got {arch!r}")
    if release() == (0, 0):
        raise ArgumentError(f"kernels for {arch} need Triton, which is not installed: pip install 'foci[gpu]'")


def _selected(select: str, arch: str) -> list[str]:
    """Names of problems that hold one of the comma-separated words.

    Raises:
        ArgumentError: for a word that none holds.
    """
    if select == "common":
        return names_for(arch)
    names: dict[str, None] = {}
    for words in select.split(","):
        having = [name for name in COMMON if words.strip() in name]
        if not having:
            raise ArgumentError(f"no common problem's name holds {words.strip()!r}; names are such as {next(iter(COMMON))!r}")
        names |= dict.fromkeys(having)
    return [*names]


class _Launcher:
    """Stands in for Triton's launcher of a compiled kernel: nothing is launched."""

    def __init__(self, *_: Any) -> None:
        pass

    def __call__(self, *_: Any) -> None:
        pass


class _Driver:
    """Stands in for Triton's driver of a GPU."""

    launcher_cls = _Launcher

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (None, 0, 32, 0, 1024),
            unload_module=lambda *_: None,
            get_device_properties=lambda *_: {"max_shared_mem": 1 << 20},
        )

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _run(arch: str, names: Sequence[str]) -> None:
    """Run problems, for their kernels alone, in a process that does nothing else."""
    torch.set_num_threads(1)
    backends: tuple[str, ...] = ("cpu",)
    if arch != "cpu":
        import triton

        number = int(arch.removeprefix("sm_"))
        triton.runtime.driver.set_active(_Driver(number))
        features = frozenset({"triton", f"triton-{'.'.join(map(str, release()))}"})
        planner.plan_for(torch.device("cpu"), Target("cuda", number, features))
        backends = ("hopper", "triton")
        precompile_lengths.precompile_offline()
    with foci.use(*backends), kernel_packs.warm():
        for name in names:
            COMMON[name].run()


if __name__ == "__main__":
    _run(sys.argv[1], sys.argv[2:])
