"""Documents: functions, methods and class heads of Python's standard library, as bytes."""

from __future__ import annotations

import random
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["BEGIN", "VOCABULARY", "batches", "documents"]

BEGIN = 256  # stands before every document
VOCABULARY = 257


def documents(max_length: int, *, files: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """Training and validation documents, int64 vectors that start with `BEGIN`; every tenth file is for validation."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "idlelib"} & set(p.parts))[:files]
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for number, path in enumerate(paths):
        text = path.read_text(encoding="utf-8", errors="ignore")
        for piece in re.split(r"(?m)^(?= *(?:async )?(?:def|class) )", text)[1:]:
            tokens = list(piece.encode())[: max_length - 1]
            if len(tokens) >= 16:
                found[number % 10 == 9].append(torch.tensor([BEGIN, *tokens]))
    return found


def batches(docs: list[Tensor], tokens: int, *, seed: int) -> Iterator[list[Tensor]]:
    """Random documents, again and again, of about so many tokens together."""
    chosen = random.Random(seed)
    while True:
        batch: list[Tensor] = []
        while sum(len(d) for d in batch) < tokens:
            batch.append(chosen.choice(docs))
        yield batch
