"""Records, frames and what is live after replaying them. No files."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo_server.store.nvme.records import (
    RECORD,
    FileKind,
    FrameHeader,
    Kind,
    Records,
    count_deletes,
    encode_frame,
    store_seed,
)
from octavo_server.store.nvme.replay import FileScan, LogEnd, Replay, replay, scan

SEED = store_seed(b"0123456789abcdef")

Event = tuple[Kind, int, int]
"""What happened, to which key, and the slot it names."""

KINDS = st.sampled_from([Kind.PUT, Kind.PUT, Kind.PUT, Kind.FORGET, Kind.DELETE])
EVENTS = st.lists(st.tuples(KINDS, st.integers(0, 5), st.integers(0, 7)), max_size=60)


def records_of(events: list[Event], first_sequence: int = 1) -> Records:
    records = np.zeros(len(events), dtype=RECORD)
    for row, (kind, key, slot) in enumerate(events):
        records[row]["kind"] = kind
        records[row]["key"] = (key % 3, key)
        records[row]["unit"] = key % 2
        records[row]["namespace"] = key % 2
        records[row]["offset"] = slot * 4096
        records[row]["length"] = 4000
        records[row]["sequence"] = first_sequence + row
    return records


class Writer:
    """Writes logs frame by frame, as the store does."""

    def __init__(self) -> None:
        self.sequence = 1
        self.deletes = 0

    def frame(self, events: list[Event], number: int = 1) -> bytes:
        records = records_of(events, self.sequence)
        header = FrameHeader(FileKind.LOG, number, len(records), self.sequence, self.deletes)
        self.sequence += len(records)
        self.deletes += count_deletes(records)
        return encode_frame(header, records, SEED)

    @property
    def end(self) -> LogEnd:
        return LogEnd(self.sequence, self.deletes)


def scan_log(data: bytes, number: int = 1) -> FileScan:
    return scan(np.frombuffer(data, dtype=np.uint8), FileKind.LOG, number, SEED)


def snapshot_of(live: Records, end: LogEnd, number: int) -> FileScan:
    header = FrameHeader(FileKind.SNAPSHOT, number, len(live), end.next_sequence, end.delete_count)
    data = np.frombuffer(encode_frame(header, live, SEED), dtype=np.uint8)
    return scan(data, FileKind.SNAPSHOT, number, SEED)


def model(events: list[Event]) -> dict[int, tuple[int, int]]:
    """Key → (slot, when): what a plain dict says, before slots that two keys claim."""
    live: dict[int, tuple[int, int]] = {}
    for when, (kind, key, slot) in enumerate(events):
        if kind is Kind.PUT:
            live[key] = (slot, when)
        elif kind is Kind.DELETE or (key in live and live[key][0] == slot):
            live.pop(key, None)
    return live


def without_clashes(live: dict[int, tuple[int, int]]) -> dict[int, int]:
    """Key → slot, where of keys in one slot the youngest has it."""
    owner: dict[int, tuple[int, int]] = {}
    for key, (slot, when) in live.items():
        if slot not in owner or owner[slot][0] < when:
            owner[slot] = (when, key)
    return {key: slot for slot, (_, key) in owner.items()}


def slots_of(replayed: Replay) -> dict[int, int]:
    found = {int(r["key"][1]): int(r["offset"]) // 4096 for r in replayed.live}
    assert len(found) == len(replayed.live), "a unit is live twice"
    return found


@settings(derandomize=True, deadline=None, max_examples=300)
@given(EVENTS, st.lists(st.integers(0, 60), max_size=6))
def test_replay_agrees_with_a_dict(events: list[Event], cuts: list[int]) -> None:
    writer, data, begin = Writer(), b"", 0
    for end in [*sorted(cut for cut in cuts if cut < len(events)), len(events)]:
        data += writer.frame(events[begin:end])
        begin = end
    replayed = replay(None, [scan_log(data)])
    assert slots_of(replayed) == without_clashes(model(events))
    assert replayed.next_sequence == len(events) + 1
    assert replayed.delete_count == sum(kind is Kind.DELETE for kind, _, _ in events)
    assert replayed.lost_record_count == replayed.distrusted_record_count == 0


@settings(derandomize=True, deadline=None, max_examples=200)
@given(EVENTS, EVENTS)
def test_a_snapshot_stands_for_the_logs_before_it(before: list[Event], after: list[Event]) -> None:
    writer = Writer()
    first = scan_log(writer.frame(before))
    end = writer.end
    second = scan_log(writer.frame(after, number=2), number=2)
    snapshot = snapshot_of(replay(None, [first], end).live, end, 2)
    compacted, plain = replay(snapshot, [second]), replay(None, [first, second])
    clashes = slots_of(replay(None, [first])) != {k: s for k, (s, _) in model(before).items()}
    if not clashes:
        assert slots_of(compacted) == slots_of(plain)
    assert compacted.next_sequence == plain.next_sequence
    assert compacted.delete_count == plain.delete_count
    assert compacted.lost_record_count == 0


def test_records_come_back_as_they_were_written() -> None:
    events: list[Event] = [(Kind.PUT, key, key) for key in range(100)]
    records = records_of(events)
    records["digest"] = np.arange(100, dtype=np.uint64) * np.uint64(2**57 - 1)
    records["parent"] = 2**64 - 1
    records["position"] = 2**32 - 1
    frame = encode_frame(FrameHeader(FileKind.LOG, 1, 100, 1, 0), records, SEED)
    scanned = scan_log(
        frame + encode_frame(FrameHeader(FileKind.LOG, 1, 100, 101, 0), records, SEED)
    )
    assert scanned.records.tobytes() == records.tobytes() * 2
    assert not scanned.torn
    assert scanned.gap_count == 0


def test_a_log_torn_at_any_byte_of_its_last_frame_loses_that_frame_only() -> None:
    writer = Writer()
    whole = writer.frame([(Kind.PUT, 1, 1), (Kind.PUT, 2, 2)])
    last = writer.frame([(Kind.PUT, 3, 3), (Kind.FORGET, 1, 1)])
    for kept in range(len(last)):
        scanned = scan_log(whole + last[:kept])
        assert slots_of(replay(None, [scanned])) == {1: 1, 2: 2}
        assert scanned.sound_bytes == len(whole)
        assert scanned.torn == (kept > 0)
    assert slots_of(replay(None, [scan_log(whole + last)])) == {2: 2, 3: 3}


def test_every_flipped_bit_of_a_frame_is_noticed() -> None:
    frame = Writer().frame([(Kind.PUT, 1, 1)])
    for bit in range(8 * len(frame)):
        flipped = bytearray(frame)
        flipped[bit // 8] ^= 1 << bit % 8
        assert not len(scan_log(bytes(flipped)).headers)


def test_a_damaged_frame_costs_its_own_puts_only() -> None:
    writer = Writer()
    frames = [writer.frame([(Kind.PUT, key, key)]) for key in range(5)]
    damaged = bytearray(frames[2])
    damaged[100] ^= 1
    scanned = scan_log(b"".join([*frames[:2], bytes(damaged), *frames[3:]]))
    replayed = replay(None, [scanned])
    assert slots_of(replayed) == {0: 0, 1: 1, 3: 3, 4: 4}
    assert scanned.gap_count == 1
    assert replayed.lost_record_count == 1
    assert replayed.next_sequence == 6


def test_a_lost_forget_leaves_the_slot_to_its_younger_claimant() -> None:
    writer = Writer()
    first = writer.frame([(Kind.PUT, 1, 1), (Kind.PUT, 2, 2)])
    writer.frame([(Kind.FORGET, 1, 1)])  # never reaches the log
    second = writer.frame([(Kind.PUT, 3, 1)])
    replayed = replay(None, [scan_log(first + second)])
    assert slots_of(replayed) == {2: 2, 3: 1}
    assert replayed.overlap_count == 1


def test_a_lost_delete_makes_everything_older_unbelievable() -> None:
    writer = Writer()
    first = writer.frame([(Kind.PUT, 1, 1), (Kind.PUT, 2, 2)])
    lost = bytearray(writer.frame([(Kind.DELETE, 1, 1)]))
    lost[60] ^= 4
    second = writer.frame([(Kind.PUT, 3, 3)])
    replayed = replay(None, [scan_log(first + bytes(lost) + second)])
    assert slots_of(replayed) == {3: 3}
    assert replayed.distrusted_record_count == 2
    assert replayed.delete_count == 1


def test_a_delete_lost_with_the_end_of_a_log_is_noticed_in_the_next_log() -> None:
    writer = Writer()
    first = writer.frame([(Kind.PUT, 1, 1)])
    writer.frame([(Kind.DELETE, 1, 1)])
    end = writer.end
    second = writer.frame([(Kind.PUT, 2, 2)], number=2)
    assert slots_of(replay(None, [scan_log(first), scan_log(second, number=2)])) == {2: 2}
    assert slots_of(replay(None, [scan_log(first)], end)) == {}


def test_a_delete_lost_at_the_start_of_a_log_makes_the_snapshot_unbelievable() -> None:
    writer = Writer()
    live = replay(None, [scan_log(writer.frame([(Kind.PUT, 1, 1)]))]).live
    snapshot = snapshot_of(live, writer.end, 2)
    writer.frame([(Kind.DELETE, 1, 1)], number=2)  # never reaches the log
    log = scan_log(writer.frame([(Kind.PUT, 2, 2)], number=2), number=2)
    replayed = replay(snapshot, [log])
    assert slots_of(replayed) == {2: 2}
    assert replayed.distrusted_record_count == 1


def test_a_delete_reaches_a_unit_whose_newer_put_was_lost() -> None:
    writer = Writer()
    first = writer.frame([(Kind.PUT, 1, 1)])
    writer.frame([(Kind.FORGET, 1, 1), (Kind.PUT, 1, 2)])  # never reaches the log
    second = writer.frame([(Kind.DELETE, 1, 2)])
    assert slots_of(replay(None, [scan_log(first + second)])) == {}


def test_frames_of_another_store_or_file_do_not_count() -> None:
    frame = Writer().frame([(Kind.PUT, 1, 1)])
    data = np.frombuffer(frame, dtype=np.uint8)
    other_seed = store_seed(b"another store...")
    assert not len(scan(data, FileKind.LOG, 1, other_seed).headers)
    assert not len(scan(data, FileKind.LOG, 2, SEED).headers)
    assert not len(scan(data, FileKind.SNAPSHOT, 1, SEED).headers)


def test_a_repeated_frame_tells_nothing_new() -> None:
    writer = Writer()
    put, forget = writer.frame([(Kind.PUT, 1, 1)]), writer.frame([(Kind.FORGET, 1, 1)])
    assert slots_of(replay(None, [scan_log(put + forget + put)])) == {}


def test_noise_is_no_log() -> None:
    noise = np.random.default_rng(3).bytes(100_000)
    scanned = scan_log(noise)
    assert not len(scanned.headers)
    assert scanned.torn
    assert not scan_log(b"").torn


def test_of_long_bodies_that_overlap_the_younger_lives() -> None:
    records = records_of([(Kind.PUT, key, 0) for key in range(4)])
    records["offset"] = [0, 8192, 20480, 40960]
    records["length"] = [9000, 4096, 30000, 1]
    frame = encode_frame(FrameHeader(FileKind.LOG, 1, 4, 1, 0), records, SEED)
    # 0 (to 12288) loses to 1; 2 (to 53248) loses to 3.
    assert set(slots_of(replay(None, [scan_log(frame)]))) == {1, 3}
