"""foci inside other code: torch's own entry points (`foci.patch`), Hugging Face transformers (`register_transformers`)."""

from __future__ import annotations

import importlib

__all__ = ["register_transformers"]


def register_transformers() -> None:
    """Makes `attn_implementation="foci"` known to Hugging Face transformers; more calls change nothing.

    The same as `import foci.integrations.transformers`.

    Raises:
        ImportError: if transformers is not installed (the extra `foci[hf]`).

    Example:
        >>> import foci.integrations
        >>> foci.integrations.register_transformers()
    """
    importlib.import_module("foci.integrations.transformers").register()
