"""Compiles the new kernels of a pass in parallel.

All launches of a pass are known before the first one runs. Within `compile_in_parallel` they wait in a queue. At its end one new
kernel that takes long compiles in this process at once, and the others in worker processes. Then all launches run in order. Kernels that
a later pass will launch are started after these and not waited for; that pass waits for them.

On a few cores there are no workers, and each kernel compiles in a thread of its own, since Triton's compiler releases the GIL. Its front
end is Python and holds the GIL, so it processes one kernel after another.
"""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from contextvars import ContextVar
from enum import IntEnum
from types import NoneType
from typing import Any, Final, NamedTuple

import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

from foci.backends.compile_lock import compiling, locked
from foci.backends.compile_priority import Submit, is_stopping, is_waited_for, submit_elsewhere
from foci.backends.compile_workers import Job, available_cores, compiles_beside, waited_workers
from foci.backends.contract import Unbuildable
from foci.backends.gpu.caller_waits import caller_waits
from foci.backends.gpu.compile_subprocess import compile_packed, is_sendable, pack
from foci.backends.gpu.kernel_store import note, restore
from foci.backends.gpu.toolchain import wait_until_prepared
from foci.compat.jit import called_functions
from foci.compat.triton import COMPILE_OPTIONS, TESTED, KernelSource, async_compile_mode, kernel_source, release

__all__ = [
    "Turn",
    "Waiting",
    "after_launches",
    "built",
    "compile_and_launch",
    "compile_in_parallel",
    "is_new",
    "launch_ahead",
    "launch_waiting",
    "wait_for_ahead",
    "waiting",
]


class Turn(IntEnum):
    """Which pass launches a kernel, in the order in which kernels begin to compile."""

    NOW = 0  # this pass, which waits for the kernel; all others are compiled ahead
    FORWARD = 1  # or any other pass to come
    BACKWARD = 2  # of this call
    OTHER_LENGTHS = 3


class Waiting(NamedTuple):
    """A launch in the queue. In its turn `run` launches the kernel; ahead of it the kernel is only compiled."""

    function: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    run: Callable[[], None]
    turn: Turn = Turn.NOW

    @property
    def is_ahead(self) -> bool:
        """Whether a later pass launches the kernel."""
        return self.turn is not Turn.NOW

    @property
    def kind(self) -> tuple[object, ...]:
        """Approximate specialization key: function, options, compile-time arguments, and which others are absent. Functions and
        configurations count by identity, since equal ones are one object."""
        fixed = (_fixed_part(arg, is_constant=param.is_constexpr) for arg, param in zip(self.args, self.function.params, strict=False))
        return (id(self.function), tuple(self.options.items()), *fixed)


def _fixed_part(arg: object, *, is_constant: bool) -> object:
    if isinstance(arg, JITFunction) or type(arg).__name__ == "Config":
        return id(arg)
    if isinstance(arg, tl.constexpr):
        return arg.value
    if isinstance(arg, tuple):
        return tuple(_fixed_part(part, is_constant=is_constant) for part in arg)
    return arg if is_constant or type(arg) in _COMPILE_TIME else ...


_COMPILE_TIME: Final = (bool, str, NoneType)
"""Types whose values a kernel is compiled for, among those of arguments that are not constants."""


_queue: ContextVar[list[Waiting] | None] = ContextVar("launches that wait", default=None)
_met: Final[set[tuple[object, ...]]] = set()
_MOST_MET: Final = 4096


def compile_and_launch(function: Any, grid: tuple[int, ...], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Launch through Triton, which compiles the kernel if it is new; return the compiled kernel.

    Raises:
        Unbuildable: if a release of Triton that foci was not tested with does not compile it. Errors of tested releases pass through.
    """
    return built(function, args, options, lambda: function[grid](*args, **COMPILE_OPTIONS, **options))


def built(function: Any, args: tuple[Any, ...], options: dict[str, Any], build: Callable[[], Any]) -> Any:
    """Return what `build` returns, which compiles a kernel for these arguments.

    Raises:
        Unbuildable: if a release of Triton that foci was not tested with does not compile it. Errors of tested releases pass through.
    """
    if release() in TESTED or not isinstance(function, JITFunction):
        return build()
    kind = Waiting(function, args, options, _nothing).kind
    if kind not in _uncompiled:
        try:
            return build()
        except Exception as error:
            try:
                function.warmup(*args, grid=(1,), **COMPILE_OPTIONS, **options)
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
"""Errors of kernels that did not compile, so that each is tried once."""


def waiting() -> list[Waiting] | None:
    """Return the queue of launches; None outside of `compile_in_parallel`."""
    return _queue.get()


def after_launches(action: Callable[[], None]) -> None:
    """Run an action after all queued launches; at once if there is no queue. Results are cached this way: other threads must not find
    them before the kernels that compute them are launched."""
    queue = _queue.get()
    if queue is None:
        action()
    else:
        queue.append(Waiting(None, (), {}, action))


def launch_ahead(function: Any, args: tuple[Any, ...], options: dict[str, Any], turn: Turn) -> None:
    """Queue the compilation of a kernel that a later pass will launch. Does nothing outside of `compile_in_parallel`."""
    queue = _queue.get()
    if queue is not None:
        queue.append(Waiting(function, args, options, _nothing, turn))


def _nothing() -> None:
    """Placeholder for the launch of a kernel that is only compiled."""


def is_new() -> bool:
    """Whether a queued launch has a kernel that was never launched before."""
    return any(isinstance(each.function, JITFunction) and each.kind not in _met for each in _queue.get() or ())


@contextmanager
def compile_in_parallel() -> Iterator[None]:
    """Queue launches by recorders until the end of the block. Code inside must not read their results."""
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
    """Compile the new kernels of a queue, and launch everything in it, in order."""
    ready, queue[:] = list(queue), []
    # a kernel that is both to be launched and to be compiled ahead is waited for
    kernels = [each for each in ready if isinstance(each.function, JITFunction)]
    new = {each.kind: each for each in sorted(kernels, key=lambda each: each.turn, reverse=True)}
    for kind in _met & new.keys():
        del new[kind]
    if new:
        wait_until_prepared()
        with caller_waits():
            _compile(list(new.values()))
        if len(_met) > _MOST_MET:
            _met.clear()
        _met.update(kind for kind, each in new.items() if not each.is_ahead)
    for each in ready:
        each.run()


def _compile(new: Sequence[Waiting]) -> None:
    """Compile kernels into Triton's cache. An error is ignored here: the launch compiles again and raises it."""
    active_mode = async_compile_mode()
    if active_mode is None or active_mode.get() is not None:
        return  # each compiles when it is launched
    names = dict.fromkeys(str(each.function.__name__) for each in new if not each.is_ahead)
    what = f"{len(new)} kernels: {', '.join(names)}" if len(new) > 1 else f"the kernel {', '.join(names)}"
    # without names all kernels are for later passes, and no call waits here
    with compiling(what) if names else nullcontext():
        _compile_side_by_side(new, active_mode)


def _compile_side_by_side(new: Sequence[Waiting], active_mode: ContextVar[Any]) -> None:
    pool, pool_ahead = ThreadPoolExecutor(2 * len(new)), ThreadPoolExecutor(max(1, available_cores() // 4))
    in_background = submit_elsewhere()
    beside = _Beside(pool, in_background or (waited_workers() if is_waited_for() else None))
    mode = _ParallelCompileMode(beside)
    token = active_mode.set(mode)
    ordered = sorted(new, key=lambda each: (each.turn, -_code_length(each.function)))
    # workers take a moment to start, so one kernel begins here at once: a backward's, for which a training step waits longest
    here = None if in_background else next((each for each in ordered if each.turn is Turn.BACKWARD), ordered[0])
    try:
        for each in ordered:
            if each.is_ahead and not mode.is_ahead:
                if not compiles_beside():
                    mode.finish()
                if beside.submit is None:
                    beside.wait_until_read()
                mode.is_ahead, beside.pool = True, pool_ahead
            if each.is_ahead and is_stopping():
                break
            beside.stays = each is here
            with suppress(Exception) if each.is_ahead else nullcontext():
                each.function.warmup(*each.args, grid=(1,), **COMPILE_OPTIONS, **each.options)
    finally:
        active_mode.reset(token)
        pool.shutdown(wait=False)
        pool_ahead.shutdown(wait=False)
    mode.finish()


def _code_length(function: Any) -> int:
    """Bytes of Python's code of a kernel, with all that it calls: which of two kernels takes longer to compile."""
    return sum(len(each.__code__.co_code) for each in called_functions(function.fn))


class _ParallelCompileMode:
    """Replaces Triton's AsyncCompileMode, which waits for every kernel. It reuses compilations that were begun ahead, and does not wait for
    those that it begins ahead."""

    def __init__(self, beside: _Beside) -> None:
        self._beside = beside
        self._waited: dict[str, tuple[Future[Any] | _WorkerKernel, Callable[[Any], None]]] = {}
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
        if isinstance(begun, _WorkerKernel) and not self.is_ahead and begun.cancel():
            begun = None  # no worker has taken it: it begins anew, for those who wait
        future = self._beside.begin(key, compile_it) if begun is None else begun
        if self.is_ahead:
            _begun[key] = future
            if len(_begun) > _MOST_BEGUN:
                _begun.popitem(last=False)
        else:
            self._waited[key] = (future, finish)

    def finish(self) -> None:
        """Wait for the kernels of this pass."""
        while self._waited:
            _, (future, finish) = self._waited.popitem()
            with suppress(Exception):
                finish(future.result())


_begun: Final[OrderedDict[str, Future[Any] | _WorkerKernel]] = OrderedDict()
"""Compilations begun ahead of the pass that launches the kernel; the oldest are dropped."""
_MOST_BEGUN: Final = 128


def wait_for_ahead() -> None:
    """Wait for all kernels that compile ahead."""
    for future in list(_begun.values()):
        with suppress(Exception):  # the pass that launches it raises the error
            future.result()


class _Beside:
    """Begins compilations of kernels, in workers or in a pool of threads."""

    def __init__(self, pool: Executor, submit: Submit | None) -> None:
        self.pool = pool
        self.submit = submit
        self.stays = False  # whether the next kernel compiles in this process, though there are workers
        self._read: list[threading.Event] = []

    def begin(self, key: str, compile_it: Callable[[], Any]) -> Future[Any] | _WorkerKernel:
        """Compile a kernel, unless a kernel pack has it: in a worker, or in the pool, where `wait_until_read` waits for the part of it that
        runs in Python.

        Args:
            key: Triton's cache key of the kernel.
            compile_it: compiles the kernel.
        """
        is_read = threading.Event()
        made_of = _compile_inputs(compile_it)
        src, source = made_of.get("src"), kernel_source(key, made_of)
        is_kept = source is not None and _is_kept(source)
        sent = None if is_kept or self.stays else _sent(self.submit, made_of, key)
        if sent is not None:
            return _WorkerKernel(sent, source, compile_it)
        if src is not None:
            src.make_ir = functools.partial(_in_turn, src.make_ir, is_read)
        future = self.pool.submit(compile_it) if is_kept else self.pool.submit(_compile_once, key, source, compile_it)
        future.add_done_callback(lambda _: is_read.set())
        self._read.append(is_read)
        return future

    def wait_until_read(self) -> None:
        """Wait until Triton's front end has processed all submitted kernels; for a kernel that does not report it, until it is compiled."""
        while self._read:
            self._read.pop().wait()


def _is_kept(source: KernelSource) -> bool:
    """Whether the kernel is in Triton's cache, by now. A folder that cannot be written keeps no kernel from being compiled."""
    with suppress(OSError):
        return restore(source)
    return False


def _compile_once(key: str, source: KernelSource | None, compile_it: Callable[[], Any]) -> Any:
    """Compile a kernel that no other process compiles now, and note it."""
    with locked(key):
        compiled = compile_it()  # finds in Triton's cache what another process has compiled meanwhile
    if source is not None:
        note(source)
    return compiled


_front_end: Final = threading.Lock()


def _in_turn(make_ir: Callable[..., Any], is_read: threading.Event, *args: Any, **options: Any) -> Any:
    with _front_end:
        try:
            return make_ir(*args, **options)
        finally:
            is_read.set()


def _compile_inputs(compile_it: Callable[..., Any]) -> dict[str, Any]:
    """Inputs of a compilation, by Triton's names ("src", "target", "options", ...), as far as this release exposes them."""
    names, cells = compile_it.__code__.co_freevars, compile_it.__closure__ or ()
    return dict(zip(names, (cell.cell_contents for cell in cells), strict=True))


def _sent(submit: Submit | None, made_of: dict[str, Any], key: str) -> Future[Any] | None:
    """Start the compilation in another process; None if there is none, or it cannot be sent there."""
    if submit is None or not made_of.keys() >= {"src", "target", "options", "env_vars"}:
        return None
    src = made_of["src"]
    with suppress(Exception):  # it cannot be pickled, or no process is left
        if is_sendable(src.fn, made_of["env_vars"]):
            return submit(compile_packed, pack(src, made_of["target"], made_of["options"].__dict__, key))
    return None


_LONGEST: Final = 60.0
"""Seconds to wait for a kernel from another process, including the kernels queued before it."""


class _WorkerKernel:
    """A kernel that another process compiles. No thread of this one waits for it, so that nothing keeps the process from ending."""

    def __init__(self, sent: Future[Any], source: KernelSource | None, compile_it: Callable[[], Any]) -> None:
        self._sent, self._source, self._compile_it = sent, source, compile_it
        self._lock = threading.Lock()
        self._found: Any = None

    def cancel(self) -> bool:
        """Take the kernel back from worker processes of this package that have not begun it; False if one has."""
        return isinstance(self._sent, Job) and self._sent.cancel()

    def result(self) -> Any:
        """The kernel that the other process left in Triton's cache on disk. If that process failed or was too slow, it is compiled here."""
        with self._lock:
            if self._found is None:
                with suppress(Exception):
                    self._sent.result(_LONGEST)
                self._found = self._compile_it()
                if self._source is not None:
                    note(self._source)
            return self._found
