"""Record a hash of the PTX of kernels that common calls launch: `python tests/backends/record_ptx.py` writes `golden/ptx_sm_*.txt`.

Kernels compile without a GPU, in ten to twenty minutes. Names of functions and files, and line numbers, do not count: renaming and moving
code changes no hash.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from record_launches import ARCHS, PINNED

# of launch_calls.CASES
COMMON = (
    "plain, 2x8x8x4096x4096x64x64",
    "plain, 2x8x8x4096x4096x128x128",
    "causal, 4x8x8x512x512x64x64",
    "causal, 2x8x8x4096x4096x128x128",
    "causal window, 2x8x8x4096x4096x128x128",
    "document, 2x8x8x4096x4096x64x64",
    "alibi, 2x8x8x4096x4096x128x128",
    "softcap, 4x8x8x512x512x64x64",
    "dropout, 2x8x8x4096x4096x64x64",
    "causal, 4x8x8x500x500x128x128, varlen",
    "plain, 4x8x2x1x1024x128x128, paged (False, False, False)",
    "causal lower right, 4x8x1x1x4096x128x128, (False, False, False)",
    "causal, 2x8x8x1000x1000x192x128",
    "causal, 2x8x8x1000x1000x256x256",
    "plain, 2x8x8x1024x1024x64x64, learned bias",
    "causal, 2x8x8x1024x1024x128x128, block mask",
)


def golden_path(arch: int) -> Path:
    return Path(__file__).parent / "golden" / f"ptx_sm_{arch}.txt"


def normalize(ptx: str) -> str:
    """PTX without debug lines and their labels, and with functions numbered in order of appearance."""
    lines = [line for line in ptx.split("\n") if not re.match(r"\s*(//|\.loc|\.file|\.section|\.b8|\.b32|\.b64|\$L__tmp)", line)]
    text = re.sub(r"//.*", "", "\n".join(lines)).split(".section")[0]
    names = dict.fromkeys(re.findall(r"\.(?:entry|func)[^(]*?(\w+)\(", text))
    for number, name in enumerate(names):
        text = re.sub(rf"\b{name}(?=\b|_param)", f"function{number}", text)
    return re.sub(r"\$L__\w+", "label", text)


def hashes(monkeypatch: Any, arch: int, name: str, known: dict[Any, str]) -> list[str]:
    """Lines "kernel hash" of the kernels that a case launches, each once; `known` has those compiled before, by specialization."""
    import triton
    from launch_calls import CASES, FIXED, make_call, make_inputs
    from launch_recorder import recording_launches, run
    from stand_ins import StandIn

    import foci

    lines: dict[str, None] = {}

    class Hashed(StandIn):
        def compiled(self, args: Any, options: Any) -> None:
            source, target, _, parsed = self.specialize(args, options)
            key = (source.hash(), parsed.hash())
            if key not in known:
                kernel = triton.compile(source, target=target, options=parsed.__dict__)
                known[key] = hashlib.sha256(normalize(kernel.asm["ptx"]).encode()).hexdigest()[:16]
            lines[f"{self.function.__name__} {known[key]}"] = None

    def stand_in(function: Any, log: Any) -> Any:
        return Hashed(function, arch, [], None, False)

    with recording_launches(monkeypatch, arch, stand_in) as log, foci.use(*ARCHS[arch]):
        case = CASES[name]
        run(log, make_call(case), make_inputs(case), FIXED)
    return list(lines)


def main() -> None:
    import pytest
    from record_launches import write

    from foci.compat.triton import release

    assert release() == PINNED, f"Triton {PINNED} is pinned; this is {release()}"
    for arch in ARCHS:
        known: dict[Any, str] = {}
        write(golden_path(arch), {name: hashes(pytest.MonkeyPatch(), arch, name, known) for name in COMMON})


if __name__ == "__main__":
    main()
