"""What stops a measurement before it starts."""

from __future__ import annotations


class QualityError(ValueError):
    """A text, a codec or a model does not fit; the message says which, and what would."""
