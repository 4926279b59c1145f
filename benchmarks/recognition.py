"""How many attentions of models written in plain torch are fused: by Inductor's own patterns, and by foci.

Every architecture of tests/fusion/architectures.py, two layers, a padding mask, eager attention, no dropout. An attention is a softmax over
scores in one forward of the eager model. Inductor's count is its own counter, of inference in float32; nothing is compiled to code for
either. Graphs and graph breaks are Dynamo's counts with foci, and with a backend that does nothing. Equal are outputs, and in training
gradients of all parameters, that are off from those of float64 by no more than a few times what eager torch is off, and rounding.

    python benchmarks/recognition.py [--mode training] [--dtype bfloat16] [kind ...]

A run replaces the rows of its mode, its dtype and the kinds that are named, and leaves the others.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
import transformers
from functorch.compile import make_boxed_func
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

import foci
from foci.fusion import Compiler, fuse, report
from foci.fusion.verify import Float64

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "fusion"))
from architectures import FURTHER, TESTED, Architecture, attentions, cast, results, undropped
from spelling_harness import assert_equal

from summed_terms import record_bias_terms


def foci_only(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    fused = fuse(graph_module, example_inputs)
    report.tell(fused.sites)
    return fused.graph_module


def patterns_only(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's own road, passes and all, up to where code would be made."""
    return compile_fx(graph_module, example_inputs, inner_compile=lambda graph, inputs, **options: make_boxed_func(graph.forward))


def run(model: nn.Module, inputs: dict[str, Tensor], backend: Any, *, training: bool) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Results, and what Dynamo counted."""
    torch._dynamo.reset()
    counters.clear()
    tensors = results(torch.compile(model, backend=backend), inputs, training=training)
    return tensors, {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def survey(architecture: Architecture, dtype: torch.dtype, *, training: bool) -> dict[str, object]:
    model = undropped(architecture.model()).to(dtype).train(training)
    inputs = cast(architecture.inputs(model), dtype)
    row: dict[str, object] = {"attentions": attentions(model, inputs)}
    with torch.no_grad():
        model(**inputs)  # some change themselves in their first call
    with foci.observe() as log, foci.use("blocked"):  # the CPU's own kernels are C++, minutes of compilers
        fused, counts = run(model, inputs, Compiler(rest="eager") if training else foci_only, training=training)
    eager, plain_counts = run(model, inputs, "eager", training=training)
    if not training and dtype == torch.float32:
        torch._dynamo.reset()
        counters.clear()
        with torch.no_grad():
            torch.compile(model, backend=patterns_only)(**inputs)
        row["fused by Inductor"] = counters["inductor"]["fuse_attention"]
    row["fused by foci"] = len(log.calls)
    row |= {**counts, **{f"{name} without foci": count for name, count in plain_counts.items()}}
    row["equal"] = equal(architecture, model, inputs, fused, eager, training=training)
    row["why not"] = sorted({f"{site.location.rpartition('/')[2]}: {site.reason}" for site in log.fusions if not site.fused})
    return row


def equal(
    architecture: Architecture,
    model: nn.Module,
    inputs: dict[str, Tensor],
    fused: dict[str, Tensor],
    eager: dict[str, Tensor],
    *,
    training: bool,
) -> bool | str:
    """True, or what is not."""
    wide = undropped(architecture.model()).double().train(training)
    wide.load_state_dict(model.state_dict())
    wide.config._experts_implementation = "eager"  # the grouped product knows no float64
    with Float64(), record_bias_terms(wide) as terms:
        try:
            exact = results(wide, cast(inputs, torch.float64), training=training)
        except RuntimeError:  # float64's lowest number in a tensor of the default dtype
            torch.set_default_dtype(torch.float64)
            exact = results(wide, cast(inputs, torch.float64), training=training)
    # What nobody differentiates has zeros for a gradient under AOTAutograd, and none in eager.
    for name in [name for name in fused.keys() - eager.keys() if not fused[name].any()]:
        del fused[name]
    # A bias of all keys changes no weight: its gradient is zero, and rounding in every run.
    top = max(float(t.abs().max()) for t in exact.values())
    for name in [name for name, t in exact.items() if float(t.abs().max()) <= 1e-12 * top]:
        if float(fused[name].abs().max()) <= torch.finfo(fused[name].dtype).eps * top:
            del fused[name]
    of_fused = [{name: tensors[name] for name in fused} for tensors in (fused, eager, exact)]
    try:
        assert_equal(*of_fused, next(model.parameters()).dtype, terms)
    except AssertionError as error:
        return str(error)
    return True


def told(architecture: Architecture, options: argparse.Namespace, to: Any) -> None:
    try:
        row = survey(architecture, getattr(torch, options.dtype), training=options.mode == "training")
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"}
    to.send(row)


def surveyed(architecture: Architecture, options: argparse.Namespace) -> dict[str, object]:
    """A survey in a process of its own, which may take so long and no longer."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=told, args=(architecture, options, there))
    process.start()
    row: dict[str, object] = here.recv() if here.poll(options.seconds) else {"error": f"took more than {options.seconds} s"}
    process.kill()
    process.join()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="*", help="model types; all if none is given")
    parser.add_argument("--mode", choices=("inference", "training"), default="inference")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=int, default=60, help="after which an architecture is skipped")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)  # threads would be lost in a fork
    rows: list[dict[str, object]] = []
    for architecture in (*TESTED, *FURTHER):
        if options.kind and architecture.kind not in options.kind:
            continue
        begin = time.perf_counter()
        rows.append({"kind": architecture.kind, "mode": options.mode, "dtype": options.dtype, **surveyed(architecture, options)})
        print(f"{time.perf_counter() - begin:.0f} s", rows[-1], flush=True)
    for who in ("attentions", "fused by Inductor", "fused by foci"):
        print(who, sum(int(str(row.get(who, 0))) for row in rows))
    print(
        "more graphs or breaks with foci:",
        [r["kind"] for r in rows if any(r.get(n) != r.get(f"{n} without foci") for n in ("graphs", "breaks"))],
    )
    print("not equal:", {row["kind"]: row.get("equal", row.get("error")) for row in rows if row.get("equal") is not True})
    rows = [{**row, **measure.facts(), "transformers": transformers.__version__} for row in rows]
    replaced = {tuple(row[name] for name in ("kind", "mode", "dtype")) for row in rows}
    measure.write("recognition", [*(row for row in stored() if tuple(row[n] for n in ("kind", "mode", "dtype")) not in replaced), *rows])


def stored() -> list[dict[str, Any]]:
    path = measure.RESULTS / "recognition.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
