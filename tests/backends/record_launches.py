"""Record the launches of every case: `python tests/backends/record_launches.py` writes `golden/launches_sm_*.txt`."""

from __future__ import annotations

from pathlib import Path

ARCHS = {80: ("triton",), 90: ("hopper", "triton")}  # the backends that calls may choose
PINNED = (3, 7)  # the Triton release whose launches are kept


def golden_path(arch: int) -> Path:
    return Path(__file__).parent / "golden" / f"launches_sm_{arch}.txt"


def read(path: Path) -> dict[str, list[str]]:
    """Lines of each case: it is named at the margin, its passes are indented."""
    cases: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if line.startswith("  "):
            cases[next(reversed(cases))].append(line.strip())
        else:
            cases[line] = []
    return cases


def write(path: Path, cases: dict[str, list[str]]) -> None:
    path.write_text("".join(f"{name}\n" + "".join(f"  {line}\n" for line in lines) for name, lines in cases.items()))


def main() -> None:
    import pytest
    from launch_calls import CASES, FIXED, make_call, make_inputs
    from launch_recorder import recording_launches, run

    import foci
    from foci.compat.triton import release

    assert release() == PINNED, f"Triton {PINNED} is pinned; this is {release()}"
    for arch, backends in ARCHS.items():
        launches = {}
        for name, case in CASES.items():
            with recording_launches(pytest.MonkeyPatch(), arch) as log, foci.use(*backends):
                launches[name] = run(log, make_call(case), make_inputs(case), FIXED).lines()
        write(golden_path(arch), launches)


if __name__ == "__main__":
    main()
