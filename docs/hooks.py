"""Hooks of mkdocs: notebooks become pages, links to files outside of docs/ become their names, search works from the disk."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

OUTSIDE = re.compile(r"\[([^\[\]]*)\]\(\.\./(?!\.\.)([^)\s]+)\)")
NOTEBOOK = re.compile(r"(\]\([^)\s]+)\.ipynb\)")
SHIM = re.compile(r'<script src="https://unpkg\.com/iframe-worker/shim"></script>')


def notebook_page(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and the outputs that are kept in it."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                parts.append(f"![output](data:image/png;base64,{data['image/png'].strip()})")
            else:
                text = "".join(output.get("text", data.get("text/plain", ""))).rstrip("\n")
                parts.append(f'```text title="prints"\n{text}\n```')
    return "\n\n".join(parts) + "\n"


def on_files(files: Any, *, config: Any) -> Any:
    """A page for each notebook, in place of the file."""
    from mkdocs.structure.files import File

    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        notebook = json.loads(Path(file.abs_src_path).read_text(encoding="utf-8"))
        files.remove(file)
        files.append(File.generated(config, file.src_uri.removesuffix(".ipynb") + ".md", content=notebook_page(notebook)))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """A page of docs/ may link to sources, which the site does not hold, and to notebooks, which are pages of it."""
    markdown = NOTEBOOK.sub(r"\1.md)", markdown)
    return OUTSIDE.sub(r"`\2`", markdown) if page.file.src_uri.count("/") == 0 else markdown


def on_post_page(output: str, *, page: Any, config: Any) -> str:
    """The theme loads a script from another host, for search in pages read from the disk: ours stands in for it."""
    base = "../" * page.url.count("/")
    return SHIM.sub(f'<script src="{base}assets/frame-worker.js"></script>', output)
