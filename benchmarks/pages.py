"""What the reports share: results read, tables in Markdown, and pages of docs/ whose tables stand between marks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

RESULTS: Final = Path(__file__).parent / "results"
DOCS: Final = Path(__file__).parents[1] / "docs"

PEERS: Final = {
    "flex": "FlexAttention",
    "fa4": "FlashAttention-4",
    "flash": "torch FLASH",
    "cudnn": "cuDNN",
    "efficient": "EFFICIENT",
    "varlen": "varlen_attn",
}
"""What pages call whom results name shortly."""


def results(name: str) -> list[dict[str, Any]]:
    """The lines of benchmarks/results/NAME.jsonl; none where nothing was measured."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def markdown(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table, without a newline at its end."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in (head, ["---"] * len(head), *rows))


def fill(page: str, texts: Mapping[str, str]) -> None:
    """Writes texts into docs/PAGE, each between `<!-- its name -->` and the next `<!-- end -->`; the rest stays.

    Raises:
        ValueError: for a name that the page has no mark of.
    """
    text = (DOCS / page).read_text()
    for name, inside in texts.items():
        text, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m, t=inside: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        if not count:
            raise ValueError(f"docs/{page} has no mark of {name!r}")
    (DOCS / page).write_text(text)
