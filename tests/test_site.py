"""The documentation's site: docs/api/ is what docs/reference.py writes, mkdocs.yml lists every page, and no page asks another host."""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def load(name):
    spec = importlib.util.spec_from_file_location(f"docs_{name}", DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reference, hooks, check_site = load("reference"), load("hooks"), load("check_site")


@pytest.mark.parametrize("module", reference.PAGES)
def test_reference_is_up_to_date(module):
    assert (DOCS / "api" / f"{module}.md").read_text(encoding="utf-8") == reference.page(module), "write it anew: make reference"


def test_every_page_is_in_the_navigation():
    listed = re.findall(r"^\s+- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    pages = [path.relative_to(DOCS).with_suffix(".md").as_posix() for suffix in ("md", "ipynb") for path in DOCS.rglob(f"*.{suffix}")]
    assert sorted(listed) == sorted(pages)


def test_links_to_sources_become_names():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="features.md"))
    text = "see [api/test_sdpa](../tests/api/test_sdpa.py), [GPU](gpu.md#measured)"
    assert hooks.on_page_markdown(text, page=page, config={}, files=[]) == "see `tests/api/test_sdpa.py`, [GPU](gpu.md#measured)"
    page = SimpleNamespace(file=SimpleNamespace(src_uri="api/foci.md"))
    assert hooks.on_page_markdown("[gallery](../gallery.md)", page=page, config={}, files=[]) == "[gallery](../gallery.md)"


def test_notebooks_become_pages():
    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    text = "[own](notebooks/write-your-own-attention.ipynb)"
    assert hooks.on_page_markdown(text, page=page, config={}, files=[]) == "[own](notebooks/write-your-own-attention.md)"
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "text"]},
        {
            "cell_type": "code",
            "source": ["print(1)\n", "x"],
            "outputs": [{"output_type": "stream", "text": ["1\n"]}, {"data": {"text/plain": ["2"]}}, {"data": {"image/png": "AAAA\n"}}],
        },
    ]
    shown = hooks.notebook_page({"cells": cells}).split("\n\n")
    assert shown == [
        "# Title\ntext",
        "```python\nprint(1)\nx\n```",
        '```text title="prints"\n1\n```',
        '```text title="prints"\n2\n```',
        "![output](data:image/png;base64,AAAA)\n",
    ]


def test_no_script_of_another_host():
    page = SimpleNamespace(url="api/foci.html")
    shown = hooks.on_post_page('<script src="https://unpkg.com/iframe-worker/shim"></script>', page=page, config={})
    assert shown == '<script src="../assets/frame-worker.js"></script>'
    assert (DOCS / "assets" / "frame-worker.js").exists()


def test_broken_links_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "index.html").write_text('<h1 id="top">x</h1><a href="../a.html#there">a</a><a href="../a.html#gone">a</a>')
    (tmp_path / "a.html").write_text('<p id="there"><a href="sub/">s</a><img src="b.png"><a href="https://example.org/">o</a></p>')
    assert check_site.broken_links(tmp_path) == ["a.html: b.png is not there", "sub/index.html: ../a.html#gone has no such anchor"]


def test_requests_of_a_page_are_told_from_those_of_the_browser():
    lines = [
        '{"params":{"initiator":"null","url":"https://example.org/x.png"},"type":134},',
        '{"params":{"initiator":"not an origin","url":"https://example.com/update"},"type":134},',
        '{"params":{"initiator":"null","url":"file:///site/index.html"},"type":134},',
        '{"params":{"url":"https://example.net/"},"type":2}]}',
    ]
    assert check_site.requests_of("\n".join(lines)) == ["https://example.org/x.png"]
