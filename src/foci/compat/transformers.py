"""What Hugging Face transformers keeps private: the collector of layer outputs, which its releases from 5.0 on have."""

from __future__ import annotations

from typing import Any, Final

import transformers

from foci.compat.lookup import find

__all__ = ["ACTIVE_COLLECTOR"]

ACTIVE_COLLECTOR: Final[Any | None] = (
    find(
        "transformers.utils.output_capturing._active_collector",
        without="returns attention weights to models that ask each layer for them, and to no others",
        seen=("5.0", "5.0"),
    )
    if int(transformers.__version__.partition(".")[0]) >= 5
    else None
)
"""A context variable: the outputs that are collected now, by name. None where transformers tells every layer what to return."""
