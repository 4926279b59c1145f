"""Writes docs/benchmarks.md, and its plots, from benchmarks/results/{blocked_cpu,block_mask}.jsonl and {host_cost,first_call,lengths}-*.jsonl.

python benchmarks/report.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pages import DOCS, PEERS, markdown, results

Row = dict[str, Any]


def _where(rows: list[Row]) -> str:
    last = rows[-1]
    threads = f"{last['threads']} thread{'s' if last['threads'] != 1 else ''}"
    return f"{last['device']}, {threads}, torch {last['torch']}, commit {last['commit']}, {last['date']}."


def _pivot(rows: list[Row], mask: str, direction: str, value: str) -> str:
    chosen = [r for r in rows if r["mask"] == mask and r["direction"] == direction]
    names = list(dict.fromkeys(str(r["implementation"]) for r in chosen))
    values = {(r["length"], r["implementation"]): r[value] for r in chosen}
    lengths = sorted({int(str(r["length"])) for r in chosen})
    return markdown(["S", *names], [[n, *(values.get((n, name), "") for name in names)] for n in lengths])


NAMES = {"foci": "foci", "sdpa": "torch SDPA", **PEERS, "none": "no attention"}
COLORS = {"foci": "#2f6f9f", "sdpa": "#8a8a8a", "flex": "#f2a65a", "fa4": "#6a9f58", "none": "#c9c9c9"}


def _of_device(device: str) -> str:
    return "on the CPU" if device == "cpu" else "on a GPU"


def host_cost(device: str) -> Iterator[str]:
    """What a small call costs the host."""
    rows = results(f"host_cost-{device}")
    timed = [r for r in rows if "case" in r]
    if not timed:
        return
    sizes = "(1, 2, 16, 8) in float32, processor time" if device == "cpu" else "(1, 2, 64, 64) in bfloat16"
    yield f"## Host cost of one small call {_of_device(device)}\n"
    yield _where(timed) + f" {sizes}; microseconds. torch is its scaled_dot_product_attention of as many tokens.\n"
    lines = [[r["case"], r["direction"], r["backend"], r["foci_us"], r["torch_us"], r["ratio"]] for r in timed]
    yield markdown(["call", "passes", "backend", "foci", "torch", "ratio"], lines) + "\n"
    for growth in (r for r in rows if "before" in r):
        before, after = growth["before"], growth["after"]
        yield "Entries of the caches after ten lengths, and after a thousand random lengths more:\n"
        yield markdown(["cache", "before", "after"], [[key, before[key], after[key]] for key in before]) + "\n"


def first_calls(device: str) -> Iterator[str]:
    """Seconds of first calls, by kind of problem."""
    rows = [r for r in results(f"first_call-{device}") if "kind" in r]
    if not rows:
        return
    yield f"## First calls {_of_device(device)}\n"
    yield (
        _where(rows)
        + " Seconds. All kinds run in one process, in this order, so a later kind may find kernels that an earlier one compiled.\n"
    )
    columns = ("forward_s", "backward_s", "new_length_s", "known_s")
    for state in dict.fromkeys(r["caches"] for r in rows):
        yield ("From empty caches:" if state == "empty" else "In a second process, with what the first left on disk:") + "\n"
        lines = [
            [
                r["kind"],
                NAMES[r["who"]],
                *(r.get("error", "")[:60] if "error" in r and name == columns[0] else r.get(name, "") for name in columns),
            ]
            for r in sorted(
                (r for r in rows if r["caches"] == state), key=lambda r: list(dict.fromkeys(x["kind"] for x in rows)).index(r["kind"])
            )
        ]
        yield markdown(["problem", "", "first forward", "first backward", "slowest of three new lengths", "known"], lines) + "\n"


def new_lengths(device: str) -> Iterator[str]:
    """Stalls of a model's steps at new lengths."""
    rows = [r for r in results(f"lengths-{device}") if "stall_s" in r]
    if not rows:
        return
    yield f"## New lengths {_of_device(device)}\n"
    yield (
        _where(rows)
        + " Twelve training steps of a Llama with 12 layers, each batch of a length seen first, and the same steps later. A stall is "
        "what a step takes longer than later; without attention it is what a new length costs the rest of the model. Seconds.\n"
    )
    columns = ("new_s", "known_s", "stall_s", "first_stall_s", "worst_later_stall_s")
    lines = [[NAMES[r["who"]], r["caches"], *(r[name] for name in columns)] for r in rows]
    yield markdown(["attention", "caches", "new", "known", "stalls", "first stall", "worst later stall"], lines) + "\n"
    _plot_stalls(rows, f"new-lengths-{device}.png")
    yield f"![Stalls at each of the twelve steps](new-lengths-{device}.png)\n"


def _plot_stalls(rows: list[Row], name: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    for one, state in zip(axes, ("empty", "on disk"), strict=True):
        for row in (r for r in rows if r["caches"] == state):
            stalls: Any = row["stalls_s"]
            one.plot(
                range(1, len(stalls) + 1), stalls, marker="o", markersize=3, color=COLORS[str(row["who"])], label=NAMES[str(row["who"])]
            )
        one.set_title(f"caches: {state}", fontsize=9)
        one.set_xlabel("step, each of a new length")
        one.set_yscale("symlog", linthresh=0.1)
        one.legend(fontsize=8)
    axes[0].set_ylabel("stall, s")
    figure.savefig(DOCS / name, dpi=100, metadata={"Software": None})


def main() -> None:
    parts = ["# Benchmarks of what runs everywhere\n", "Made by `benchmarks/report.py` from `benchmarks/results/`.\n"]
    blocked, masks = results("blocked_cpu"), results("block_mask")
    if blocked:
        parts += [
            "## The blocked backend on the CPU\n",
            _where(blocked) + " 1 head of 64, float32, medians; other programs ran on the machine.\n",
        ]
        if blocked[-1]["commit"] == "bfe10f9":
            parts += [
                "Without a mask and causal, blocked is slower than torch flash at every length. In the rows with a mask, torch "
                "math, flex eager and (window) torch flash made their mask inside the timed call, as blocked finds its blocks "
                "inside it: a program that keeps its mask sees smaller ratios there. The benchmark has made masks before the clock "
                "starts since.\n"
            ]
        for mask in dict.fromkeys(str(r["mask"]) for r in blocked):
            for direction in ("forward", "forward+backward"):
                parts += [f"### {mask}, {direction}\n", "Milliseconds:\n", _pivot(blocked, mask, direction, "ms") + "\n"]
                parts += ["Peak memory over the inputs, MB:\n", _pivot(blocked, mask, direction, "peak_mb") + "\n"]
    parts += [text for device in ("cpu", "cuda") for text in (*host_cost(device), *first_calls(device), *new_lengths(device))]
    if masks:
        parts += ["## Making a block mask\n", "Blocks of 128 x 128; seconds, and what the process grew by at most.\n"]
        lines = [[r["case"], r["length"], r["seconds"], r["peak_mb"], r["sparsity_percent"]] for r in masks]
        parts += [markdown(["mask", "S", "s", "MB", "sparsity, %"], lines) + "\n"]
    (DOCS / "benchmarks.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
