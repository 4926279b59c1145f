"""Masks by name. Each returns a `foci.Mask`; combine them with `&`, `|` and `~`.

To add one: a function in one of the modules here, `picklable`, and an entry in that module's `EXAMPLES`.
"""

from __future__ import annotations

from typing import Final

from foci.mask_examples import MaskExample
from foci.masks import neighborhood as _neighborhood
from foci.masks import positional as _positional
from foci.masks import ragged as _ragged
from foci.masks.neighborhood import natten
from foci.masks.positional import (
    block_diffusion,
    causal,
    causal_lower_right,
    dilated_window,
    everything,
    global_window,
    inverse_causal,
    window,
)
from foci.masks.ragged import (
    causal_or_bidirectional,
    dense,
    document,
    document_offsets,
    key_padding,
    padding,
    prefix_lm,
)

__all__ = [
    "block_diffusion",
    "causal",
    "causal_lower_right",
    "causal_or_bidirectional",
    "dense",
    "dilated_window",
    "document",
    "document_offsets",
    "everything",
    "global_window",
    "inverse_causal",
    "key_padding",
    "natten",
    "padding",
    "prefix_lm",
    "window",
]

EXAMPLES: Final[tuple[MaskExample, ...]] = _positional.EXAMPLES + _ragged.EXAMPLES + _neighborhood.EXAMPLES


def __dir__() -> list[str]:
    return sorted(__all__)
