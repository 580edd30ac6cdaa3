"""Where got bytes go and put bytes come from. Needs no torch.

A sink or source of one's own needs only the methods of ``Sink`` or ``Source``, which move one
unit at a time; ``BufferSink`` and ``BufferSource`` move whole batches by address.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from octavo.codec.raw import RAW_VARIANT
from octavo.errors import InvalidRequest, TransferError
from octavo.memory import Region, copy_extents, region_of, view_at
from octavo.transfer import Rows, RowSink, RowSource, Transfer
from octavo_proto.layout import KvKind


class Sink(Protocol):
    """Takes units as they arrive, in any order of pages. Runs on the thread that called get.

    A unit may come twice when a get is tried again. Bytes count only for pages that the result
    calls ``DONE``.
    """

    def accept(self, position: int, unit: int, variant: int, view: memoryview) -> None:
        """Copies ``view``, which is read-only and ends with the call."""
        ...


class Source(Protocol):
    """Gives units to be put."""

    def unit_bytes(self, position: int, unit: int) -> int:
        """Bytes of a unit."""
        ...

    def variant(self, position: int) -> int:
        """How the units of a page are packed."""
        ...

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        """Writes the unit into ``view`` (``unit_bytes`` long, ends with the call).

        May answer how many bytes it wrote; any other number than ``unit_bytes`` ends the put.
        """
        ...


class BufferSink:
    """A flat writable buffer of rows of ``unit_bytes`` each.

    Unit ``u`` of the i-th page that moves goes to row i * units + rank of u among the wanted
    units; with ``rows``, the i-th page goes where page rows[i] would. A unit may be shorter than
    a row; ``lengths`` tells. Bytes of rows whose page is not ``DONE`` are undefined.
    """

    def __init__(self, buffer: Any, unit_bytes: int, rows: ArrayLike | None = None) -> None:
        self._rows = _BufferRows(buffer, unit_bytes, rows)
        if not self._rows.region.is_writable:
            raise InvalidRequest("the buffer of a sink must be writable")
        self.lengths: NDArray[np.uint32] = np.zeros(0, dtype=np.uint32)
        """Bytes that came for each row of the transfer; 0 where none did."""

    def begin(self, transfer: Transfer) -> None:
        self._rows.begin(transfer)
        self.lengths = np.zeros(transfer.row_count, dtype=np.uint32)

    def accept_rows(self, rows: Rows) -> None:
        copy_extents(self.places_of(rows), rows.addresses, rows.lengths)
        self.placed(rows)

    def places_of(self, rows: Rows) -> NDArray[np.int64]:
        if len(rows) and int(rows.lengths.max()) > self._rows.unit_bytes:
            raise TransferError(
                f"a unit of {int(rows.lengths.max())} bytes came for rows of "
                f"{self._rows.unit_bytes} bytes"
            )
        return self._rows.addresses_of(rows.rows)

    def placed(self, rows: Rows) -> None:
        self.lengths[rows.rows] = rows.lengths


class BufferSource:
    """A flat buffer of rows of ``unit_bytes`` each, placed as in ``BufferSink``."""

    def __init__(
        self,
        buffer: Any,
        unit_bytes: int,
        rows: ArrayLike | None = None,
        *,
        variant: int = RAW_VARIANT,
    ) -> None:
        self._rows = _BufferRows(buffer, unit_bytes, rows)
        self._variant = variant

    def begin(self, transfer: Transfer) -> None:
        self._rows.begin(transfer)
        layout = transfer.layout
        if layout.kind is KvKind.FOREIGN or self._variant != RAW_VARIANT:
            return
        for unit in transfer.units:
            if layout.raw_unit_bytes(unit) != self._rows.unit_bytes:
                raise InvalidRequest(
                    f"unit_bytes is {self._rows.unit_bytes}, unit {unit} of layout "
                    f"{layout.name!r} has {layout.raw_unit_bytes(unit)} bytes in codec raw"
                )

    def unit_lengths(self) -> NDArray[np.uint32]:
        return np.full(1, self._rows.unit_bytes, dtype=np.uint32)

    def page_variants(self) -> NDArray[np.uint16]:
        return np.full(1, self._variant, dtype=np.uint16)

    def fill_rows(self, rows: Rows) -> None:
        copy_extents(rows.addresses, self.places_of(rows), rows.lengths)

    def places_of(self, rows: Rows) -> NDArray[np.int64]:
        return self._rows.addresses_of(rows.rows)


class _BufferRows:
    """Address arithmetic of a flat buffer of equal rows."""

    def __init__(self, buffer: Any, unit_bytes: int, rows: ArrayLike | None) -> None:
        if unit_bytes < 1:
            raise InvalidRequest(f"unit_bytes is {unit_bytes}, must be at least 1")
        self.region: Region = region_of(buffer)
        self.unit_bytes = unit_bytes
        self._mapping = None if rows is None else np.asarray(rows, dtype=np.int64)
        self._units_per_page = 1

    def begin(self, transfer: Transfer) -> None:
        """Checks that every row of the transfer has its place in the buffer."""
        self._units_per_page = len(transfer.units)
        pages = transfer.page_count
        if self._mapping is not None:
            if self._mapping.ndim != 1 or len(self._mapping) < pages:
                raise InvalidRequest(
                    f"rows maps {len(self._mapping)} pages, the transfer has {pages}"
                )
            if pages and int(self._mapping[:pages].min()) < 0:
                raise InvalidRequest("rows has a negative page")
            pages = int(self._mapping[:pages].max()) + 1 if pages else 0
        needed = pages * self._units_per_page * self.unit_bytes
        if needed > self.region.size_bytes:
            raise InvalidRequest(
                f"the buffer has {self.region.size_bytes} bytes, the transfer needs {needed}"
            )

    def addresses_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._mapping is not None:
            pages, ranks = np.divmod(rows, self._units_per_page)
            rows = self._mapping[pages] * self._units_per_page + ranks
        return self.region.address + rows * self.unit_bytes


class _SinkRows:
    """Feeds a sink that takes one unit at a time."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink

    def begin(self, transfer: Transfer) -> None:
        pass

    def accept_rows(self, rows: Rows) -> None:
        for position, unit, variant, length, address in zip(
            rows.positions.tolist(),
            rows.units.tolist(),
            rows.variants.tolist(),
            rows.lengths.tolist(),
            rows.addresses.tolist(),
            strict=True,
        ):
            lent = _LentView(address, length, writable=False)
            self._sink.accept(position, unit, variant, lent.view)
            lent.end("sink")


class _SourceRows:
    """Draws on a source that gives one unit at a time."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._transfer: Transfer | None = None

    def begin(self, transfer: Transfer) -> None:
        self._transfer = transfer

    def unit_lengths(self) -> NDArray[np.uint32]:
        transfer = self._begun()
        lengths = [
            self._source.unit_bytes(position, unit)
            for position in transfer.positions.tolist()
            for unit in transfer.units
        ]
        if lengths and not 0 < min(lengths) <= max(lengths) < 2**32:
            raise InvalidRequest("unit_bytes must be from 1 to 2^32-1")
        return np.array(lengths, dtype=np.uint32)

    def page_variants(self) -> NDArray[np.uint16]:
        transfer = self._begun()
        variants = [self._source.variant(position) for position in transfer.positions.tolist()]
        return np.array(variants, dtype=np.uint16)

    def fill_rows(self, rows: Rows) -> None:
        for position, unit, length, address in zip(
            rows.positions.tolist(),
            rows.units.tolist(),
            rows.lengths.tolist(),
            rows.addresses.tolist(),
            strict=True,
        ):
            lent = _LentView(address, length, writable=True)
            written = self._source.fill(position, unit, lent.view)
            lent.end("source")
            if written is not None and written != length:
                raise TransferError(
                    f"source wrote {written} of {length} bytes of page {position}, unit {unit}"
                )

    def _begun(self) -> Transfer:
        assert self._transfer is not None
        return self._transfer


def row_sink(sink: Sink | RowSink) -> RowSink:
    """``sink`` itself if it takes rows, else wrapped so that it does."""
    return sink if isinstance(sink, RowSink) else _SinkRows(sink)


def row_source(source: Source | RowSource) -> RowSource:
    """``source`` itself if it gives rows, else wrapped so that it does."""
    return source if isinstance(source, RowSource) else _SourceRows(source)


class _LentView:
    """A view of one unit that a sink or source may use during a call, and no longer.

    The array between the memory and the view is what others hold on to when they keep the view,
    a slice of it, or an array made of it: its references tell. Such a view would dangle once
    the node's memory is unmapped.
    """

    def __init__(self, address: int, size_bytes: int, *, writable: bool) -> None:
        self._array = np.frombuffer(view_at(address, size_bytes, writable=writable), dtype=np.uint8)
        self.view = self._array.data

    def end(self, whose: str) -> None:
        """Raises TransferError if somebody has kept the memory."""
        kept = f"the {whose} kept a view of the unit beyond the call"
        try:
            self.view.release()
        except BufferError:
            raise TransferError(kept) from None
        if sys.getrefcount(self._array) > _OWN_REFERENCES:
            raise TransferError(kept)


_OWN_REFERENCES = 2
"""The attribute, and the argument of ``getrefcount`` itself."""
