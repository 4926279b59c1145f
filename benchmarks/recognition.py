"""How many attentions of models written in plain torch are fused: by Inductor's own patterns, and by foci.

Every architecture of tests/graph/architectures.py, two layers, a padding mask, eager attention. An attention is a softmax over scores in
one forward of the eager model. Inductor's count is its own counter; nothing is compiled to code for either.

    python benchmarks/recognition.py [kind ...]

Kinds that are named replace their rows of the results, and leave the others.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import measure
import torch
import transformers
from functorch.compile import make_boxed_func
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.compile_fx import compile_fx

import foci
from foci.graph import fuse, report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "graph"))
from architectures import FURTHER, TESTED, Architecture, attentions, first


def foci_only(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    fused = fuse(graph_module, example_inputs)
    report.tell(fused.sites)
    return fused.graph_module


def patterns_only(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """Inductor's own road, passes and all, up to where code would be made."""
    return compile_fx(graph_module, example_inputs, inner_compile=lambda graph, inputs, **others: make_boxed_func(graph.forward))


def survey(architecture: Architecture) -> dict[str, object]:
    model = architecture.model().eval()
    inputs = architecture.inputs(model)
    found: dict[str, object] = {"kind": architecture.kind, "attentions": attentions(model, inputs)}
    with torch.no_grad():
        expected = first(model(**inputs))
        torch._dynamo.reset()
        with foci.observe() as log:
            out = first(torch.compile(model, backend=foci_only)(**inputs))
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend=patterns_only)(**inputs)
    found["fused by Inductor"] = counters["inductor"]["fuse_attention"]
    found["fused by foci"] = len(log.calls)
    found["equal"] = torch.allclose(out, expected, rtol=1e-3, atol=1e-4)
    found["why not"] = sorted({f"{site.location.rpartition('/')[2]}: {site.reason}" for site in log.fusions if not site.fused})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", nargs="*", help="model types; all if none is given")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    rows: list[dict[str, object]] = []
    for architecture in (*TESTED, *FURTHER):
        if options.kind and architecture.kind not in options.kind:
            continue
        try:
            rows.append(survey(architecture))
        except Exception as error:
            rows.append({"kind": architecture.kind, "error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})
        print(rows[-1], flush=True)
    for who in ("attentions", "fused by Inductor", "fused by foci"):
        print(who, sum(int(str(row.get(who, 0))) for row in rows))
    rows = [{**row, **measure.facts(), "transformers": transformers.__version__} for row in rows]
    measure.write("recognition", [*(row for row in stored() if options.kind and row["kind"] not in options.kind), *rows])


def stored() -> list[dict[str, object]]:
    path = measure.RESULTS / "recognition.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    main()
