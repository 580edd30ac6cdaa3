"""The two kinds of parts that bulk streams carry: units to get, and units to put."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from octavo.chain import key_at
from octavo.errors import NodeFailed
from octavo.memory import view_at
from octavo.status import Status, known_statuses
from octavo.transfer import Rows
from octavo.transport.bulk_socket import BulkSocket
from octavo.transport.bulk_streams import Call, Part
from octavo_proto import bulk, columns
from octavo_proto.keys import digest_seed, unit_digest


@dataclass(frozen=True, slots=True)
class Identity:
    """What the digests of a chain's units are bound to. ``first_page`` is the position of the
    page that ``keys`` begin with."""

    keys: bytes
    fingerprint: bytes
    first_page: int

    def seeds(self, rows: Rows) -> list[int]:
        """Of the digests of rows."""
        return [
            digest_seed(key_at(self.keys, place), self.fingerprint, unit, variant, length)
            for place, unit, variant, length in zip(
                (rows.positions - self.first_page).tolist(),
                rows.units.tolist(),
                rows.variants.tolist(),
                rows.lengths.tolist(),
                strict=True,
            )
        ]


class GetPart(Part):
    """Consecutive units of a lease, received to the addresses of ``rows``."""

    def __init__(
        self,
        call: Call,
        identity: Identity,
        lease_id: int,
        first: int,
        rows: Rows,
        digests: NDArray[np.uint64],
    ) -> None:
        """``digests``: what the grant says that the rows' bytes have."""
        super().__init__(call)
        self.can_go_again = True
        self.lease_id: Final = lease_id
        self.rows: Final = rows
        self.whole = np.zeros(len(rows), dtype=np.bool_)
        """The rows whose bytes are those that were put as these units of these pages."""
        self.refused: Status | None = None
        """Why the node sent nothing."""
        self._identity = identity
        self._digests: list[int] = digests.tolist()
        self._request = bulk.Request(bulk.GET, first, len(rows), lease_id)

    def begin(self, stream: BulkSocket) -> None:
        request = memoryview(self._request.pack())
        stream.send([request], self.call.until_s, self._wanted)

    def end(self, stream: BulkSocket) -> None:
        rows = self.rows
        answer = _answer(stream, self._request, self.call)
        if answer.status != Status.DONE:
            self.refused = Status(int(known_statuses(np.array([answer.status], np.uint8))[0]))
            return
        if answer.size_bytes != rows.size_bytes:
            raise NodeFailed(f"{answer.size_bytes} bytes are to come, {rows.size_bytes} were asked")
        seeds = self._identity.seeds(rows)
        for row, view in enumerate(_views(rows, writable=True)):
            stream.receive(view, self.call.until_s, self._wanted)
            # Now, for the bytes are still in the processor's cache.
            self.whole[row] = unit_digest(view, seeds[row]) == self._digests[row]
        self.doubtful = not self.whole.all()

    def _wanted(self) -> bool:
        return self.call.wanted


class PutPart(Part):
    """Units of a reservation, sent from the addresses of ``rows``."""

    def __init__(self, call: Call, identity: Identity, reservation_id: int, rows: Rows) -> None:
        super().__init__(call)
        # Units that the node has begun to receive can't be filled a second time.
        self.can_go_again = False
        self.rows: Final = rows
        self.statuses: NDArray[np.uint8] = np.full(len(rows), Status.UNAVAILABLE, dtype=np.uint8)
        self._identity = identity
        self._request = bulk.Request(bulk.PUT, 0, len(rows), reservation_id)

    def begin(self, stream: BulkSocket) -> None:
        rows = self.rows
        views = _views(rows, writable=False)
        digests = list(map(unit_digest, views, self._identity.seeds(rows)))
        sent = bulk.UnitsSent(
            rows.positions - self._identity.first_page,
            rows.units.astype(np.int64),
            rows.lengths,
            np.array(digests, dtype=columns.U64),
        )
        header = memoryview(self._request.pack() + sent.pack())
        stream.send([header, *views], self.call.until_s, self._wanted)

    def end(self, stream: BulkSocket) -> None:
        _answer(stream, self._request, self.call)
        statuses = stream.read(len(self.rows), self.call.until_s, self._wanted)
        self.statuses = known_statuses(np.frombuffer(statuses, dtype=np.uint8))
        self.doubtful = bool((self.statuses == Status.REJECTED).any())

    def _wanted(self) -> bool:
        return self.call.wanted


def _views(rows: Rows, *, writable: bool) -> list[memoryview]:
    return [
        view_at(address, length, writable=writable)
        for address, length in zip(rows.addresses.tolist(), rows.lengths.tolist(), strict=True)
    ]


def _answer(stream: BulkSocket, request: bulk.Request, call: Call) -> bulk.Answer:
    data = stream.read(bulk.ANSWER_BYTES, call.until_s, lambda: call.wanted)
    try:
        return bulk.read_answer(data, request)
    except bulk.FrameError as error:
        raise NodeFailed(str(error)) from None
