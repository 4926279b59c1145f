"""Extension of griffe: a section `Example:` of a docstring is a doctest, as `Examples:` is, and not an admonition."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section before mkdocstrings parses it."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """For each module, class, function and attribute that griffe has read."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
