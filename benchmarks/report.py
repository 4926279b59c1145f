"""Writes docs/benchmarks.md from benchmarks/results/{blocked_cpu,overhead,block_mask}.jsonl.

python benchmarks/report.py
"""

from __future__ import annotations

from pages import DOCS, markdown, results

Row = dict[str, object]


def _where(rows: list[Row]) -> str:
    last = rows[-1]
    threads = f"{last['threads']} thread{'s' if last['threads'] != 1 else ''}"
    return f"{last['device']}, {threads}, torch {last['torch']}, commit {last['commit']}."


def _pivot(rows: list[Row], mask: str, direction: str, value: str) -> str:
    chosen = [r for r in rows if r["mask"] == mask and r["direction"] == direction]
    names = list(dict.fromkeys(str(r["implementation"]) for r in chosen))
    found = {(r["length"], r["implementation"]): r[value] for r in chosen}
    lengths = sorted({int(str(r["length"])) for r in chosen})
    return markdown(["S", *names], [[n, *(found.get((n, name), "") for name in names)] for n in lengths])


def main() -> None:
    parts = ["# Benchmarks of what runs everywhere\n", "Made by `benchmarks/report.py` from `benchmarks/results/`.\n"]
    blocked, overhead, masks = results("blocked_cpu"), results("overhead"), results("block_mask")
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
    if overhead:
        timed = [r for r in overhead if "case" in r]
        parts += [
            "## Host cost of one small call, (1, 2, 16, 8)\n",
            _where(overhead) + " Microseconds of the processor; torch is its scaled_dot_product_attention.\n",
        ]
        lines = [[r["case"], r["backend"], r["foci_us"], r["torch_us"], r["over_us"]] for r in timed]
        parts += [markdown(["call", "backend", "foci", "torch", "over"], lines) + "\n"]
        growth = next(r for r in overhead if "before" in r)
        before, after = growth["before"], growth["after"]
        assert isinstance(before, dict)
        assert isinstance(after, dict)
        parts += ["Entries of the caches after ten lengths, and after a thousand random lengths more:\n"]
        parts += [markdown(["cache", "before", "after"], [[key, before[key], after[key]] for key in before]) + "\n"]
    if masks:
        parts += ["## Making a block mask\n", "Blocks of 128 x 128; seconds, and what the process grew by at most.\n"]
        lines = [[r["case"], r["length"], r["seconds"], r["peak_mb"], r["sparsity_percent"]] for r in masks]
        parts += [markdown(["mask", "S", "s", "MB", "sparsity, %"], lines) + "\n"]
    (DOCS / "benchmarks.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
