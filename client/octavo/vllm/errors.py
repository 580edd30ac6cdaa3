"""Why the connector refuses to start."""

from __future__ import annotations


class EngineRefused(ValueError):  # noqa: N818 - says what happened
    """The engine is set up in a way in which the connector cannot serve it; the message says
    which setting, and what would do instead."""
