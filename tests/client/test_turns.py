"""Several sessions put one chain, each the pages that are its turn."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.client.contract import (
    LAYOUT,
    UNIT,
    UNITS,
    Bytes,
    buffer_for,
    client_of,
    content,
    joined,
    prompt,
    sink_for,
    transport_of,
)
from tests.client.movers import ForeignObjects
from tests.client.test_lifecycle import until, worker
from tests.nodes import NodeProcess

import octavo
from octavo import Layout, Status, Transfer
from octavo.shards import ShardMap

both_transports = pytest.mark.parametrize("transport", ["shm", "grpc"])

MLA = Layout(
    name="mla", model="m", kind=octavo.KvKind.MLA, layers=2, kv_heads=1, head_dim=16, rope_dim=8
)
"""Whoever shares its latents puts them in turns; the tests' own pages stand in for them."""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(directory, staging_ring_bytes="1MiB", reservation_s=2) as process:
        yield process


class TurnSource:
    """Units of a whole prompt. Says which of them were asked for, and fills nothing before
    ``everybody`` has begun to fill."""

    def __init__(self, data: Bytes, everybody: threading.Barrier | None = None) -> None:
        self._units = data.reshape(-1, UNITS, UNIT)
        self._everybody = everybody
        self.filled: list[int] = []

    def unit_bytes(self, position: int, unit: int) -> int:
        return UNIT

    def variant(self, position: int) -> int:
        return 1

    def fill(self, position: int, unit: int, view: memoryview) -> int | None:
        if not self.filled and self._everybody is not None:
            self._everybody.wait(10)
        self.filled.append(position)
        view[:] = self._units[position, unit].tobytes()
        return UNIT


@pytest.mark.parametrize("transports", [("shm", "shm"), ("grpc", "grpc"), ("shm", "grpc")])
@pytest.mark.parametrize("page_count", [1, 6, 7])
def test_ranks_put_a_chain_in_turns_at_the_same_time_and_another_session_reads_it(
    node: NodeProcess, transports: tuple[str, str], page_count: int
) -> None:
    data, shards = content(page_count, page_count), ShardMap(MLA, tp=2)
    everybody = threading.Barrier(min(2, page_count))
    results: list[octavo.PutResult] = []

    def rank(turn: int, transport: str) -> None:
        shard, source = shards.shard(turn), TurnSource(data, everybody)
        with client_of(node.address, transport) as client:
            chain = client.chain(prompt(page_count, page_count))
            result = client.put(chain, source, positions=shard.put_positions(chain.page_count))
        mine = [position for position in range(page_count) if position % 2 == turn]
        if sorted(source.filled) == sorted(mine * UNITS):
            results.append(result)

    with client_of(node.address, transports[0]) as reader:
        reader.clear()
        ranks = [
            threading.Thread(target=rank, args=(turn, transport))
            for turn, transport in enumerate(transports)
        ]
        for thread in ranks:
            thread.start()
        for thread in ranks:
            thread.join()
        assert len(results) == 2, "a rank filled other pages than its own, or failed"
        assert sum(result.stored_pages for result in results) == page_count
        assert sum(len(result.statuses) for result in results) == page_count * UNITS
        assert sum(result.bytes_put for result in results) == data.nbytes
        chain, buffer = reader.chain(prompt(page_count, page_count)), buffer_for(page_count)
        assert reader.match(chain).page_count == page_count
        assert reader.get(chain, sink_for(buffer)).counts == {Status.DONE: page_count}
        assert np.array_equal(buffer, data)


@both_transports
def test_turns_go_on_as_the_chain_grows_and_may_fall_unevenly(
    node: NodeProcess, transport: str
) -> None:
    first, second = content(21, 4), content(22, 5)
    data = np.concatenate([first, second])
    with client_of(node.address, transport) as client:
        client.clear()
        begun, whole = (
            client.chain(prompt(21, 4)),
            client.chain(joined(prompt(21, 4), prompt(22, 5))),
        )
        shards = ShardMap(MLA, tp=3).shards()
        for shard in shards:
            client.put(begun, TurnSource(data), positions=shard.put_positions(4))
        assert client.match(begun).page_count == 4
        stored: list[int] = []
        for shard in shards:
            result = client.put(
                whole,
                TurnSource(data),
                first_page=4,
                positions=shard.put_positions(5, first_page=4),
            )
            stored.append(result.stored_pages)
        assert stored == [1, 2, 2]  # pages 6, then 4 and 7, then 5 and 8
        buffer = buffer_for(9)
        assert client.get(whole, sink_for(buffer)).page_count == 9
        assert np.array_equal(buffer, data)


@both_transports
def test_a_rank_without_a_turn_puts_nothing(node: NodeProcess, transport: str) -> None:
    with client_of(node.address, transport) as client:
        client.clear()
        shard = ShardMap(MLA, tp=4).shard(3)
        chain, source = client.chain(prompt(23, 3)), TurnSource(content(23, 3))
        result = client.put(chain, source, positions=shard.put_positions(3))
        assert (len(result.statuses), result.stored_pages, source.filled) == (0, 0, [])
        assert client.match(chain).pending_count == 0


def reach(client: octavo.Client, chain: octavo.Chain) -> tuple[int, int]:
    """Pages that are found, and those right behind them that are being written."""
    found = client.match(chain)
    return found.page_count, found.pending_count


@both_transports
def test_a_rank_that_dies_leaves_the_others_pages_readable_up_to_the_gap(
    tmp_path: Path, transport: str
) -> None:
    with (
        NodeProcess(tmp_path, session_idle_s=1, reservation_s=1) as node,
        client_of(node.address, transport) as client,
    ):
        chain, data = client.chain(prompt(9, 6)), content(9, 6)
        with worker("stall-in-turn", node.address, transport) as dying:
            assert client.put(chain, TurnSource(data), positions=[0, 2, 4]).stored_pages == 3
            until(lambda: reach(client, chain) == (3, 1), 15)  # page 3 is pending; 4 is there
            dying.kill()
        until(lambda: reach(client, chain) == (3, 0), 5)
        buffer = buffer_for(3)
        assert client.get(chain, sink_for(buffer), page_count=3).page_count == 3
        assert np.array_equal(buffer, data[: buffer.nbytes])
        # What lies behind the gap is still there for whoever fills it.
        again = client.put(chain, TurnSource(data))
        assert (again.stored_pages, again.present_pages) == (2, 4)
        buffer = buffer_for(6)
        assert client.get(chain, sink_for(buffer)).page_count == 6
        assert np.array_equal(buffer, data)


@both_transports
def test_turns_larger_than_the_staging_ring_pass_through_it(
    node: NodeProcess, transport: str
) -> None:
    data = content(24, 300)  # 2.3 MiB a turn through a ring of 1 MiB
    with client_of(node.address, transport) as client:
        client.clear()
        chain = client.chain(prompt(24, 300))
        for shard in ShardMap(MLA, tp=2).shards():
            turns = shard.put_positions(300)
            source = octavo.BufferSource(data, UNIT, rows=turns)
            assert client.put(chain, source, positions=turns).stored_pages == 150
        buffer = buffer_for(300)
        assert client.get(chain, sink_for(buffer)).page_count == 300
        assert np.array_equal(buffer, data)


@both_transports
def test_single_foreign_pages_are_put_of_many(node: NodeProcess, transport: str) -> None:
    names = [f"object {number}".encode() for number in range(5)]
    objects = ForeignObjects({name: name * (10 + place) for place, name in enumerate(names)})
    objects.names = names
    with client_of(node.address, transport) as client:
        client.clear()
        chain = client.foreign_chain(names, "foreign")
        assert client.put(chain, objects, positions=[1, 4]).counts == {Status.STORED: 2}
        assert client.match(chain).present.tolist() == [False, True, False, False, True]


def test_the_asyncio_face_puts_turns_too(node: NodeProcess) -> None:
    async def story(transport: str) -> None:
        data = content(25, 5)
        with client_of(node.address, transport) as client:
            client.clear()
            client.connect()
            chosen = transport_of(client)
        async with (
            octavo.AsyncClient(node.address, layouts=[LAYOUT], transport=chosen) as even,
            octavo.AsyncClient(node.address, layouts=[LAYOUT], transport=chosen) as odd,
        ):
            puts = await asyncio.gather(
                *(
                    face.put(
                        face.chain(prompt(25, 5)), TurnSource(data), positions=range(turn, 5, 2)
                    )
                    for turn, face in enumerate((even, odd))
                )
            )
            assert [put.stored_pages for put in puts] == [3, 2]
            buffer = buffer_for(5)
            got = await odd.get(odd.chain(prompt(25, 5)), sink_for(buffer))
            assert got.page_count == 5
            assert np.array_equal(buffer, data)

    for transport in ("shm", "grpc"):
        asyncio.run(story(transport))


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([2, 1], "must ascend"),
        ([1, 1], "must ascend"),
        ([0.0, 1.0], "whole numbers"),
        ([[0, 1]], "one dimension"),
        ([1, 2], "positions 1 to 2 wanted, the call is about pages 2 to 4"),
        ([3, 5], "positions 3 to 5 wanted, the call is about pages 2 to 4"),
    ],
)
def test_positions_that_contradict_the_call_are_refused(
    node: NodeProcess, positions: list[int], message: str
) -> None:
    with client_of(node.address, "shm") as client:
        chain = client.chain(prompt(26, 6))
        with pytest.raises(octavo.InvalidRequest, match=message):
            client.put(
                chain, TurnSource(content(26, 6)), first_page=2, page_count=3, positions=positions
            )


def test_a_node_that_only_reserves_whole_chains_is_named(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.calls.POSITIONS_FEATURE", "a feature of the future")
    with client_of(node.address, "shm") as client:
        chain, source = client.chain(prompt(27, 2)), TurnSource(content(27, 2))
        with pytest.raises(octavo.InvalidRequest, match="cannot reserve some positions only"):
            client.put(chain, source, positions=[1])
        assert client.put(chain, source).stored_pages == 2


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sets(st.integers(3, 40), min_size=1), st.sets(st.integers(0, 1), min_size=1))
def test_rows_of_a_transfer_and_chosen_positions_say_the_same(
    positions: set[int], units: set[int]
) -> None:
    chosen = np.array(sorted(positions), dtype=np.int64)
    transfer = Transfer(LAYOUT, 3, len(chosen), tuple(sorted(units)), chosen)
    numbers = np.arange(transfer.row_count)
    assert transfer.positions.tolist() == sorted(positions)
    assert transfer.page_end == max(positions) + 1
    assert transfer.positions_of(numbers).tolist() == chosen.repeat(len(units)).tolist()
    places, are_there = transfer.places_of(np.arange(45))
    assert np.flatnonzero(are_there).tolist() == sorted(positions)
    assert places[are_there].tolist() == list(range(len(chosen)))
