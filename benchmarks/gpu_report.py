"""Writes the tables of docs/gpu.md from benchmarks/results/{gpu_attention,gpu_overhead,first_call,gpu_packed}.jsonl: between its marks, the
rest stays.

python benchmarks/gpu_report.py
"""

from __future__ import annotations

from typing import Final

from pages import PEERS, fill, markdown, results

COLUMNS: Final = {"triton": "foci triton", "hopper": "foci hopper", **PEERS}


def attention() -> str:
    """TFLOP/s forward / backward, or terabytes a second, by problem and implementation."""
    cells_by_row: dict[tuple[str, tuple[int, ...]], dict[str, str]] = {}
    for line in sorted(results("gpu_attention"), key=lambda line: line.get("number", 0)):
        cell = f"{line['forward_tflops']:.0f} / {line['backward_tflops']:.0f}"
        if "forward_tbs" in line:
            cell = f"{line['forward_tbs']:.2f} TB/s"
        cells_by_row.setdefault((line["row"], tuple(line["shape"])), {})[line["who"]] = cell
    used = [name for name in COLUMNS if any(name in cells for cells in cells_by_row.values())]
    rows = [[row, ",".join(map(str, shape)), *(cells.get(name, "") for name in used)] for (row, shape), cells in cells_by_row.items()]
    return markdown(["problem", "B,H,S,D", *(COLUMNS[name] for name in used)], rows)


def overhead() -> str:
    """Microseconds of the host by call, and over an empty launch."""
    times_by_call: dict[str, dict[str, tuple[float, float]]] = {}
    measured = results("gpu_overhead")
    floor = next((line["us"] for line in measured if line["call"] == "empty launch"), 0.0)
    for line in measured:
        # a line that was not measured beside the floor is of a run that measured it once
        times_by_call.setdefault(line["call"], {})[line["direction"]] = (line["us"], line.get("floor_us", floor))

    def cells(pair: tuple[float, float] | None) -> list[str]:
        return ["", ""] if pair is None else [f"{pair[0]:.0f}", f"{pair[0] - pair[1]:.0f}"]

    rows = [[name, *cells(ways.get("forward")), *cells(ways.get("forward+backward"))] for name, ways in times_by_call.items()]
    return markdown(["call", "forward, us", "over an empty launch", "forward and backward, us", "over an empty launch"], rows)


def first_call() -> str:
    """Seconds of the first forward and the first backward of a function nobody called before."""
    seconds_by_function: dict[str, dict[str, str]] = {}
    for line in results("first_call"):
        seconds_by_function.setdefault(line["function"], {})[line["who"]] = f"{line['forward_s']:.1f} / {line['backward_s']:.1f}"
    used = [name for name in COLUMNS if any(name in cells for cells in seconds_by_function.values())]
    rows = [[function, *(cells.get(name, "") for name in used)] for function, cells in seconds_by_function.items()]
    return markdown(["new function", *(f"{COLUMNS[name]}, s" for name in used)], rows)


def packed() -> str:
    """Times of packed calls over those of dense ones of equal lengths, and over the padded batch's."""
    lines_by_case: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for line in results("gpu_packed"):
        shape = ",".join(map(str, line["shape"]))
        lines_by_case.setdefault((f"{shape} {line.get('mask', '')}".strip(), line["direction"]), {})[line["side"]] = line

    def over(sides: dict[str, dict[str, float]], one: str, other: str, what: str) -> str:
        a, b = (sides.get(side, {}).get(what) for side in (one, other))
        return "" if a is None or b is None else f"{a / b:.2f}"

    rows = []
    for (shape, direction), sides in lines_by_case.items():
        ratios = [over(sides, *pair, what) for pair in _PACKED for what in ("device_us", "ms")]
        host = [f"{sides[side]['host_us']:.0f}" if "host_us" in sides.get(side, {}) else "" for side in ("packed", "dense", "nested")]
        rows.append([shape, direction, sides["packed"]["backend"], *ratios, *host])
    ratios = [f"{name}, {what}" for name in ("over dense", "over padded") for what in ("device", "events")]
    return markdown(["B,H,S,D", "pass", "by", *ratios, "host us, packed", "dense", "nested"], rows)


_PACKED: Final = (("packed", "dense"), ("packed, own lengths", "padded"))


def main() -> None:
    tables = {
        "attention": ("gpu_attention", attention),
        "overhead": ("gpu_overhead", overhead),
        "first call": ("first_call", first_call),
        "packed": ("gpu_packed", packed),
    }
    fill("gpu.md", {mark: table() for mark, (measured, table) in tables.items() if results(measured)})


if __name__ == "__main__":
    main()
