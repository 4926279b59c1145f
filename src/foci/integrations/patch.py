"""`foci.patch()`: torch's attention functions become foci's, in code that nobody changes.

Two designs were weighed. A `TorchFunctionMode` sees each call of `scaled_dot_product_attention`, however the caller came
by the function. But it runs Python for every torch call in the block, reaches only the thread that entered it, does not
see `flex_attention`, `create_block_mask` and `varlen_attn`, which are Python functions without torch's override protocol,
and not the call inside `torch.nn.functional.multi_head_attention_forward` either, since a mode is off while it handles a
function that calls others. Module globals are what is replaced here instead: each module that refers to one of torch's
functions by a global name, as `torch.nn.functional` itself does and every `from torch.nn.functional import
scaled_dot_product_attention` does, refers to foci's. It costs nothing per call, holds in all threads, and is what torch.compile
follows and guards.

A pass over all loaded modules takes 15 to 40 ms. So the places found are kept, and the pass is made again only when a module was
imported, a place holds something else, or the number of references to one of torch's functions has changed: whoever gives one a new name
adds a reference.
`__main__` is small and searched each time.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, TracebackType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from foci import functional, mask_mods
from foci.block_mask import DEFAULT_BLOCK
from foci.variant import Mask

__all__ = ["Patch", "patch"]

Function = Callable[..., Any]


# torch.jit.script compiles this function, to torch's operator, as it calls no Python. So it has no keyword-only arguments and names no
# type of foci: attn_mask may be a Mask.
def _scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return torch.ops.aten.scaled_dot_product_attention(  # type: ignore[no-any-return]
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    else:  # TorchScript leaves out a branch, but not what follows a return
        return functional.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Function | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    return functional.flex_attention(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


# A function of its own, as the others: what stands in place of torch's is put back wherever it is found, in the user's modules too.
def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    return functional.varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux=return_aux, scale=scale, window_size=window_size,
        enable_gqa=enable_gqa, seqused_k=seqused_k, block_table=block_table, num_splits=num_splits,
    )  # fmt: skip


def _create_block_mask(
    mask_mod: Function,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | int | None = None,
    BLOCK_SIZE: int | tuple[int, int] = DEFAULT_BLOCK,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> Any:
    """foci's analysis in torch's class, so that `isinstance` and every method are as the code expects."""
    if torch.compiler.is_dynamo_compiling():
        return Mask(mask_mod)  # the analysis follows at run time, with the lengths and values of the call
    from torch.nn.attention.flex_attention import BlockMask

    block_mask = mask_mods.create_block_mask(
        mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, _compile, separate_full_blocks, compute_dq_write_order, dq_kv_order
    )
    return BlockMask.from_kv_blocks(
        block_mask.kv_num_blocks,
        block_mask.kv_indices,
        block_mask.full_kv_num_blocks,
        block_mask.full_kv_indices,
        block_mask.BLOCK_SIZE,
        mask_mod,
        block_mask.seq_lengths,
    )


_ROUTES: Final[tuple[tuple[str, str, Function], ...]] = (
    ("torch.nn.functional", "scaled_dot_product_attention", _scaled_dot_product_attention),
    ("torch.nn.attention.flex_attention", "flex_attention", _flex_attention),
    ("torch.nn.attention.flex_attention", "create_block_mask", _create_block_mask),
    ("torch.nn.attention.varlen", "varlen_attn", _varlen_attn),
)
"""Module, name, and what takes its place."""

_UNTOUCHED: Final = ("foci.", "torch._C", "torch._dynamo", "torch._inductor", "torch.overrides")
"""foci's own functions, and where torch finds its operators by name or identity."""

_lock = threading.RLock()
_starts = 0


class _Place(NamedTuple):
    """A global that is one of torch's functions."""

    names: dict[str, Any]
    """Globals of a module."""
    name: str
    old: Any
    new: Function


class _Search:
    """The result of the last pass over all modules: what it found, and how many references there were to what it looked for."""

    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.torchs: list[Any] = []
        """torch's functions, and what torch.compile made of them."""
        self.torchs_snapshot: list[int] = []
        """Of these while they are in their places."""
        self.focis_snapshot: list[int] = []
        """Of foci's functions while they are."""


_search = _Search()
_FOCIS: Final = [function for _, _, function in _ROUTES]


class Patch:
    """The switch that `patch` returns: it starts and stops the routing, by itself or as a context manager.

    Starts are counted over the process: torch's functions come back when each start has met its stop.
    """

    def __init__(self) -> None:
        self._own = 0

    def start(self) -> Patch:
        """Routes torch's functions to foci until `stop`.

        Example:
            >>> import foci
            >>> routing = foci.patch().start()
            >>> routing.stop()
        """
        global _starts
        with _lock:
            if _starts == 0:
                _replace()
            _starts += 1
            self._own += 1
        return self

    def stop(self) -> None:
        """Takes back one start.

        Raises:
            RuntimeError: if this object was not started, or was stopped as often already.
        """
        global _starts
        with _lock:
            if self._own == 0:
                raise RuntimeError("foci.patch(): stop without a start")
            self._own -= 1
            _starts -= 1
            if _starts == 0:
                _restore()

    def __enter__(self) -> Patch:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()


def patch() -> Patch:
    """Routes torch's attention functions to foci: in a `with` block, or from `start()` to `stop()`.

    `torch.nn.functional.scaled_dot_product_attention`, `torch.nn.attention.flex_attention.flex_attention` and
    `create_block_mask`, and `torch.nn.attention.varlen.varlen_attn` are replaced in every module that has them as a global,
    also `flex_attention = torch.compile(flex_attention)`. What foci refuses is foci's error: nothing falls back to torch.

    It holds for all threads of the process, so start and stop it where no other thread counts on torch's own functions.
    Copies out of reach of module globals stay torch's: in closures, default arguments, `functools.partial`, class
    attributes, and `torch._C._nn`. So do kernels that call no Python function: the fast path of nn.TransformerEncoderLayer
    in eval mode, and nn.MultiheadAttention with need_weights=True.

    Returns:
        A `Patch`; nothing is routed before its `start` or `with`.

    Example:
        >>> import foci, torch
        >>> layer = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
        >>> with foci.patch(), foci.observe() as log:
        ...     out = layer(torch.randn(1, 8, 16))
        >>> len(log.calls)
        1
    """
    return Patch()


def _globals() -> Iterator[dict[str, Any]]:
    for name, module in list(sys.modules.items()):
        names = getattr(module, "__dict__", None)
        if isinstance(names, dict) and not name.startswith(_UNTOUCHED):
            yield names


def _snapshot(objects: list[Any]) -> list[int]:
    """How many references there are to each, and how many modules. Called where no local variable holds one of the objects."""
    return [len(sys.modules), *[sys.getrefcount(o) for o in objects]]


def _is_unchanged(objects: list[Any], snapshot: list[int], *, field: str) -> bool:
    """Whether there are as many references as in the snapshot, and each place holds its `field`: a name may have moved elsewhere."""
    return _snapshot(objects) == snapshot and all(place.names.get(place.name) is getattr(place, field) for place in _search.places)


def _find_places(modules: Iterable[dict[str, Any]], routes: dict[int, Function]) -> list[_Place]:
    """Where these modules have functions of torch, by their ids in `routes`."""
    places = []
    for names in modules:
        for name, value in list(names.items()):
            new = routes.get(id(value))
            if new is None and type(value) is FunctionType:
                # torch.compile(flex_attention): foci's is fused as it is
                new = routes.get(id(value.__dict__.get("_torchdynamo_orig_callable")))
            if new is not None:
                places.append(_Place(names, name, value, new))
    return places


def _replace() -> None:
    is_known = _search.torchs != [] and _is_unchanged(_search.torchs, _search.torchs_snapshot, field="old")
    _search_for_torchs(only_main=is_known)
    _put("old", "new")
    _search.focis_snapshot = _snapshot(_FOCIS)


def _restore() -> None:
    if not _is_unchanged(_FOCIS, _search.focis_snapshot, field="new"):
        _search_for_focis()
    _put("new", "old")
    _search.torchs_snapshot = _snapshot(_search.torchs)


def _search_for_torchs(*, only_main: bool) -> None:
    # torch.compile looks torch's functions up by name once per process: before other functions go by these names.
    importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
    originals = [getattr(importlib.import_module(module), name) for module, name, _ in _ROUTES]
    routes = {id(original): function for original, function in zip(originals, _FOCIS, strict=True)}
    if only_main and all(old is new for old, new in zip(_search.torchs, originals, strict=False)):
        main = _find_places([vars(sys.modules["__main__"])], routes)
        known = {(id(place.names), place.name) for place in _search.places}
        _search.places += [place for place in main if (id(place.names), place.name) not in known]
    else:
        _search.places = _find_places(_globals(), routes)
    compiled = {id(place.old): place.old for place in _search.places if id(place.old) not in routes}
    _search.torchs = [*originals, *compiled.values()]


def _search_for_focis() -> None:
    """Modules that were imported meanwhile took foci's functions for torch's."""
    originals = {id(function): original for function, original in zip(_FOCIS, _search.torchs, strict=False)}
    known = {(id(place.names), place.name) for place in _search.places}
    for names in _globals():
        for name, value in list(names.items()):
            if id(value) in originals and (id(names), name) not in known:
                _search.places.append(_Place(names, name, originals[id(value)], value))


def _put(before: str, after: str) -> None:
    """In each place the field `after` for the field `before`, where that still stands."""
    for place in _search.places:
        if place.names.get(place.name) is getattr(place, before):
            place.names[place.name] = getattr(place, after)
