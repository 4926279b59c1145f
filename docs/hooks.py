"""What `mkdocs build` does besides: links to files outside of docs/ become their names, and search works from the disk."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\[\]]*)\]\(\.\./(?!\.\.)([^)\s]+)\)")
SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """A page of docs/ may link to sources, which the site does not hold."""
    depth = page.file.src_uri.count("/")
    return OUTSIDE.sub(r"`\2`", markdown) if depth == 0 else markdown


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """The theme loads a script from another host, for search in pages read from the disk: ours stands in for it."""
    base = "../" * page.url.count("/")
    return SHIM.sub(f'<script src="{base}assets/frame-worker.js"></script>', output)
