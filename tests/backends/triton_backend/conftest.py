"""Fixtures of the tests of compilation."""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from compile_events import events  # noqa: F401
