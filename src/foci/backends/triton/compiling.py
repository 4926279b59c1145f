"""New kernels compiled side by side.

What a pass launches is known before any of it runs: tables of tiles, and the kernels that read them. Within `compile_in_parallel` launches
wait, and at its end the kernels that none has met compile in threads of their own, Triton's compiler leaving Python's lock to others.
Beside each compiles the C code that hands it its arguments, which follows from their types alone. Triton's front end, which is Python and
keeps the lock, reads one kernel after the other, the one that takes longest first. Then all is launched in order. Kernels that a later
pass will launch are read after these and not waited for: that pass takes them up where they are.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import triton
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from foci.backends.compile_priority import is_waited_for, submit_elsewhere
from foci.backends.contract import Unbuildable
from foci.backends.triton.compile_subprocess import compile_packed, is_sendable, pack
from foci.compat.triton import COMPILE_OPTIONS, TESTED, async_compile_mode, release

__all__ = ["Waiting", "after_launches", "compile_and_launch", "compile_in_parallel", "is_new", "launch_ahead", "launch_waiting", "waiting"]


class Waiting(NamedTuple):
    """A launch that waits: of what and with what, and what launches it; or one to come, `is_ahead`, whose kernel is compiled for it."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    run: Callable[[], None]
    is_ahead: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """Nearly what Triton compiles it for: its compile-time arguments, which are each one object as long as they are alike."""
        fixed = (id(arg) if _is_one(arg) else arg for arg in self.args if _is_one(arg) or isinstance(arg, bool | str | None))
        return (id(self.function), tuple(self.options.items()), *fixed)


def _is_one(arg: object) -> bool:
    return isinstance(arg, JITFunction) or type(arg).__name__ == "Config"


_queue: ContextVar[list[Waiting] | None] = ContextVar("launches that wait", default=None)
_met: Final[set[tuple[object, ...]]] = set()
_MOST_MET: Final = 4096


def compile_and_launch(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launches as Triton does, which compiles what it has to; returns the compiled kernel.

    Raises:
        Unbuildable: if a release of Triton that foci was not tested with does not compile it. Tested ones raise what they raise.
    """
    if release() in TESTED or not isinstance(function, JITFunction):
        return function[grid](*args, **COMPILE_OPTIONS, **options)
    kind = Waiting(function, args, options, _nothing).kind
    if kind not in _uncompiled:
        try:
            return function[grid](*args, **COMPILE_OPTIONS, **options)
        except Exception as error:
            try:
                function.warmup(*args, grid=grid, **COMPILE_OPTIONS, **options)
            except Exception as again:
                said = str(getattr(again, "error_message", None) or again)  # a CompilationError's text begins with a place
                lines = [*filter(str.strip, said.splitlines()), "no message"]
                _uncompiled[kind] = f"{type(again).__name__}: {lines[0].strip()}"
            if kind not in _uncompiled and not isinstance(error, OutOfResources):
                raise  # it compiles: the launch itself went wrong
            _uncompiled.setdefault(kind, str(error))
    version = ".".join(map(str, release()))
    raise Unbuildable(f"Triton {version}, which foci was not tested with, does not compile {function.__name__}: {_uncompiled[kind]}")


_uncompiled: Final[dict[tuple[object, ...], str]] = {}
"""What went wrong with the kernels that did not compile, so that each is tried once."""


def waiting() -> list[Waiting] | None:
    """Where launches wait; None where they do not."""
    return _queue.get()


def after_launches(action: Callable[[], None]) -> None:
    """Does something once all is launched that waits, if anything does: other threads may find what is kept."""
    queue = _queue.get()
    if queue is None:
        action()
    else:
        queue.append(Waiting(None, (), {}, action))


def launch_ahead(function: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Has a kernel compiled that a later pass will launch, within `compile_in_parallel`; without it nothing happens."""
    queue = _queue.get()
    if queue is not None:
        queue.append(Waiting(function, args, options, _nothing, is_ahead=True))


def _nothing() -> None:
    """A launch to come is none now."""


def is_new() -> bool:
    """Whether a launch waits whose kernel none has met."""
    return any(isinstance(each.function, JITFunction) and each.kind not in _met for each in _queue.get() or ())


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Launches by a recorder wait for the end of the block. Nothing in it may look at what they make."""
    if _queue.get() is not None:
        yield
        return
    mine: list[Waiting] = []
    before = _queue.set(mine)
    try:
        yield
        launch_waiting(mine)
    finally:
        _queue.reset(before)


def launch_waiting(queue: list[Waiting]) -> None:
    """Compiles what is new and launches all that waits, in order."""
    ready, queue[:] = list(queue), []
    # one that both waits and is ahead is waited for
    kernels = [each for each in ready if isinstance(each.function, JITFunction)]
    new = {each.kind: each for each in sorted(kernels, key=lambda each: each.is_ahead, reverse=True)}
    for kind in _met & new.keys():
        del new[kind]
    if new:
        with _short_gil_interval():
            _compile(list(new.values()))
        if len(_met) > _MOST_MET:
            _met.clear()
        _met.update(kind for kind, each in new.items() if not each.is_ahead)
    for each in ready:
        each.run()


def _compile(new: Sequence[Waiting]) -> None:
    """Kernels go to Triton's cache; one that fails is left to its launch, which says why."""
    active_mode = async_compile_mode()
    if active_mode is None or active_mode.get() is not None:
        return  # each compiles when it is launched
    pool = ThreadPoolExecutor(2 * len(new))
    beside = _Beside(pool)
    mode = _ParallelCompileMode(beside)
    token = active_mode.set(mode)
    try:
        # a pass ends with what takes longest
        for each in reversed([each for each in new if not each.is_ahead]):
            each.function.warmup(*each.args, grid=(1,), **COMPILE_OPTIONS, **each.options)
        if len(os.sched_getaffinity(0)) < 2 * len(new):
            mode.finish()
        beside.wait_until_read()
        mode.is_ahead = True
        for each in reversed([each for each in new if each.is_ahead]):
            with suppress(Exception):
                each.function.warmup(*each.args, grid=(1,), **COMPILE_OPTIONS, **each.options)
    finally:
        active_mode.reset(token)
        pool.shutdown(wait=False)
    mode.finish()


@contextmanager
def _short_gil_interval() -> Iterator[None]:
    """Python's lock goes round faster: a kernel's compiler asks for it a hundred times, for moments, and each time would wait for 5 ms
    where another kernel is read. Where nobody waits for the kernels, whatever else runs keeps the lock as long as it always does."""
    if not is_waited_for():
        yield
        return
    with _interval_lock:
        _saved_intervals.append(sys.getswitchinterval())
        sys.setswitchinterval(min(_saved_intervals[0], 2e-4))
    try:
        yield
    finally:
        with _interval_lock:
            before = _saved_intervals[0]
            _saved_intervals.pop()
            if not _saved_intervals:
                sys.setswitchinterval(before)


_interval_lock: Final = threading.Lock()
_saved_intervals: Final[list[float]] = []
"""What the interval was: first, before any."""


class _ParallelCompileMode:
    """Stands in for Triton's AsyncCompileMode, which waits for all that it is given: takes up what was begun ahead, and leaves what it
    begins ahead to the pass that launches it."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._waited: dict[str, tuple[Future[Any], Callable[[Any], None]]] = {}
        self.is_ahead = False

    def submit(self, key: str, compile_it: Callable[[], Any], finish: Callable[[Any], None], *_: object) -> None:
        """Compile a kernel in the background, unless that has begun.

        Args:
            key: Triton's cache key of the kernel.
            compile_it: compiles the kernel.
            finish: stores the compiled kernel where its launch looks it up. Not called for a kernel that is compiled ahead.
            _: Triton 3.8 and later pass a clean-up as well; there is nothing to clean up here.
        """
        if key in self._waited:
            return
        begun = _begun.pop(key, None)
        future = self._executor.submit(compile_it) if begun is None else begun
        if self.is_ahead:
            _begun[key] = future
            if len(_begun) > _MOST_BEGUN:
                _begun.popitem(last=False)
        else:
            self._waited[key] = (future, finish)

    def finish(self) -> None:
        """Waits for what is launched now."""
        while self._waited:
            _, (future, finish) = self._waited.popitem()
            with suppress(Exception):
                finish(future.result())


_begun: Final[OrderedDict[str, Future[Any]]] = OrderedDict()
"""Kernels that compile ahead of the pass that launches them. Those of passes that never come are forgotten, the oldest first."""
_MOST_BEGUN: Final = 16


class _Beside(Executor):
    """Hands a compilation to a pool, with another of the launcher that it will need."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self._read: list[threading.Event] = []

    def submit(self, compile_it: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Compile a kernel in the pool. `wait_until_read` waits for the part of it that runs in Python."""
        is_read = threading.Event()
        made_of = _compile_inputs(compile_it)
        src = made_of.get("src")
        sent = _sent(made_of)
        if src is not None:
            src.make_ir = functools.partial(_in_turn, src.make_ir, is_read)
        if src is not None and release() == (3, 6):
            self._pool.submit(_build_launcher, src)
        if sent is None:
            future = self._pool.submit(compile_it, *args, **options)
        else:
            is_read.set()
            future = self._pool.submit(_found, sent, compile_it)
        future.add_done_callback(lambda _: is_read.set())
        self._read.append(is_read)
        return future

    def wait_until_read(self) -> None:
        """Waits until Triton's front end, which is Python, is through with all there is, or the compiler where nothing tells."""
        while self._read:
            self._read.pop().wait()


_front_end: Final = threading.Lock()


def _in_turn(make_ir: Callable[..., Any], is_read: threading.Event, *args: Any, **options: Any) -> Any:
    with _front_end:
        try:
            return make_ir(*args, **options)
        finally:
            is_read.set()


def _compile_inputs(compile_it: Callable[..., Any]) -> dict[str, Any]:
    """What Triton will compile, `src`, and with what, by Triton's names; without those that a release hides."""
    names, cells = compile_it.__code__.co_freevars, compile_it.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


def _sent(made_of: dict[str, Any]) -> Future[Any] | None:
    """A compilation in another process, where somebody does it; None where this one is to do it."""
    submit = submit_elsewhere()
    if submit is None or not made_of.keys() >= {"src", "target", "options", "env_vars"} or not is_sendable(made_of["env_vars"]):
        return None
    with suppress(Exception):  # no other process can make it, or none is left
        return submit(compile_packed, pack(made_of["src"], made_of["target"], made_of["options"].__dict__))
    return None


_LONGEST: Final = 60.0
"""Seconds that another process has for a kernel, those before it included."""


def _found(sent: Future[Any], compile_it: Callable[[], Any]) -> Any:
    """The kernel, out of Triton's cache on disk; compiled here where the other process failed, died, was too slow, or made another."""
    with suppress(Exception):
        sent.result(_LONGEST)
    return compile_it()


def _build_launcher(src: Any) -> None:
    """Leaves the launcher's C code compiled in Triton's cache on disk."""
    described: list[dict[str, Any]] = [{} for kind in src.signature.values() if str(kind).startswith("tensordesc")]
    without = SimpleNamespace(
        tensordesc_meta=described, num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
        profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
    )  # fmt: skip
    triton.runtime.driver.active.launcher_cls(src, without)
