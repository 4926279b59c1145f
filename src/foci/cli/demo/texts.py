"""Real text that is on every machine: the docstrings of Python's own standard library."""

from __future__ import annotations

import ast
import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

__all__ = ["QUESTIONS", "Question", "corpus", "module_summaries", "passages"]

_MODULES = (
    "argparse", "calendar", "csv", "decimal", "difflib", "fractions", "functools", "gzip", "heapq", "imaplib", "inspect", "ipaddress",
    "json", "locale", "logging", "mimetypes", "multiprocessing", "pickle", "pathlib", "random", "sched", "secrets", "shlex", "shutil",
    "smtplib", "sqlite3", "statistics", "string", "subprocess", "tarfile", "tempfile", "textwrap", "threading", "timeit", "tokenize",
    "trace", "unittest", "urllib", "uuid", "wave", "webbrowser", "zipfile",
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """Words a person would type, and the module of the standard library that answers them."""

    text: str
    module: str


# No word of a question is its module's name, so that only meaning finds the answer.
QUESTIONS = (
    Question("open a page for the user to look at on the internet", "webbrowser"),
    Question("read the options a user typed in a terminal", "argparse"),
    Question("the average and the spread of some measurements", "statistics"),
    Question("deliver an e-mail to a mail server", "smtplib"),
    Question("which day of the week the first of a month is", "calendar"),
    Question("how long a small piece of code takes to run", "timeit"),
)


@functools.cache
def _docstrings() -> dict[str, tuple[str, ...]]:
    """By module: its docstring first, then those of its classes and functions, in the order of the source."""
    docstrings = {}
    for name in _MODULES:
        path = Path(sysconfig.get_path("stdlib"), name)
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not path.is_file():
            continue
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        texts = tuple(doc for node in nodes if isinstance(node, documented) and (doc := ast.get_docstring(node)))
        if texts:
            docstrings[name] = texts
    if not docstrings:
        raise FileNotFoundError(f"no source of the standard library in {sysconfig.get_path('stdlib')}")
    return docstrings


def module_summaries() -> dict[str, str]:
    """By module of the standard library: the first paragraph of its docstring."""
    return {name: texts[0].strip().split("\n\n")[0] for name, texts in _docstrings().items()}


def passages(count: int) -> tuple[str, ...]:
    """`count` docstrings of the standard library, short to long and more of the long ones, dealt so that neighbours differ in length."""
    texts = sorted({text for docstrings in _docstrings().values() for text in docstrings}, key=lambda text: (len(text.split()), text))
    ranks = (1 - (1 - index / max(1, count - 1)) ** 2 for index in range(count))
    chosen = [texts[round(rank * (len(texts) - 1))] for rank in ranks]
    hands = max(1, count // 8)
    return tuple(text for hand in range(hands) for text in chosen[hand::hands])


def corpus(length: int) -> bytes:
    """The first `length` bytes of the module docstrings, one after another."""
    text = "\n\n".join(texts[0] for texts in _docstrings().values()).encode()
    return (text * (1 + length // len(text)))[:length]
