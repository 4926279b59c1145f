"""Masks by name. Each returns a `foci.Mask`; combine them with `&`, `|` and `~`.

To add one is to touch one module here: a `picklable` function, its name in `__all__`, its entry in `DEFINITIONS`, an example in `EXAMPLES`.
"""

from __future__ import annotations

from typing import Final

from foci.mask_examples import Definition, MaskExample
from foci.masks import neighborhood as _neighborhood
from foci.masks import positional as _positional
from foci.masks import ragged as _ragged
from foci.masks.neighborhood import *
from foci.masks.positional import *
from foci.masks.ragged import *

__all__: list[str] = []
__all__ += _positional.__all__
__all__ += _ragged.__all__
__all__ += _neighborhood.__all__

EXAMPLES: Final[tuple[MaskExample, ...]] = _positional.EXAMPLES + _ragged.EXAMPLES + _neighborhood.EXAMPLES
DEFINITIONS: Final[dict[str, Definition]] = {**_positional.DEFINITIONS, **_ragged.DEFINITIONS, **_neighborhood.DEFINITIONS}


def __dir__() -> list[str]:
    return sorted(__all__)
