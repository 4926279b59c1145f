"""The self-check's own process: a small problem of a kind, by a backend and by the plain formula (`foci.backends.self_check` starts it)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from foci import masks, scores
from foci.api import attention
from foci.backends.self_check import Kind, Verdict
from foci.context import use
from foci.functional import varlen_attn
from foci.mask_mods import create_block_mask
from foci.paged import paged_attention
from foci.problem import Outputs
from foci.variant import Mask, Score

__all__ = ["answer", "judge"]

_TOLERANCES: Final = {torch.float32: 1e-2, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Errors, as parts of the largest number of a result, beyond which it is wrong. Right kernels stay below a third of that."""

_PAGE: Final = 64
_SEED: Final = 7


def answer(question: str, device: str) -> str:
    """The verdict on a `Kind`, both as JSON."""
    return json.dumps(judge(Kind(**json.loads(question)), torch.device(device)))


def judge(kind: Kind, device: torch.device) -> Verdict:
    """Whether a backend computes what the plain formula does."""
    try:
        posed = _Posed.of(kind, device)
        expected = posed.run("reference", torch.float32)
    except Exception as error:  # nothing was said about the kernels: this GPU may be full, or refuse another process
        return Verdict(f"the small problem could not be set up: {_first_line(error)}", is_final=False)
    tolerance = _TOLERANCES[posed.dtype]
    try:
        # the second call launches what the first one recorded
        calls = [posed.run(kind.backend, posed.dtype) for _ in range(2)]
        wrong = [name for name, value in expected.items() if not all(_is_near(call[name], value, tolerance) for call in calls)]
    except torch.OutOfMemoryError as error:
        return Verdict(_first_line(error), is_final=False)
    except Exception as error:
        return Verdict(_first_line(error))
    return Verdict(f"{', '.join(wrong)} wrong" if wrong else None)


def _first_line(error: Exception) -> str:
    said = str(getattr(error, "error_message", None) or error)  # the text of Triton's CompilationError begins with a place
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"{type(error).__name__}: {(lines or ['no message'])[0]}"


def _is_near(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    actual, expected = actual.detach().double(), expected.detach().double()
    endless = expected.isinf()
    if actual.shape != expected.shape or not bool((actual[endless] == expected[endless]).all()):
        return False
    actual, expected = actual[~endless], expected[~endless]
    if not expected.numel():
        return True
    return bool((actual - expected).abs().max() <= tolerance * max(1e-3, float(expected.abs().max())))  # False for NaN


@dataclass(frozen=True, eq=False)
class _Posed:
    """A small problem of a kind."""

    kind: Kind
    dtype: torch.dtype
    tensors: tuple[Tensor, Tensor, Tensor]
    gradient: Tensor
    table: Tensor  # what the score function captures
    ids: Tensor
    keep: Tensor

    @staticmethod
    def of(kind: Kind, device: torch.device) -> _Posed:
        """Draw the tensors of a small problem of a kind."""
        torch.manual_seed(_SEED)
        dtype: torch.dtype = getattr(torch, kind.dtype)
        few = kind.q_len <= 128
        # a kernel for few queries is taken where there are many heads
        batch, heads = (8, 8) if few and kind.kv_len <= 1300 else (2, 4) if kind.kv_len <= 1300 else (1, 2)
        kv_heads = heads // 2 if kind.is_grouped else heads

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, device=device).to(dtype)

        sizes = (batch, heads, kind.q_len), (batch, kv_heads, kind.kv_len)
        query, key, value = draw(*sizes[0], kind.head_dim), draw(*sizes[1], kind.head_dim), draw(*sizes[1], kind.value_dim)
        if kind.variant in ("pair", "mask"):
            table = torch.randn(heads, kind.q_len, kind.kv_len, device=device)
        else:
            table = 0.5 + torch.rand(heads, device=device)
        ids = (torch.arange(max(kind.q_len, kind.kv_len), device=device) // 150).to(torch.int32)
        keep = torch.rand(kind.q_len, kind.kv_len, device=device) < 0.7
        return _Posed(kind, dtype, (query, key, value), draw(*sizes[0], kind.value_dim), table, ids, keep)

    def run(self, backend: str, dtype: torch.dtype) -> dict[str, Tensor]:
        """Results and gradients by name."""
        kind = self.kind
        tensors = [t.to(dtype).requires_grad_(kind.has_backward) for t in self.tensors]
        if kind.layout == "paged":
            tensors = [tensors[0], *(t.detach() for t in tensors[1:])]
        table = self.table.clone().requires_grad_(kind.is_learned)
        named = dict(zip(("gradient of query", "gradient of key", "gradient of value"), tensors, strict=True)) | {"learned gradient": table}
        leaves = {name: t for name, t in named.items() if t.requires_grad}
        torch.manual_seed(_SEED)  # of dropout
        with use(backend), torch.set_grad_enabled(bool(leaves)):
            results = self._attend(tensors, table)
            if leaves:
                grads = torch.autograd.grad(results["out"], list(leaves.values()), self._packed(self.gradient).to(dtype))
                results |= dict(zip(leaves, grads, strict=True))
        return results

    def _attend(self, tensors: list[Tensor], table: Tensor) -> dict[str, Tensor]:
        kind, mask, score = self.kind, self._mask(), self._score(table)
        dropout = 0.1 if kind.has_dropout else 0.0
        wanted: Any = Outputs(lse=True, **{name: True for name in kind.aux.split(",") if name})
        query, key, value = tensors
        if kind.layout == "jagged":
            query, key, value = map(self._packed, tensors)
            end_q, end_kv = (self._ends(n) for n in (kind.q_len, kind.kv_len))
            out, aux = varlen_attn(
                query, key, value, end_q, end_kv, int(end_q.diff().max()), int(end_kv.diff().max()),
                enable_gqa=True, mask=mask, score=score, dropout_p=dropout, return_aux=wanted,
            )  # fmt: skip
            return {"out": out, "lse": aux}
        if kind.layout == "paged":
            key, value, pages, lengths = self._pool(key, value)
            out, aux = paged_attention(query, key, value, pages, lengths, mask=mask, score=score, dropout_p=dropout, return_aux=wanted)
        else:
            if kind.has_blocks:
                sizes = query.shape[0], query.shape[1], kind.q_len, kind.kv_len
                blocks = create_block_mask(masks.causal() if mask is None else mask, *sizes, device=query.device, BLOCK_SIZE=128)
            mask_or_blocks = blocks if kind.has_blocks else mask
            out, aux = attention(query, key, value, mask=mask_or_blocks, score=score, dropout_p=dropout, return_aux=wanted)
        return {"out": out} | {name: getattr(aux, name) for name in ("lse", *filter(None, kind.aux.split(",")))}

    def _mask(self) -> Mask | None:
        ids, keep = self.ids, self.keep
        return {
            "causal": masks.causal(),
            "prefix": masks.causal_lower_right(),
            "window": masks.window(200),
            "document": Mask(lambda b, h, q, k: ids[q] == ids[k]),
            "mask": Mask(lambda b, h, q, k: keep[q, k]),
        }.get(self.kind.variant)

    def _score(self, table: Tensor) -> Score | None:
        learned = self.kind.is_learned
        return {
            "added": Score(lambda s, b, h, q, k: s + table[h] * (k - q) / 64),
            "score": Score(lambda s, b, h, q, k: s * table[h]) if learned else scores.softcap(5.0),
            "pair": Score(lambda s, b, h, q, k: s + table[h, q, k]),
        }.get(self.kind.variant)

    def _packed(self, tensor: Tensor) -> Tensor:
        """[B, H, S, D] as [B * S, H, D], in the jagged layout."""
        return tensor.transpose(1, 2).flatten(0, 1) if self.kind.layout == "jagged" else tensor

    def _ends(self, length: int) -> Tensor:
        """Return the ends of sequences, one of them shorter and one empty."""
        batch = self.tensors[0].shape[0]
        ends = [n * length for n in range(batch)]
        return torch.tensor([*ends, ends[-1] + length // 3, ends[-1] + length // 3, batch * length], device=self.ids.device)

    def _pool(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Keys and values in pages that lie in any order, their table, and the rows' lengths."""
        batch, pages = key.shape[0], -(-self.kind.kv_len // _PAGE)
        order = torch.randperm(batch * pages, generator=torch.Generator().manual_seed(_SEED)).to(key.device)
        pools = []
        for tensor in (key, value):
            full_pages = torch.nn.functional.pad(tensor, (0, 0, 0, pages * _PAGE - self.kind.kv_len))
            rows = full_pages.reshape(*full_pages.shape[:2], pages, _PAGE, -1).transpose(1, 2).flatten(0, 1)
            pools.append(torch.empty_like(rows).index_copy(0, order, rows))
        lengths = torch.full((batch,), self.kind.kv_len, device=key.device)
        lengths[-1] //= 2
        return pools[0], pools[1], order.view(batch, pages), lengths
