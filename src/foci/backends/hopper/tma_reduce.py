"""Adding a tile in shared memory to one of a tensor by TMA.

Triton 3.6 and 3.7 compile the copy, but their Gluon has no name for it; later releases call it `tma.async_atomic_add`. Where a release has
neither, `HAS_ADD` is false, and no kernel that adds may be launched.
"""

from foci.compat.gluon import HAS_ADD, begin_add

__all__ = ["HAS_ADD", "begin_add"]
