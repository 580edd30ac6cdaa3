"""Entry of the ``octavo`` command. Loads only what the chosen command needs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Final

from octavo.cli.errors import CommandError

EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def run() -> None:
    """Runs the command line that the process was started with, then exits."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: Sequence[str]) -> int:
    """Runs one command and returns its exit code: 0, 1 (it failed) or 2 (wrong usage)."""
    try:
        if arguments[:1] == ["serve"]:
            # Past typer and rich: a node must be up in a second, and needs neither.
            from octavo.cli.serve import serve

            return serve(arguments[1:])
        return _run_app(arguments)
    except CommandError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _run_app(arguments: Sequence[str]) -> int:
    try:
        from octavo.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        raise CommandError("this command needs typer and rich: pip install 'octavo[cli]'") from None
    try:
        app(args=list(arguments), prog_name="octavo")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else EXIT_FAILED
    return 0
