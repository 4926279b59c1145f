"""The C++ headers by themselves: under sanitizers, at every width, and on another processor under an emulator."""

import shutil
import subprocess
from pathlib import Path

import pytest

from foci.backends.cpu import build

DRIVER = Path(__file__).with_name("test_cpu_driver.cc")
NATIVE = shutil.which("g++")
CROSS, EMULATOR = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")


def run(compiler, folder, *flags, emulator=()):
    program = folder / "driver"
    options = ["-std=c++17", "-O1", "-ffp-contract=fast", "-fopenmp", "-w", "-DFOCI_POISON", f"-I{build.HEADERS}", *flags]
    subprocess.run([compiler, *options, str(DRIVER), "-o", str(program)], check=True, capture_output=True, text=True)
    ran = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    return ran.stdout


@pytest.mark.skipif(NATIVE is None, reason="needs g++")
@pytest.mark.parametrize("storage", ["float", "bf16", "f16"])
@pytest.mark.parametrize("arch", ["native", "x86-64"])
def test_sanitizers_find_nothing(tmp_path, storage, arch):
    """Addresses and undefined behaviour, and numbers read before they are written."""
    # a third of the time of -O1; and traps a half of that with messages: without that flag a failure says what it is
    sanitizers = ("-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fsanitize-undefined-trap-on-error")
    assert "0 failures" in run(NATIVE, tmp_path, f"-march={arch}", f"-DSTORAGE={storage}", *sanitizers)


@pytest.mark.skipif(CROSS is None or EMULATOR is None, reason="needs g++-aarch64-linux-gnu and qemu-user")
@pytest.mark.parametrize("storage", ["float", "bf16", "f16"])
def test_aarch64_under_an_emulator(tmp_path, storage):
    """NEON, by vector extensions alone."""
    assert "4 lanes, 0 failures" in run(CROSS, tmp_path, "-static", f"-DSTORAGE={storage}", emulator=(EMULATOR,))
