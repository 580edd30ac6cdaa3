"""One answer of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """``OK``; ``WARN``: works, but slower or with less; ``FAIL``: a node cannot do its job."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, what it means for Octavo, and what to do (empty when all is well)."""

    check: str
    verdict: Verdict
    found: str
    meaning: str = ""
    action: str = ""
