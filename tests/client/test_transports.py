"""One contract for all transports, on a real node."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from tests.client.contract import (
    LAYOUT,
    UNIT,
    UNITS,
    buffer_for,
    client_of,
    content,
    joined,
    prompt,
    sink_for,
    stored_prompt,
    transport_of,
)
from tests.client.movers import FailingSink, FailingSource, ForeignObjects, SlowSink, SlowSource
from tests.nodes import NodeProcess

import octavo
from octavo import Status

LEASE_S = 0.6


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Generator[NodeProcess]:
    directory: Path = tmp_path_factory.mktemp("node")
    with NodeProcess(
        directory,
        memory_bytes="64MiB",
        staging_ring_bytes="1MiB",
        lease_s=LEASE_S,
        hold_s=1,
        reservation_s=2,
        listen_bulk="127.0.0.1:0",
        allow_unauthenticated_tcp="true",
    ) as process:
        yield process


@pytest.fixture(params=["shm", "bulk", "grpc"])
def client(node: NodeProcess, request: pytest.FixtureRequest) -> Iterator[octavo.Client]:
    with client_of(node.address, request.param) as made:
        made.connect()
        made.clear()
        assert made.transport_name == request.param
        yield made


@pytest.fixture
def other(node: NodeProcess, client: octavo.Client) -> Iterator[octavo.Client]:
    """A second session with the same transport."""
    with client_of(node.address, client.transport_name or "") as made:
        yield made


class TestEveryTransport:
    def test_what_was_put_is_matched_and_got(
        self, client: octavo.Client, other: octavo.Client
    ) -> None:
        _, data = stored_prompt(client, 1, 20)
        chain = other.chain(prompt(1, 20))
        found = other.match(chain)
        assert (found.page_count, found.token_count) == (20, 320)
        assert [(run.tier, run.page_count) for run in found.runs] == [(octavo.Tier.MEMORY, 20)]
        buffer = buffer_for(20)
        got = other.get(chain, sink_for(buffer))
        assert got.counts == {Status.DONE: 20}
        assert got.page_count == 20
        assert got.bytes_copied == data.nbytes
        assert np.array_equal(buffer, data)

    def test_a_longer_prompt_gets_its_known_prefix(self, client: octavo.Client) -> None:
        chain, data = stored_prompt(client, 2, 8)
        chain.extend(range(1, 65))
        assert client.match(chain).page_count == 8
        buffer = buffer_for(12)
        got = client.get(chain, sink_for(buffer))
        assert got.page_count == 8
        assert got.counts == {Status.DONE: 8, Status.MISSING: 4}
        assert np.array_equal(buffer[: data.nbytes], data)

    def test_a_second_put_finds_everything_present(
        self, client: octavo.Client, other: octavo.Client
    ) -> None:
        _, data = stored_prompt(client, 3, 6)
        chain = other.chain(prompt(3, 6))
        again = other.put(chain, octavo.BufferSource(data, UNIT))
        assert again.present_pages == 6
        assert again.counts == {Status.ALREADY_PRESENT: 6 * UNITS}
        assert again.bytes_put == 0

    def test_a_growing_prompt_puts_only_what_is_new(self, client: octavo.Client) -> None:
        stored_prompt(client, 4, 6)
        longer = client.chain(joined(prompt(4, 6), prompt(5, 4)))
        data = np.concatenate([content(4, 6), content(5, 4)])
        result = client.put(longer, octavo.BufferSource(data, UNIT))
        assert result.stored_pages == 4
        assert result.present_pages == 6
        assert result.bytes_put == 4 * UNITS * UNIT
        tail = client.chain(joined(prompt(4, 6), prompt(5, 4), prompt(6, 2)))
        data = content(6, 2)
        result = client.put(tail, octavo.BufferSource(data, UNIT), first_page=10)
        assert result.stored_pages == 2
        assert client.match(tail).page_count == 12

    def test_a_window_is_got_without_what_lies_around_it(self, client: octavo.Client) -> None:
        chain, data = stored_prompt(client, 7, 12)
        buffer = buffer_for(5)
        got = client.get(chain, sink_for(buffer), first_page=4, page_count=5)
        assert got.counts == {Status.DONE: 5}
        assert np.array_equal(buffer, data.reshape(12, -1)[4:9].ravel())

    def test_ranks_put_and_get_their_own_units(
        self, client: octavo.Client, other: octavo.Client
    ) -> None:
        data = content(8, 10).reshape(10, UNITS, UNIT)
        ranks = [client, other]
        for unit, rank in enumerate(ranks):
            chain = rank.chain(prompt(8, 10))
            assert rank.match(chain).page_count == 0, "present only when all units are"
            own = np.ascontiguousarray(data[:, unit])
            result = rank.put(chain, octavo.BufferSource(own, UNIT), units={unit})
            assert result.counts == {Status.STORED: 10}
        for unit, rank in enumerate(ranks):
            buffer = buffer_for(10, units=1)
            got = rank.get(rank.chain(prompt(8, 10)), sink_for(buffer), units=1 << unit)
            assert got.page_count == 10
            assert np.array_equal(buffer.reshape(10, UNIT), data[:, unit])

    def test_more_than_the_staging_ring_holds_passes_through_it(
        self, client: octavo.Client
    ) -> None:
        chain, data = stored_prompt(client, 9, 500)  # 8 MiB through a ring of 1 MiB
        buffer = buffer_for(500)
        assert client.get(chain, sink_for(buffer)).page_count == 500
        assert np.array_equal(buffer, data)

    def test_foreign_pages_of_any_size_are_each_present_for_themselves(
        self, client: octavo.Client
    ) -> None:
        names = [f"object {number}".encode() for number in range(6)]
        store = ForeignObjects({name: name * 997 * (1 + place) for place, name in enumerate(names)})
        store.names = names[::2]
        put = client.put(client.foreign_chain(store.names, "foreign"), store)
        assert put.counts == {Status.STORED: 3}
        chain = client.foreign_chain(names, "foreign")
        assert client.match(chain).present.tolist() == [True, False] * 3
        back = ForeignObjects({})
        back.names = names
        got = client.get(chain, back)
        assert [Status(number) for number in got.statuses] == [Status.DONE, Status.MISSING] * 3
        assert back.objects == {name: store.objects[name] for name in names[::2]}

    def test_a_hold_is_got_and_ends(self, client: octavo.Client) -> None:
        chain, data = stored_prompt(client, 10, 5)
        chain.extend(range(32))
        found = client.match(chain, hold=True)
        assert found.hold is not None
        assert found.hold.page_count == 5
        buffer = buffer_for(5)
        assert client.get(found.hold, sink_for(buffer)).counts == {Status.DONE: 5}
        assert np.array_equal(buffer, data)
        assert found.hold.ended
        assert not found.hold.release()

    def test_a_hold_is_released_once(self, client: octavo.Client) -> None:
        chain, _ = stored_prompt(client, 11, 5)
        hold = client.match(chain, hold=True).hold
        assert hold is not None
        assert hold.release()
        assert not hold.release()

    def test_a_hold_that_ran_out_costs_no_hit(self, client: octavo.Client) -> None:
        chain, data = stored_prompt(client, 12, 5)
        hold = client.match(chain, hold=True).hold
        assert hold is not None
        time.sleep(1.3)
        buffer = buffer_for(5)
        assert client.get(hold, sink_for(buffer)).page_count == 5
        assert np.array_equal(buffer, data)
        assert client.health.counters["hold_expired"] == 1

    def test_delete_and_clear_say_what_they_removed(self, client: octavo.Client) -> None:
        chain, _ = stored_prompt(client, 13, 4)
        shorter = client.chain(prompt(13, 4)[:32])
        chain_tail = client.delete(chain)
        assert chain_tail == [Status.DONE] * 4
        assert client.match(shorter).page_count == 0
        assert client.delete(chain) == [Status.MISSING] * 4
        stored_prompt(client, 14, 3)
        assert client.clear(layout="main") == 3
        assert client.clear() == 0

    def test_without_nvme_a_flush_says_that_nothing_is_durable(self, client: octavo.Client) -> None:
        stored_prompt(client, 15, 3)
        flushed = client.flush()
        assert (flushed.durable_pages, flushed.volatile_pages) == (0, 3)

    def test_statistics_count_what_is_there(self, client: octavo.Client) -> None:
        stored_prompt(client, 16, 3)
        statistics = client.statistics()
        assert client.node is not None
        assert statistics.node_id == client.node.node_id
        memory = next(tier for tier in statistics.tiers if tier.tier == "memory")
        assert memory.page_count == 3
        assert memory.page_bytes == 3 * UNITS * UNIT

    def test_a_get_waits_for_pages_that_another_session_writes(
        self, client: octavo.Client, other: octavo.Client
    ) -> None:
        data = content(17, 6)
        slow = SlowSource(data)
        chain = client.chain(prompt(17, 6))
        writer = threading.Thread(target=client.put, args=(chain, slow))
        writer.start()
        assert slow.started.wait(5)
        mine = other.chain(prompt(17, 6))
        assert other.match(mine).pending_count == 6
        buffer = buffer_for(6)
        no_wait = other.get(mine, sink_for(buffer))
        assert no_wait.page_count == 0
        threading.Timer(0.2, slow.proceed.set).start()
        got = other.get(mine, sink_for(buffer), wait_pending=True)
        writer.join()
        assert got.page_count == 6
        assert np.array_equal(buffer, data)

    def test_a_source_that_fails_gives_its_reservation_back(
        self, client: octavo.Client, other: octavo.Client
    ) -> None:
        chain = client.chain(prompt(18, 4))
        with pytest.raises(ZeroDivisionError):
            client.put(chain, FailingSource())
        data = content(18, 4)
        mine = other.chain(prompt(18, 4))
        deadline_s = time.monotonic() + 1  # the reservation would last two
        while other.match(mine).pending_count and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert other.put(mine, octavo.BufferSource(data, UNIT)).stored_pages == 4

    def test_a_sink_that_fails_leaves_no_lease_behind(self, client: octavo.Client) -> None:
        chain, data = stored_prompt(client, 19, 4)
        with pytest.raises(ZeroDivisionError):
            client.get(chain, FailingSink())
        buffer = buffer_for(4)
        assert client.get(chain, sink_for(buffer)).page_count == 4
        assert np.array_equal(buffer, data)
        assert client.delete(chain) == [Status.DONE] * 4
        memory = next(tier for tier in client.statistics().tiers if tier.tier == "memory")
        assert memory.used_bytes == 0, "a page that is still leased keeps its slot"

    def test_threads_share_a_client(self, client: octavo.Client) -> None:
        wrong: list[int] = []

        def work(seed: int) -> None:
            chain, data = stored_prompt(client, seed, 40)
            for _ in range(5):
                buffer = buffer_for(40)
                got = client.get(chain, sink_for(buffer))
                if got.page_count != 40 or not np.array_equal(buffer, data):
                    wrong.append(seed)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(100, 106)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert client.health.swallowed_count == 0

    def test_the_asyncio_face_does_the_same(self, node: NodeProcess, client: octavo.Client) -> None:
        async def story() -> None:
            transport = transport_of(client)
            async with octavo.AsyncClient(
                node.address, layouts=[LAYOUT], transport=transport
            ) as face:
                data = content(20, 6)
                chain = face.chain(prompt(20, 6))
                put = await face.put(chain, octavo.BufferSource(data, UNIT))
                assert put.stored_pages == 6
                hold = (await face.match(chain, hold=True)).hold
                assert hold is not None
                assert await face.release(hold)
                buffers = [buffer_for(6) for _ in range(12)]
                results = await asyncio.gather(
                    *(face.get(chain, sink_for(buffer)) for buffer in buffers)
                )
                assert [result.page_count for result in results] == [6] * 12
                assert all(np.array_equal(buffer, data) for buffer in buffers)

        asyncio.run(story())

    def test_a_cancelled_get_leaves_the_client_and_the_node_well(
        self, node: NodeProcess, client: octavo.Client
    ) -> None:
        chain, data = stored_prompt(client, 21, 6)
        transport = transport_of(client)

        async def story() -> None:
            async with octavo.AsyncClient(
                node.address, layouts=[LAYOUT], transport=transport, timeout_s=20
            ) as face:
                waiting = face.chain(prompt(22, 6))
                task = asyncio.create_task(
                    face.get(waiting, sink_for(buffer_for(6)), wait_pending=True)
                )
                await asyncio.sleep(0.2)
                began_s = time.monotonic()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert time.monotonic() - began_s < 2
                buffer = buffer_for(6)
                assert (await face.get(face.chain(prompt(21, 6)), sink_for(buffer))).page_count == 6
                assert np.array_equal(buffer, data)

        slow = SlowSource(content(22, 6))
        writer = threading.Thread(target=client.put, args=(client.chain(prompt(22, 6)), slow))
        writer.start()
        assert slow.started.wait(5)
        try:
            asyncio.run(story())
        finally:
            slow.proceed.set()
            writer.join()
        assert client.match(chain).page_count == 6

    def test_a_layout_of_the_same_name_that_differs_is_refused_loudly(
        self, node: NodeProcess, client: octavo.Client
    ) -> None:
        changed = octavo.Layout(
            name="main", model="m", layers=4, kv_heads=2, head_dim=64, dtype="float16"
        )
        transport = client.transport_name or ""
        with closing(client_of(node.address, transport, layout=changed)) as wrong:
            chain = wrong.chain(prompt(1, 4))
            with pytest.raises(octavo.SessionRefused, match="head_dim"):
                wrong.match(chain)
            with pytest.raises(octavo.SessionRefused, match="head_dim"):
                wrong.get(chain, sink_for(buffer_for(4)))

    def test_a_chain_longer_than_the_node_allows_is_refused(self, client: octavo.Client) -> None:
        chain = client.chain(np.zeros(16 * 65_537, dtype=np.int64))
        with pytest.raises(octavo.InvalidRequest, match="65537 pages"):
            client.match(chain)


def test_a_copy_that_outlasts_its_lease_does_not_count(node: NodeProcess) -> None:
    with client_of(node.address, "shm") as client:
        chain, data = stored_prompt(client, 30, 1)
        slow = SlowSink(LEASE_S * 1.8)
        got = client.get(chain, slow)
        assert got.page_count == 0
        assert got.counts == {Status.EXPIRED: 1}
        assert client.health.counters["lease_expired"] == 1
        buffer = buffer_for(1)
        assert client.get(chain, sink_for(buffer)).page_count == 1
        assert np.array_equal(buffer, data)


def test_a_long_copy_in_slices_keeps_its_lease_by_renewing(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.transfer.Rows.slices.__defaults__", (UNIT,))
    with client_of(node.address, "shm") as client:
        chain, _ = stored_prompt(client, 31, 3)
        slow = SlowSink(LEASE_S * 0.35)  # six units: twice the lease in all
        assert client.get(chain, slow).page_count == 3
