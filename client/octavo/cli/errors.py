"""What a command tells its user when it cannot go on."""

from __future__ import annotations


class CommandError(Exception):
    """One helpful line; the command ends with ``exit_code``."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
