"""How an index fails.

    IndexUnavailable     not now; ``trouble`` says why
    IndexSettingsError   what it was told is wrong; the message names the setting

Neither reaches a request: a match that fails answers ``Answer.UNAVAILABLE``, and what could not
be published is published later.
"""

from __future__ import annotations

from enum import Enum


class Trouble(Enum):
    """Why an index cannot be used just now. The values begin messages."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    LOADING = "loading"
    READ_ONLY = "read_only"
    FULL = "full"
    """It takes nothing new, yet answers and forgets."""
    MOVED = "moved"
    """A cluster that is changing its shape, or lacks a part of it."""
    DENIED = "denied"
    """Wrong credentials, or a user that may not do this."""
    BACKING_OFF = "backing_off"
    """It failed a moment ago and was not asked again."""
    REFUSED = "refused"
    """Any other error that the server answered."""


class IndexUnavailable(Exception):  # noqa: N818 - reads as what it is
    """The index did not do what it was asked for."""

    def __init__(self, trouble: Trouble, detail: str = "") -> None:
        super().__init__(f"{trouble.value}: {detail}" if detail else trouble.value)
        self.trouble = trouble


class IndexSettingsError(ValueError):
    """A setting is wrong."""
