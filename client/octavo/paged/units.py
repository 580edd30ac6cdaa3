"""Rows of units in this process's memory, seen as tensors."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from octavo.memory import view_at
from octavo.transfer import Rows
from octavo.transport.ring import ALIGNMENT


class UnitMemory:
    """Units of equal length at given addresses. Evenly spaced ones are one strided tensor."""

    def __init__(self, addresses: NDArray[np.int64], unit_bytes: int, *, writable: bool) -> None:
        self._addresses = addresses
        self._unit_bytes = unit_bytes
        self._writable = writable
        self._step = self._even_step()

    def write(self, packed: Tensor) -> None:
        """Copies row i of ``packed`` (uint8) to address i."""
        if self._step is not None:
            self._strided(self._step).copy_(packed)
            return
        for address, row in zip(self._addresses.tolist(), packed, strict=True):
            _tensor_at(address, self._unit_bytes, writable=True).copy_(row)

    def read(self) -> Tensor:
        """uint8 [units, unit_bytes]; shares the memory where it is evenly spaced."""
        if self._step is not None:
            return self._strided(self._step)
        return torch.stack(
            [
                _tensor_at(address, self._unit_bytes, writable=False)
                for address in self._addresses.tolist()
            ]
        )

    def _even_step(self) -> int | None:
        if len(self._addresses) == 1:
            return self._unit_bytes
        steps = np.diff(self._addresses)
        step = int(steps[0])
        # A step that is no whole number of elements could not be viewed as such.
        is_even = step >= self._unit_bytes and step % ALIGNMENT == 0 and bool((steps == step).all())
        return step if is_even else None

    def _strided(self, step: int) -> Tensor:
        unit_count = len(self._addresses)
        span = step * (unit_count - 1) + self._unit_bytes
        whole = _tensor_at(int(self._addresses[0]), span, writable=self._writable)
        return whole.as_strided((unit_count, self._unit_bytes), (step, 1))


def by_unit(rows: Rows) -> list[tuple[int, NDArray[np.intp]]]:
    """Row places of each unit, in order."""
    return [(unit, np.flatnonzero(rows.units == unit)) for unit in np.unique(rows.units).tolist()]


def _tensor_at(address: int, size_bytes: int, *, writable: bool) -> Tensor:
    # torch warns about read-only buffers. What is read from the arena is mapped read-only, so
    # a write through this tensor would be stopped by the kernel; this module makes none.
    return torch.frombuffer(view_at(address, size_bytes, writable=True), dtype=torch.uint8)
