"""The command `foci`. It stands beside the package foci, so that `foci --help`, `--version` and completion start without torch."""

from __future__ import annotations

import sys

__all__ = ["main"]

_TERMINAL = ("rich", "typer")  # the extra `cli`


def main() -> None:
    """Run the `foci` command. Exits with 2 if the extra `cli` is not installed."""
    try:
        from foci_cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in _TERMINAL:
            raise
        print(f"foci: {error.name} is not installed, which the command needs: pip install 'foci[cli]'", file=sys.stderr)
        raise SystemExit(2) from None
    app()
