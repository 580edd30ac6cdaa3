"""Figures from what engines answered: medians, bounds, percentiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

RESAMPLES: Final = 10_000
UPPER_PERCENT: Final = 97.5
"""The upper end of the interval that holds the median with 95 % confidence."""


def median_upper95(values: Sequence[float]) -> float:
    """Upper end of the 95 % bootstrap interval of the median; the same each time."""
    drawn = np.random.default_rng(0).choice(np.asarray(values), (RESAMPLES, len(values)))
    return float(np.percentile(np.median(drawn, axis=1), UPPER_PERCENT))


def percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """``name_p50``, ``name_p99`` and ``name_max``; an empty one has no figures."""
    if not values:
        return {}
    p50, p99 = np.percentile(np.asarray(values), (50, 99))
    return {f"{name}_p50": float(p50), f"{name}_p99": float(p99), f"{name}_max": max(values)}
