"""Build a wheel with a kernel pack: `python kernels_wheel/build.py sm_90 dist [common]`. foci finds the pack once it is installed."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import tempfile
from pathlib import Path

from foci import kernel_packs

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "foci-kernels-{short}"
version = "{version}"
description = "Compiled kernels of foci for {arch} and Triton {triton}"
license = "{license}"
requires-python = ">=3.11"

[project.entry-points."foci.kernel_packs"]
{short} = "{package}"

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
artifacts = ["*.foci-kernels"]
"""


def main(arch: str, folder: str, select: str = "common") -> None:
    """Write the wheel into a folder."""
    short = arch.replace("_", "")
    package = f"foci_kernels_{short}"
    about = importlib.metadata.metadata("foci")
    with tempfile.TemporaryDirectory() as project:
        inside = Path(project) / package
        inside.mkdir()
        (inside / "__init__.py").write_text(f'"""Compiled kernels of foci for {arch}."""\n')
        built = kernel_packs.build(arch, inside / f"{arch}.foci-kernels", select=select)
        facts = kernel_packs.Pack(built.path).facts
        version = about["Version"].partition("+")[0]
        text = PROJECT.format(
            short=short, version=version, arch=arch, triton=facts.get("triton", "none"), package=package,
            license=about["License-Expression"] or "BSD-3-Clause",
        )  # fmt: skip
        (Path(project) / "pyproject.toml").write_text(text)
        subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", folder, project], check=True)
        print(f"{built.kernels} kernels for {arch}")


if __name__ == "__main__":
    main(*sys.argv[1:])
