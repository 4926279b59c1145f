"""Checks site/ in a headless Chromium: `make site-check`. Pages render, search works, links hold, and no page asks another host.

The pages are read from the disk, and the browser reaches no host at all. CHROMIUM names the browser.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

SITE = Path(__file__).parents[1] / "site"
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-proxy-server", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


class Page(HTMLParser):
    """The ids of a page, what it links to, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value for name, value in attrs if value}
        self.ids |= {values[name] for name in ("id", "name") if name in values}
        self.links += [values[name] for name in ("href", "src") if name in values]


def broken_links(site: Path) -> list[str]:
    """Links to files or anchors that are not there, and scripts, styles and pictures of other hosts."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        if path.name == "404.html":  # a server shows it at any address
            continue
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link} is not there")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
                found.append(f"{path.relative_to(site)}: {link} has no such anchor")
    return found


def open_page(url: str) -> tuple[str, list[str]]:
    """The page after its scripts ran, and the addresses on a network that it asked for."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "net.json")
        command = [os.environ.get("CHROMIUM", "chromium"), *FLAGS, f"--user-data-dir={folder}/profile", f"--log-net-log={log}", url]
        dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        return dom, requests_of(log.read_text(encoding="utf-8", errors="replace"))


def requests_of(log: str) -> list[str]:
    """The addresses on a network that a page asked for, from Chromium's log of its network, which has an event a line."""
    asked = set()
    for line in log.splitlines():
        if '"initiator"' in line:
            params = json.loads(line.rstrip(","))["params"]
            # The browser itself asks its maker's hosts: those requests have no origin.
            if params["initiator"] != "not an origin" and params["url"].startswith("http"):
                asked.add(params["url"])
    return sorted(asked)


def check(site: Path) -> list[str]:
    """Everything that is wrong, a line each."""
    found = broken_links(site)
    pages = [path for path in sorted(site.rglob("*.html")) if path.name != "404.html"]
    for path in pages:
        print(f"  {path.relative_to(site)}", flush=True)
        dom, asked = open_page(path.as_uri())
        found += [f"{path.relative_to(site)}: asked for {url}" for url in asked]
        if not re.search(r'<html[^>]*class="[^"]*\bjs\b', dom):
            found.append(f"{path.relative_to(site)}: its scripts did not run")
        if not re.search(r"<article.*<h1", dom, re.DOTALL):
            found.append(f"{path.relative_to(site)}: has no heading")
    dom, asked = open_page(f"{(site / 'index.html').as_uri()}?q=softcap")
    results = re.findall(r'<a href="([^"]*)" class="md-search-result__link"', dom)
    print(f"  search for softcap: {len(results)} results")
    if not any("foci.scores" in url for url in results):
        found.append(f"search for softcap does not find foci.scores.softcap; it finds {json.dumps(results)}")
    return found + [f"search: asked for {url}" for url in asked]


def main() -> None:
    found = check(SITE)
    print("\n".join(found) if found else "all pages render, links hold, search works, nothing was asked of another host")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
