"""Which kernels a problem needs, by lengths, batch and number of sequences: `python tests/backends/kernel_needs.py` prints a table.

Two kernels differ where Triton's cache key differs: source, constants, types and alignment of arguments, options. Nothing is compiled or
computed, and no GPU is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from launch_recorder import Log, recording_launches, tensors_in
from record_launches import ARCHS
from stand_ins import StandIn
from torch import Tensor
from triton.runtime.jit import JITFunction

import foci
from foci import masks, scores

HEADS = 8
SLOPES = torch.rand(HEADS)
LEARNED_SLOPES = torch.rand(HEADS, requires_grad=True)
LEARNED_TABLE = torch.rand(HEADS, 513, requires_grad=True)
DOCUMENTS = torch.arange(1 << 15) // 300
LENGTHS = (1, 2, 5, 16, 17, 64, 100, 127, 128, 200, 257, 512, 1000, 1024, 1025, 2048, 2050, 4096, 5000, 8192, 16000, 16384)
BATCHES = (1, 2, 3, 8, 64)


class Kernel(NamedTuple):
    """What Triton's cache tells apart."""

    name: str
    constants: tuple[tuple[str, str], ...]  # compile-time arguments, options and the types of the others, by name

    def differences(self, other: Kernel) -> set[str]:
        return {name for name, _ in set(self.constants) ^ set(other.constants)}


class Needed(StandIn):
    """Stands in for a kernel, and notes which variant each launch needs."""

    def __init__(self, function: JITFunction, arch: int, log: list[Kernel]) -> None:
        super().__init__(function, arch, [], None, is_read_only=False)
        self.log = log

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def note(*args: Any, **options: Any) -> None:
            self.log.append(self.kernel(args, options))

        return note

    def kernel(self, args: tuple[Any, ...], options: dict[str, Any]) -> Kernel:
        source, _, _, _ = self.specialize(args, options)
        names = self.function.arg_names
        fields = {f"type of {name}": str(kind) for name, kind in source.signature.items()}
        fields |= {_path(names, args, at): _text(value) for at, value in source.constants.items()}
        fields |= {f"alignment of {_path(names, args, at)}": str(value) for at, value in source.attrs.items()}
        fields |= {name: str(value) for name, value in options.items()}
        return Kernel(self.function.__name__, tuple(sorted(fields.items())))


def _path(names: Sequence[str], args: tuple[Any, ...], at: tuple[int, ...]) -> str:
    """An argument, or a field of a named tuple, by its names."""
    name, value = names[at[0]], args[at[0]] if at[0] < len(args) else None
    for index in at[1:]:
        fields = getattr(value, "_fields", None)
        name += f".{fields[index] if fields else index}"
        value = value[index] if isinstance(value, tuple) else None
    return name


def _text(value: Any) -> str:
    return value.src if isinstance(value, JITFunction) else repr(value)


class Sizes(NamedTuple):
    """Sizes of a call; packed, `batch` sequences of up to `q_len` queries."""

    batch: int
    q_len: int
    kv_len: int

    def __str__(self) -> str:
        return f"{self.batch}x{self.q_len}x{self.kv_len}"


class Problem(NamedTuple):
    """A problem that calls of many sizes share."""

    kind: str
    dim: int
    options: dict[str, Any]
    layout: str = "dense"  # dense, packed, blocks
    is_decode: bool = False
    needs_grad: bool = True
    captures: tuple[Tensor, ...] = ()  # those that require grad

    def __str__(self) -> str:
        return f"{self.kind}, D {self.dim}" + ("" if self.needs_grad else ", no grad")

    def sizes(self, lengths: Sequence[int] = LENGTHS, batches: Sequence[int] = BATCHES) -> Iterator[Sizes]:
        for batch in batches:
            for length in lengths:
                if self.is_decode:
                    yield from (Sizes(batch, queries, length) for queries in (1, 2, 4, 16) if queries <= length)
                else:
                    yield Sizes(batch, length, length)


def by_document(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return DOCUMENTS[q_idx] == DOCUMENTS[kv_idx]


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + SLOPES[h] * (kv_idx - q_idx)


def by_slope(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_SLOPES[h] * (kv_idx - q_idx)


def by_distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + LEARNED_TABLE[h, (kv_idx - q_idx).clamp(-256, 256) + 256]


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(256, 0)},
    "document": {"mask": by_document},
    "softcap": {"score": scores.softcap(20.0), "mask": masks.causal()},
    "alibi": {"score": alibi, "mask": masks.causal()},
}


def make_problems(dims: Sequence[int] = (64, 128)) -> list[Problem]:
    problems = []
    for dim in dims:
        for needs_grad in (True, False):
            problems += [Problem(kind, dim, options, needs_grad=needs_grad) for kind, options in KINDS.items()]
            problems += [
                Problem(f"varlen {kind}", dim, KINDS[kind], layout="packed", needs_grad=needs_grad)
                for kind in ("plain", "causal", "window", "document")
            ]
            problems.append(Problem("block mask", dim, {}, layout="blocks", needs_grad=needs_grad))
        problems += [
            Problem("learned slopes", dim, {"score": by_slope, "mask": masks.causal()}, captures=(LEARNED_SLOPES,)),
            Problem("learned slopes, block mask", dim, {"score_mod": by_slope}, layout="blocks", captures=(LEARNED_SLOPES,)),
            Problem("learned table", dim, {"score": by_distance}, captures=(LEARNED_TABLE,)),
        ]
        lower_right = {"mask": masks.causal_lower_right()}
        problems += [
            Problem("decode", dim, {}, is_decode=True, needs_grad=False),
            Problem("decode causal", dim, lower_right, is_decode=True, needs_grad=False),
        ]
    return problems


def run(problem: Problem, sizes: Sizes) -> None:
    """Forward, and backward where the problem needs it, of tensors that nobody reads."""
    batch, q_len, kv_len = sizes

    def make(length: int) -> Tensor:
        shape = (batch * length, HEADS, problem.dim) if problem.layout == "packed" else (batch, HEADS, length, problem.dim)
        return torch.empty(shape, dtype=torch.bfloat16).requires_grad_(problem.needs_grad)

    inputs = [make(q_len), make(kv_len), make(kv_len)]
    if problem.layout == "dense":
        out = foci.attention(*inputs, **problem.options)
    elif problem.layout == "blocks":
        block_mask = foci.create_block_mask(by_document, None, None, q_len, kv_len, device="cpu")
        out = foci.flex_attention(*inputs, block_mask=block_mask, **problem.options)
    else:
        offsets = torch.arange(batch + 1) * q_len
        out = foci.varlen_attn(*inputs, offsets, offsets, q_len, q_len, **problem.options)
    if problem.needs_grad:
        torch.autograd.grad(tensors_in(out), [*inputs, *problem.captures], [torch.empty_like(t) for t in tensors_in(out)])


Needs = dict[Kernel, list[Sizes]]
"""Kernels with the sizes that launch them."""


def needs(arch: int, problem: Problem, asked: Sequence[Sizes]) -> Needs:
    """Kernels that a problem launches for some sizes, each alone: nothing is kept between them."""
    sizes_by_kernel: Needs = {}
    for sizes in asked:
        launched: list[Kernel] = []
        stand_in = functools.partial(_stand_in, arch, launched)
        with recording_launches(pytest.MonkeyPatch(), arch, stand_in), foci.use(*ARCHS[arch]):
            run(problem, sizes)
        for kernel in dict.fromkeys(launched):
            sizes_by_kernel.setdefault(kernel, []).append(sizes)
    return sizes_by_kernel


def _stand_in(arch: int, launched: list[Kernel], function: JITFunction, log: Log) -> Needed:
    return Needed(function, arch, launched)


def by_name(kernels: Iterable[Kernel]) -> dict[str, list[Kernel]]:
    """Variants of each kernel."""
    variants: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        variants.setdefault(kernel.name, []).append(kernel)
    return variants


def main() -> None:
    import sys

    fast = "--quick" in sys.argv
    lengths, batches = ((1, 100, 1024, 4096), (2, 64)) if fast else (LENGTHS, BATCHES)
    for arch in ARCHS:
        for problem in make_problems():
            asked = [s for s in problem.sizes(lengths, batches) if s.batch * s.kv_len <= 1 << 18]
            shapes = needs(arch, problem, asked)
            print(f"sm_{arch}, {problem}: {len(shapes)} kernels over {len(asked)} sizes", flush=True)
            for name, variants in by_name(shapes).items():
                fields = sorted(set().union(*(variants[0].differences(each) for each in variants[1:]))) if len(variants) > 1 else []
                print(f"    {len(variants):3} {name}" + (f": {', '.join(fields)}" if fields else ""), flush=True)
                if "--sizes" in sys.argv and len(variants) > 1:
                    for each in variants:
                        print(
                            f"          {_values(each, fields)}: {len(shapes[each])} sizes, such as {', '.join(map(str, shapes[each][:3]))}"
                        )


def _values(kernel: Kernel, fields: Sequence[str]) -> str:
    return " ".join(f"{name}={value[:60]}" for name, value in kernel.constants if name in fields)


if __name__ == "__main__":
    main()
