"""The command line. `foci --help` lists the commands."""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the `foci` command. Imports the terminal libraries here, so that `import foci` does not."""
    from foci.cli.app import app

    app()
