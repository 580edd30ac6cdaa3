"""Opening a store: from the files of an earlier run to slots that are taken again. Blocking."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo_server.store.file_ops import FileOps
from octavo_server.store.nvme.bodies import Bodies
from octavo_server.store.nvme.compaction import (
    StoredState,
    read_state,
    remove_superseded,
    remove_temporaries,
    write_snapshot,
)
from octavo_server.store.nvme.health import StoreCounters
from octavo_server.store.nvme.log import LogFile
from octavo_server.store.nvme.records import BODY_ALIGN_BYTES, Records
from octavo_server.store.nvme.replay import LogEnd
from octavo_server.store.slabs import SlabAllocator


@dataclass(frozen=True, slots=True)
class Recovery:
    """``live``: the PUT records whose slots the allocator has adopted."""

    live: Records
    log: LogFile
    log_record_count: int


def recover(
    directory: Path,
    *,
    seed: int,
    files: FileOps,
    bodies: Bodies,
    slabs: SlabAllocator,
    layouts: Collection[int],
    counters: StoreCounters,
) -> Recovery:
    """Replays the metadata files, adopts what is live, and opens the log to go on.

    Records that can't be kept (their layout was dropped, the capacity shrank, the slabs have
    another size now) are dropped for good: the files are rewritten without them, so that no
    later run with other settings brings them back. Raises OSError.
    """
    remove_temporaries(directory, files)
    state = read_state(directory, files, seed)
    replayed = state.replay
    live = replayed.live
    live = live[_usable(live, bodies, slabs, layouts)]
    live = live[np.argsort(live["sequence"], kind="stable")]
    if len(live):
        live = live[slabs.adopt(live["offset"].astype(np.int64), live["length"])]
    dropped = len(replayed.live) - len(live)
    counters.frames_torn += state.torn_count
    counters.frames_damaged += state.gap_count
    counters.records_lost += replayed.lost_record_count
    counters.records_dropped += dropped + replayed.distrusted_record_count + replayed.overlap_count
    end = LogEnd(replayed.next_sequence, replayed.delete_count)
    if _needs_rewrite(state, dropped):
        number = state.log_number + 1
        try:
            write_snapshot(directory, number, live, end, seed=seed, files=files)
        except OSError:  # a full disk, say; the next run comes to the same conclusions
            counters.compaction_errors += 1
        else:
            log = LogFile(directory, number, seed=seed, end=end, size_bytes=0, files=files)
            return Recovery(live, log, 0)
    remove_superseded(directory, files)
    number = max(1, state.log_number)
    size_bytes = state.log_sound_bytes
    log = LogFile(directory, number, seed=seed, end=end, size_bytes=size_bytes, files=files)
    return Recovery(live, log, state.log_record_count)


def _needs_rewrite(state: StoredState, dropped: int) -> bool:
    """Whether the next run, too, would find what this one dropped or had to do without."""
    replayed = state.replay
    return bool(
        dropped
        or state.gap_count
        or replayed.lost_record_count
        or replayed.distrusted_record_count
        or replayed.overlap_count
    )


def _usable(
    live: Records, bodies: Bodies, slabs: SlabAllocator, layouts: Collection[int]
) -> NDArray[np.bool_]:
    """Which records name a known layout, and bytes that the bodies file had and has."""
    size_bytes = min(bodies.capacity_bytes, bodies.found_bytes)
    length = live["length"].astype(np.int64)
    slot_bytes = np.maximum(1, -(-length // BODY_ALIGN_BYTES)) * BODY_ALIGN_BYTES
    offset = live["offset"].astype(np.int64)
    in_slab = offset % slabs.slab_bytes
    usable: NDArray[np.bool_] = np.isin(live["layout"], np.fromiter(layouts, dtype=np.uint16))
    usable &= offset + length <= size_bytes
    usable &= (in_slab % slot_bytes == 0) & (in_slab + slot_bytes <= slabs.slab_bytes)
    return usable
