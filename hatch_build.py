"""Metadata that a build derives: the project's URLs and README.md with links that hold outside the repository, on PyPI.

The address of the repository stands in one place: `repository` in pyproject.toml.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

RELATIVE_LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|mailto:|#)([^)\s]+)\)")


def with_absolute_links(text: str, repository: str, reference: str = "main") -> str:
    """Markdown whose relative links point into the repository: pictures to their bytes, everything else to its page."""

    def absolute(match: re.Match[str]) -> str:
        picture, words, path = match.groups()
        return f"{picture}{words}({repository}/{'raw' if picture else 'blob'}/{reference}/{path})"

    return RELATIVE_LINK.sub(absolute, text)


def project_urls(repository: str) -> dict[str, str]:
    """Name and address, as PyPI lists them."""
    return {
        "Repository": repository,
        "Documentation": f"{repository}/blob/main/docs/index.md",
        "Changelog": f"{repository}/blob/main/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }


class Metadata(MetadataHookInterface):
    """Run by hatchling at each build."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        repository = self.config["repository"].rstrip("/")
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_absolute_links(text, repository)}
        metadata["urls"] = project_urls(repository)
