"""Modules of foci.compat as they are where torch lacks the names that they look up."""

import importlib.util
import sys

import pytest

from foci.compat import lookup


def load_without(name, *patterns):
    """A second copy of the module `foci.compat.NAME`, made while the names that match a pattern are taken away."""
    spec = importlib.util.find_spec(f"foci.compat.{name}")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "_patterns", list(patterns))
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
    return module
