"""What `foci bench` does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from foci.cli.bench import CASES, Case, Line, Sizes, compile_ahead, draw, facts, measure, measure_beside, summary, table
from foci.cli.bench.calls import PEERS
from foci.cli.bench.measure import Request
from foci.cli.expr_parser import Unknown
from foci.cli.progress import progress

__all__ = ["Measuring", "run_bench"]


@dataclass(frozen=True)
class Measuring:
    """The options of `foci bench`, as `foci_cli.app.bench` describes them."""

    cases: tuple[str, ...]
    device: str
    dtype: str
    batch: int
    heads: int
    length: int
    dim: int
    seconds: float
    peers: tuple[str, ...] | None
    backward: bool
    jobs: int
    out: Path | None
    plot: Path | None


def chosen_cases(names: tuple[str, ...]) -> list[Case]:
    """The cases whose names begin with one of `names`.

    Raises:
        Unknown: for a name that begins none.
    """
    for name in names:
        if not any(case.name.startswith(name) for case in CASES):
            raise Unknown(f"no case begins with {name!r}; there are {', '.join(case.name for case in CASES)}", "CASES")
    return [case for case in CASES if not names or any(case.name.startswith(name) for name in names)]


def run_bench(options: Measuring, console: Console) -> None:
    """Measures, writes and shows lines as they come, and shows a table last.

    Raises:
        Unknown: for a case or a peer that is not there.
    """
    cases = chosen_cases(options.cases)
    for name in options.peers or ():
        if name not in PEERS:
            raise Unknown(f"no peer {name!r}; there are {', '.join(PEERS)}", "--peers")
    device = torch.device(options.device)
    about = facts(device)
    square = Sizes(options.batch, options.heads, options.heads, options.length, options.length, options.dim)
    request = Request(device, getattr(torch, options.dtype), options.seconds, options.peers, options.backward)
    lines: list[Line] = []
    console.print(f"{len(cases)} cases on {about['device']}; what is measured is compiled first", highlight=False)
    with progress(console, "cases", len(cases)) as advance:
        for case_lines in _measured(cases, square, request, options.jobs):
            for line in case_lines:
                if line.error is not None:
                    console.print(f"{line.case}, {line.who}: {line.error}", style="yellow", markup=False, soft_wrap=True)
                if options.out is not None:
                    with options.out.open("a") as file:
                        file.write(json.dumps(line.as_json() | about) + "\n")
            console.print(summary(case_lines), markup=False, highlight=False, soft_wrap=True)
            lines += case_lines
            advance()
    order = {case.name: place for place, case in enumerate(cases)}
    lines.sort(key=lambda line: order[line.case])
    unit = next((line.unit for line in lines if line.unit.endswith("FLOP/s")), "bytes")
    units = f"{unit} of foci, forward / backward, and how many times faster it is than"
    console.print(table(lines, f"{about['device']}, torch {about['torch']}, {options.dtype}: {units}"))
    if options.plot is not None:
        draw(lines, options.plot, f"{about['device']}, torch {about['torch']}, {options.dtype}")
        console.print(f"picture: {options.plot}", highlight=False, soft_wrap=True)


def _measured(cases: list[Case], square: Sizes, request: Request, jobs: int) -> Iterator[list[Line]]:
    """Lines of each case as they come, by `jobs` processes on a GPU; elsewhere in order, after these have compiled."""
    if jobs > 0 and request.device.type == "cuda":
        yield from measure_beside(cases, square, request, jobs)
        return
    compile_ahead(cases, square, request, jobs)
    for case in cases:
        yield list(measure(case, square, request))
