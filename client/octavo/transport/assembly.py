"""Puts the pieces of inline units together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from octavo.errors import NodeFailed
from octavo_proto.v1 import cache_pb2

UNITS_OPEN_MAX: Final = 64
"""Units of which some pieces have come; a node that opens more is not making sense."""

UNIT_BYTES_MAX: Final = 1 << 30
"""More than any node allows a unit; bounds what a broken message can make us allocate."""


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit that has arrived whole."""

    position: int
    unit: int
    variant: int
    data: bytes | memoryview
    digest: int


class Assembler:
    """Takes pieces in order; pieces of different units may be interleaved."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], tuple[bytearray, int]] = {}

    def add(self, piece: cache_pb2.InlineData) -> Unit | None:
        """The unit that this piece completes, or None.

        Raises:
            NodeFailed: pieces that do not fit together.
        """
        if piece.offset == 0 and piece.last:
            if len(piece.data) != piece.length:
                raise _misfit(piece)
            return Unit(piece.position, piece.unit, piece.variant, piece.data, piece.digest)
        name = (piece.position, piece.unit)
        if piece.offset == 0:
            if len(self._open) >= UNITS_OPEN_MAX or piece.length > UNIT_BYTES_MAX:
                raise _misfit(piece)
            self._open[name] = (bytearray(piece.length), 0)
        buffer, filled = self._open.get(name, (bytearray(), -1))
        end = piece.offset + len(piece.data)
        if piece.offset != filled or piece.length != len(buffer) or end > piece.length:
            raise _misfit(piece)
        buffer[filled:end] = piece.data
        if not piece.last:
            self._open[name] = (buffer, end)
            return None
        del self._open[name]
        if end != piece.length:
            raise _misfit(piece)
        return Unit(piece.position, piece.unit, piece.variant, memoryview(buffer), piece.digest)


def _misfit(piece: cache_pb2.InlineData) -> NodeFailed:
    return NodeFailed(
        f"inline piece of page {piece.position}, unit {piece.unit}: {len(piece.data)} bytes at "
        f"{piece.offset} of {piece.length} do not continue what came before"
    )
