"""foci: any attention, one fused kernel, and why.

Write attention as a formula, a mask, a score function, packed or padded; foci plans it, runs it forward and backward, and
says what it did.

Example:
    >>> import foci, torch
    >>> q = torch.randn(1, 4, 256, 32)
    >>> out = foci.attention(q, q, q, mask=foci.masks.causal() & foci.masks.window(64), score=foci.scores.softcap(30.0))
"""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from foci import masks, scores
from foci.api import AuxOutput, AuxRequest, Explanation, attention, explain
from foci.backends import register as register_backend
from foci.backends import unregister as unregister_backend
from foci.block_mask import BlockMask
from foci.context import observe, use
from foci.functional import causal_lower_right, causal_upper_left, flex_attention, scaled_dot_product_attention, varlen_attn
from foci.ir.trace import TraceError
from foci.paged import paged_attention
from foci.planner import NoViableBackend
from foci.torch_compile import register as _register_torch_compile
from foci.variant import Mask, Score, kv_len, q_len

if TYPE_CHECKING:
    from foci.fusion.compiler import compile
    from foci.integrations.patch import patch
    from foci.mask_mods import and_masks, create_block_mask, create_mask, or_masks

try:
    __version__ = importlib.metadata.version("foci")
except importlib.metadata.PackageNotFoundError:  # on the path without being installed
    __version__ = "0+unknown"

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Explanation",
    "Mask",
    "NoViableBackend",
    "Score",
    "TraceError",
    "and_masks",
    "attention",
    "causal_lower_right",
    "causal_upper_left",
    "compile",
    "create_block_mask",
    "create_mask",
    "explain",
    "flex_attention",
    "kv_len",
    "masks",
    "observe",
    "or_masks",
    "paged_attention",
    "patch",
    "q_len",
    "register_backend",
    "scaled_dot_product_attention",
    "scores",
    "unregister_backend",
    "use",
    "varlen_attn",
]

# Imported when asked for: most need Dynamo, which takes ten times as long to import as all of foci.
_LATER = {
    "and_masks": "foci.mask_mods",
    "compile": "foci.fusion.compiler",
    "create_block_mask": "foci.mask_mods",
    "create_mask": "foci.mask_mods",
    "distributed": "foci.distributed",
    "fusion": "foci.fusion",
    "integrations": "foci.integrations",
    "kernel_packs": "foci.kernel_packs",
    "nn": "foci.nn",
    "or_masks": "foci.mask_mods",
    "patch": "foci.integrations.patch",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'foci' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = globals()[name] = module if module.__name__ == f"foci.{name}" else getattr(module, name)
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_LATER})


_register_torch_compile()
