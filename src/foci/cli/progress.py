"""Progress of a command: a bar on a terminal, lines where the output is piped."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

__all__ = ["progress"]

_BETWEEN_LINES = 10.0  # seconds


@contextlib.contextmanager
def progress(console: Console, what: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows how much of `total` is done.

    Args:
        console: for the bar, or for a line every ten seconds at most.
        what: is counted, such as "cases".
        total: how many there are.

    Yields:
        A function to call when one more is done.
    """
    if console.is_terminal:
        columns = TextColumn(f"{{task.completed}} of {{task.total}} {what}"), BarColumn(), TimeElapsedColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task("", total=total)
            yield lambda: bar.advance(task)
        return

    began = said = time.monotonic()
    done = 0

    def advance() -> None:
        nonlocal done, said
        done += 1
        now = time.monotonic()
        if now - said >= _BETWEEN_LINES:
            said = now
            console.print(f"{done} of {total} {what}, {now - began:.0f} s", highlight=False)

    yield advance
