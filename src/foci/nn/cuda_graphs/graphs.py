"""CUDA graphs of a function, recorded into memory that graphs which never hold anything at one time share."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from foci.compat.cuda import is_capturing, unowned

__all__ = ["CUDA", "Engine", "Recorded"]

Made: TypeAlias = list[Tensor | None]


class Recorded(NamedTuple):
    """Work that is run again as it was recorded.

    Attributes:
        replay: runs it.
        inputs: memory that it reads, to be written before.
        outputs: memory that it writes, to be read before anything else of its pool is run.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: Made


class Engine(Protocol):
    """The operations that record and replay a CUDA graph."""

    def takes(self, tensor: Tensor) -> bool:
        """Whether the tensor is where this engine records."""

    def pool(self) -> Any:
        """Memory for graphs of which one at a time holds something."""

    def warm_up(self, run: Callable[[], object]) -> None:
        """Runs it, until nothing is left to compile.

        Raises:
            RuntimeError: for work that waits for the device.
        """

    def record(self, pool: Any, samples: Sequence[Tensor], function: Callable[[list[Tensor]], Made]) -> Recorded:
        """Records a function of tensors that lie as the samples do."""


class _Pool(NamedTuple):
    """Memory, and the stream that its graphs are recorded on: libraries keep working memory for each stream, in the first one's pool."""

    handle: Any
    stream: torch.cuda.Stream


class _Graph:
    """A CUDA graph that is not freed during a capture, which CUDA would invalidate. The garbage collector may drop it at any time, and in
    any thread, such as one that compiles for the thread that captures."""

    def __init__(self) -> None:
        _unfreed.clear()
        self.graph: Any = torch.cuda.CUDAGraph()
        self._thread = threading.get_ident()

    def replay(self) -> None:
        self.graph.replay()

    def __del__(self) -> None:
        # whether another thread captures, only that thread can ask
        if not sys.is_finalizing() and (is_capturing() or threading.get_ident() != self._thread):
            _unfreed.append(self.graph)


_unfreed: Final[list[Any]] = []
"""CUDA graphs that were dropped during a capture, or in another thread than their own; the next recording frees them."""


class _CudaGraphs:
    """torch's CUDA graphs."""

    def takes(self, tensor: Tensor) -> bool:
        return tensor.is_cuda

    def pool(self) -> Any:
        return _Pool(torch.cuda.graph_pool_handle(), torch.cuda.Stream())  # type: ignore[no-untyped-call]

    def warm_up(self, run: Callable[[], object]) -> None:
        run()
        mode = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode")
            torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        except RuntimeError as error:
            if "synchronizing" not in str(error):
                raise
            raise RuntimeError(
                "the module waits for the device, or its attention does on this backend (see foci.explain), which no CUDA graph can do; "
                "foci.nn.release(module) computes it as it was"
            ) from error
        finally:
            torch.cuda.set_sync_debug_mode(mode)

    def record(self, pool: Any, samples: Sequence[Tensor], function: Callable[[list[Tensor]], Made]) -> Recorded:
        graph = _Graph()
        # threads of their own may pin memory meanwhile
        with torch.cuda.graph(graph.graph, pool=pool.handle, stream=pool.stream, capture_error_mode="thread_local"):
            inputs = [torch.empty_like(sample) for sample in samples]
            outputs = function(inputs)
            recorded = Recorded(graph.replay, [unowned(t) for t in inputs], [None if t is None else unowned(t) for t in outputs])
            del inputs, outputs
        return recorded


CUDA: Engine = _CudaGraphs()
