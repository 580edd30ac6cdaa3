"""Units on their way from and to the device, as many with one call as lie one behind the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Final, Generic, Protocol, Self, TypeVar

import xxhash

from octavo_server.store.io_pool import Operation
from octavo_server.store.nvme.bodies import Bodies
from octavo_server.store.nvme.records import padded_bytes

TOGETHER_BYTES_MAX: Final = 1 << 20
"""Adjacent units up to this size are moved with one call: a third of the calls for units of
320 KiB, and of the hand-overs between threads that come with each. The smallest units, of 4 KiB,
make 256 buffers of it; a call takes 1,024."""


class UnitOutcome(Enum):
    """What became of a read."""

    OK = "ok"
    CORRUPT = "corrupt"
    """The bytes are not those that were put, and never will be: forget the unit."""
    FAILED = "failed"
    """The device failed; what lies there may be sound."""


class BodyToRead:
    """One unit to read into ``view``, which has room for ``length`` padded to 4 KiB.

    ``seed`` and ``digest`` are those of ``octavo_proto.keys.digest_seed`` and ``unit_digest``.
    ``tag`` is the caller's. ``view`` is the store's until the outcome is delivered; ``error``
    is what the device said where that is FAILED.
    """

    __slots__ = ("digest", "error", "length", "offset", "outcome", "seed", "tag", "view")

    def __init__(
        self, *, offset: int, length: int, view: memoryview, seed: int, digest: int, tag: object
    ) -> None:
        self.offset = offset
        self.length = length
        self.view = view
        self.seed = seed
        self.digest = digest
        self.tag = tag
        self.outcome = UnitOutcome.FAILED
        self.error: BaseException | None = None

    def check(self) -> None:
        """Decides the outcome by the bytes that have come."""
        view, length = self.view, self.length
        body = view if len(view) == length else view[:length]
        sound = xxhash.xxh3_64_intdigest(body, seed=self.seed) == self.digest
        self.outcome = UnitOutcome.OK if sound else UnitOutcome.CORRUPT


class BodyToWrite:
    """One unit: ``view`` holds ``length`` bytes, padded to 4 KiB; ``error``: what went wrong."""

    __slots__ = ("error", "length", "offset", "row", "view")

    def __init__(self, offset: int, length: int, view: memoryview, row: int) -> None:
        self.offset = offset
        self.length = length
        self.view = view
        self.row = row
        self.error: BaseException | None = None


class _Placed(Protocol):
    offset: int
    length: int
    view: memoryview
    error: BaseException | None


PlacedT = TypeVar("PlacedT", bound=_Placed)


class _Request(Operation, Generic[PlacedT]):
    """Units to move that lie one behind the other on the device, or a single one.

    Where one call does not move them all, each is moved by itself, so that a bad block costs the
    unit it lies in and no other. The device is asked for that block twice then.
    """

    __slots__ = ("bodies", "units")

    def __init__(
        self, bodies: Bodies, units: Sequence[PlacedT], sink: Callable[[list[Self]], None]
    ) -> None:
        super().__init__(sink)
        self.bodies = bodies
        self.units = units

    def perform(self) -> None:
        units = self.units
        if len(units) > 1:
            views = [unit.view[: padded_bytes(unit.length)] for unit in units]
            if self._move_together(views, units[0].offset):
                return
        for unit in units:
            try:
                self._move(unit)
            except OSError as error:
                unit.error = error

    @abstractmethod
    def _move_together(self, views: Sequence[memoryview], offset: int) -> bool:
        """All with one call; False where it did not move them all."""

    @abstractmethod
    def _move(self, unit: PlacedT) -> None:
        """One. Raises OSError."""


class ReadRequest(_Request[BodyToRead]):
    """Reads, and checks what has come."""

    __slots__ = ()

    def _move_together(self, views: Sequence[memoryview], offset: int) -> bool:
        if not self.bodies.read_together(views, offset):
            return False
        for unit in self.units:
            unit.check()
        return True

    def _move(self, unit: BodyToRead) -> None:
        if self.bodies.read(unit.view, unit.offset, unit.length) < unit.length:
            unit.outcome = UnitOutcome.CORRUPT  # the file was cut: those bytes are gone
        else:
            unit.check()


class WriteRequest(_Request[BodyToWrite]):
    """Writes."""

    __slots__ = ()

    def _move_together(self, views: Sequence[memoryview], offset: int) -> bool:
        return self.bodies.write_together(views, offset)

    def _move(self, unit: BodyToWrite) -> None:
        self.bodies.write(unit.view, unit.offset, unit.length)


def adjacent_runs(
    units: Sequence[PlacedT], size_bytes_max: int = TOGETHER_BYTES_MAX
) -> list[list[PlacedT]]:
    """The units in their order, those together that one call may move."""
    runs: list[list[PlacedT]] = []
    end = size_bytes = -1
    for unit in units:
        padded = padded_bytes(unit.length)
        if unit.offset != end or size_bytes + padded > size_bytes_max or not runs:
            runs.append([])
            size_bytes = 0
        runs[-1].append(unit)
        size_bytes += padded
        end = unit.offset + padded
    return runs


def runs_to_read(units: Sequence[BodyToRead], idle_depth: int) -> list[list[BodyToRead]]:
    """The units, those together that one call shall read; what stands first is read first.

    ``idle_depth`` is how many calls the device would take before any has to wait: so many get
    something to do before calls are made larger. Few units are thus read side by side, and many
    with few calls.
    """
    size_bytes = sum(padded_bytes(unit.length) for unit in units)
    size_bytes_max = min(TOGETHER_BYTES_MAX, size_bytes // max(1, idle_depth))
    # A chain lies in its order on the device where its slots were found in theirs; where other
    # chains have left gaps, or writes ended out of turn, its parts lie in any.
    runs = adjacent_runs(sorted(units, key=lambda unit: unit.offset), size_bytes_max)
    position = {unit.offset: index for index, unit in enumerate(units)}
    return sorted(runs, key=lambda run: min(position[unit.offset] for unit in run))
