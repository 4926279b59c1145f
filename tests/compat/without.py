"""Modules of foci.compat as they are where torch lacks the names that they look up."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch._dynamo  # noqa: F401  # imported with all names: foci enters its backend when that happens

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


def run_without(patterns, code):
    """Runs code in a process of its own, where the names that match a pattern are taken away. It may use `assert_found(prefix, is_found)`."""
    check = '''
def assert_found(prefix, is_found):
    """Of the private names that begin so: some were looked up, and all of them are there, or none."""
    from foci.compat.lookup import NAMES
    assert {name.is_found for path, name in NAMES.items() if path.startswith(prefix)} == {is_found}, [*NAMES]
'''
    environment = {**os.environ, "FOCI_WITHOUT": patterns}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", check + code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
