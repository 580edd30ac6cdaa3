"""What is written for a page, and how changes are sorted for it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.index.pages import chain, holder

from octavo_server.index.changes import BATCH_PAGES_MAX, Changes, by_shard, joined, latest
from octavo_server.index.entries import (
    ALL_UNITS,
    HOLDER_ID_MAX,
    VALUE_BYTES_MAX,
    Holding,
    decode_holdings,
    encode_holdings,
    keys_from_fields,
    shards_of,
)
from octavo_server.index.found import Answer, Found, Run
from octavo_server.index.holders import Holder, LeaseTerms
from octavo_server.index.prefix_index import Numbers

holdings = st.builds(Holding, st.integers(1, HOLDER_ID_MAX), st.integers(1, ALL_UNITS))


@given(st.lists(holdings, max_size=8, unique_by=lambda each: each.holder_id))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_what_is_written_is_read_back_in_order(found: list[Holding]) -> None:
    value = encode_holdings(tuple(found))
    assert decode_holdings(value) == tuple(sorted(found))
    whole = sum(each.units == ALL_UNITS for each in found)
    assert len(value) == 4 * whole + 12 * (len(found) - whole)


def test_bytes_of_somebody_else_are_read_as_far_as_they_make_sense() -> None:
    value = encode_holdings((Holding(1), Holding(2, 0b11)))
    assert decode_holdings(value[:-1]) == (Holding(1),)
    assert decode_holdings(value[:3]) == ()
    assert decode_holdings(b"") == ()


def test_sixteen_whole_holders_fit_where_redis_keeps_hashes_small() -> None:
    assert len(encode_holdings(tuple(map(Holding, range(1, 17))))) == VALUE_BYTES_MAX


def test_changes_are_sorted_into_shards_and_kinds() -> None:
    keys = chain(1, 4000)
    units = np.full(4000, ALL_UNITS, dtype=np.uint64)
    units[::3] = 0
    units[1::3] = 0b101
    seen = 0
    shards = shards_of(keys)
    for part in by_shard(Changes(keys, units)):
        of_shard = shards == part.shard
        for fields, mask in (
            (part.whole, units == ALL_UNITS),
            (part.partial, units == 0b101),
            (part.gone, units == 0),
        ):
            assert sorted(fields.tolist()) == sorted(keys[of_shard & mask, 1].tolist())
            seen += len(fields)
        assert set(part.partial_units.tolist()) <= {0b101}
        assert len(part.partial_units) == len(part.partial)
    assert seen == 4000
    assert shards[0] == keys[0].tobytes()[0]  # the key's first byte
    assert (shards_of(keys_from_fields(7, keys[:5, 1])) == 7).all()


def test_only_the_last_change_of_a_page_counts() -> None:
    keys = chain(2, 3)
    changes = joined([Changes.published(keys), Changes.withdrawn(keys[1:]), NOTHING])
    changes = joined([changes, Changes.published(keys[2:])])
    kept = latest(changes)
    assert {key.tobytes(): int(each) for key, each in zip(kept.keys, kept.units, strict=True)} == {
        keys[0].tobytes(): ALL_UNITS,
        keys[1].tobytes(): 0,
        keys[2].tobytes(): ALL_UNITS,
    }
    assert latest(kept) is kept
    assert len(latest(NOTHING)) == 0


def test_batches_cover_everything_once() -> None:
    changes = Changes.published(chain(3, 2 * BATCH_PAGES_MAX + 1))
    parts = list(changes.batches())
    assert [len(each) for each in parts] == [BATCH_PAGES_MAX, BATCH_PAGES_MAX, 1]
    assert (joined(parts).keys == changes.keys).all()


def test_every_attempt_has_a_number_above_all_that_are_known() -> None:
    numbers = Numbers()
    assert [numbers.next(), numbers.next()] == [1, 2]
    numbers.confirm(5, 40)
    assert numbers.next() == 41
    assert numbers.confirmed.sum() == 40


def test_found_counts_pages_whose_units_are_there_together() -> None:
    runs = (
        Run(0, 3, (Holding(1),)),
        Run(3, 5, (Holding(1, 0b01), Holding(2, 0b10))),
        Run(5, 9, (Holding(2, 0b10),)),
    )
    found = Found(runs, {}, Answer.COMPLETE)
    assert (found.page_count, found.pages_with(0b11), found.pages_with(0b10)) == (9, 5, 9)
    assert (found.pages_with(0b100), found.pages_with(ALL_UNITS)) == (3, 3)
    assert Found((), {}).pages_with(1) == 0


def test_holders_that_cannot_be_written_are_refused_by_name() -> None:
    assert Holder.decode(holder("a").encode()) == holder("a")
    with pytest.raises(ValueError, match="node_id has 0 bytes"):
        holder("")
    with pytest.raises(ValueError, match="store has 300 bytes"):
        holder("a", "s" * 300)
    with pytest.raises(ValueError, match="printable"):
        holder("a\nb")
    for record in (b"[]", b"{}", b"nonsense", b'{"node_id": "a"}'):
        with pytest.raises(ValueError, match=r"record|Expecting"):
            Holder.decode(record)
    with pytest.raises(ValueError, match="lease_s"):
        LeaseTerms(lease_s=2, keep_s=1)


NOTHING = Changes.published(chain(0, 0))
