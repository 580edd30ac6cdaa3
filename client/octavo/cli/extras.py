"""Turns a missing optional package into the sentence that installs it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from octavo.cli.errors import CommandError


@contextmanager
def need_extra(extra: str) -> Generator[None]:
    """Wraps imports of what only ``octavo[extra]`` installs.

    Raises:
        CommandError: one of them is missing. Modules of our own are never blamed on the user.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing.startswith("octavo"):
            raise
        raise CommandError(
            f"this command needs {missing}, which is not installed: pip install 'octavo[{extra}]'"
        ) from None
