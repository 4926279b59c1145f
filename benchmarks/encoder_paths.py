"""What each part of the way of packed tokens through an encoder saves, by taking it away: foci.nn's eager TransformerEncoder on a GPU.

The encoder of `modules.py`: 6 layers, d_model 768, 12 heads, bfloat16, 32 sequences of 16 to 512 tokens, new ones in each call. Parts:

- launches bound to the layers of a batch (`foci.backends.gpu.bound_launch`): without them each layer's attention looks its launches up
- one autograd node for a layer (`foci.nn.layer_autograd`): without it autograd has a node for each operation
- layers computed from their parameters (`foci.nn.fused_encoder`): without it each module is called

Each variant lacks what those before it lack. Ratios are medians over rounds in which all take turns.

    python benchmarks/encoder_paths.py      # also fills docs/modules.md
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Final

import measure
import torch
from modules import HEADS, LAYERS, LONGEST, WIDTH, encoder, lengths_of
from pages import fill, markdown, results
from torch import Tensor

import foci.nn
from foci.dispatch import PackedCall, RowLayout, _side_by_side
from foci.nn import encoder as encoders
from foci.nn import fused_encoder

RESULT: Final = "encoder_paths"
VARIANTS: Final = ("all of it", "launches looked up", "a node for each operation", "modules called")
ROUNDS, CALLS = 15, 6


def forward_rows(self: PackedCall, rows: Tensor, layout: RowLayout) -> tuple[Tensor, Tensor]:
    out, lse = self.forward(layout.split(rows))
    return out.flatten(1), lse


def backward_rows(self: PackedCall, rows: Tensor, outputs: tuple[Tensor, Tensor], gradient: Tensor, layout: RowLayout) -> Tensor:
    out, lse = outputs
    return _side_by_side(self.backward(layout.split(rows), (layout.of_queries(out), lse), layout.of_queries(gradient)))


OWN: Final = (PackedCall.forward_rows, PackedCall.backward_rows, fused_encoder._AS_NODES, encoders.noted)


def take_away(count: int) -> None:
    """Leaves out the first `count` parts."""
    forward, backward, nodes, noted = OWN
    PackedCall.forward_rows, PackedCall.backward_rows = (forward, backward) if count < 1 else (forward_rows, backward_rows)
    fused_encoder._AS_NODES = nodes if count < 2 else ()
    encoders.noted = noted if count < 3 else lambda *args: None


def seconds_of(step: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / CALLS


def main() -> None:
    torch.manual_seed(0)
    model = encoder(foci.nn, "cuda", torch.bfloat16)
    lengths = torch.tensor(lengths_of(32))
    packings = []
    for _ in range(20):
        offsets = torch.cat([lengths.new_zeros(1), lengths[torch.randperm(32)].cumsum(0)])
        packings.append(foci.nn.Packing(offsets.cuda(), LONGEST, (32, LONGEST)))
    packing_cycle = itertools.cycle(packings)
    tokens = torch.randn(int(lengths.sum()), WIDTH, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn_like(tokens)

    def infer() -> None:
        with torch.inference_mode():
            model(tokens, src_key_padding_mask=next(packing_cycle))

    def train() -> None:
        model.zero_grad(set_to_none=True)
        (model(tokens, src_key_padding_mask=next(packing_cycle)) * weights).sum().backward()

    rows: list[dict[str, object]] = []
    for mode, step in (("training", train), ("inference", infer)):
        model.train(mode == "training")
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for turn in range(-1, ROUNDS):
            for count, name in enumerate(VARIANTS):
                take_away(count)
                step()  # the call after a change finds its launches
                took = seconds_of(step)
                if turn >= 0:
                    times[name].append(took)
        take_away(0)
        for name, median in measure.medians(times).items():
            row = {"mode": mode, "variant": name, "ms": round(1e3 * median, 3), "ratio": round(measure.ratio(times, name, VARIANTS[0]), 3)}
            rows.append({**row, "layers": LAYERS, "heads": HEADS, **measure.facts("cuda")})
    measure.write(RESULT, rows)


def table() -> str:
    """A row for each variant: milliseconds, and how many times as long as with every part."""
    by_variant = {(row["mode"], row["variant"]): row for row in results(RESULT)}
    cells = [[by_variant[mode, name][what] for mode in ("training", "inference") for what in ("ms", "ratio")] for name in VARIANTS]
    head = ["", "training step, ms", "times", "inference, ms", "times"]
    return markdown(head, [[name, *row] for name, row in zip(VARIANTS, cells, strict=True)])


if __name__ == "__main__":
    main()
    fill("modules.md", {"encoder-paths": table()})
