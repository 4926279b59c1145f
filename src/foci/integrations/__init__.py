"""foci inside other code: torch's own entry points (`foci.patch`), Hugging Face transformers (`register_transformers`), torch's registry
of flash attention implementations (`register_flash_attention`)."""

from __future__ import annotations

import importlib

__all__ = ["register_flash_attention", "register_transformers"]


def __dir__() -> list[str]:
    return sorted(__all__)


def register_flash_attention() -> None:
    """Makes "FOCI" a flash attention implementation that torch can activate; more calls change nothing.

    `torch.nn.attention.activate_flash_attention_impl("FOCI")` then has foci compute what `scaled_dot_product_attention`, where it
    takes flash attention, and `varlen_attn` compute on CUDA tensors, with gradients; `restore_flash_attention_impl()` ends it.

    Raises:
        RuntimeError: if this torch has no such registry; torch 2.11 to 2.13 have.

    Example:
        >>> import foci.integrations, torch
        >>> foci.integrations.register_flash_attention()
        >>> "FOCI" in torch.nn.attention.list_flash_attention_impls()
        True
    """
    importlib.import_module("foci.integrations.flash").register()


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
