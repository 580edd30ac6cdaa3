"""Octavo as a secondary tier of vLLM's OffloadingConnector: the experiment of decision 9 runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.engines.jobs import Request
from tests.engines.offloading_tier import no_region_left, offloading_connector
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import BLOCK_TOKENS, VllmEngine, loadable_tokens
from tests.nodes import NodeProcess

from octavo.client import Client
from octavo_proto.layout import foreign_layout

pytestmark = pytest.mark.long

REQUESTS = [Request(prompt(seed, length)) for seed, length in ((210, 300), (211, 345), (212, 390))]
PRIMARY_BYTES = 64 << 20
STORED_S = 30.0


@pytest.fixture(autouse=True)
def _regions() -> Iterator[None]:
    with no_region_left():
        yield


def wait_until_stored(node: NodeProcess, pages: int) -> None:
    deadline = time.monotonic() + STORED_S
    watching = foreign_layout("watch", "octavo-watch")
    with Client(node.address, layouts=[watching], transport="grpc") as client:
        while (found := client.statistics().counters["put_pages_stored"]) < pages:
            assert time.monotonic() < deadline, f"{found} of {pages} pages are stored"
            time.sleep(0.05)


def test_chunks_come_back_after_an_engine_restart_and_a_node_that_is_gone_costs_only_misses(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    expected = reference.token_ids(REQUESTS)
    connector = offloading_connector(node.address, PRIMARY_BYTES)
    with VllmEngine(tmp_path, connector=connector) as first:
        assert first.generate(REQUESTS).token_ids == expected
        wait_until_stored(node, sum(len(each.token_ids) // BLOCK_TOKENS for each in REQUESTS))
    with VllmEngine(tmp_path, connector=connector) as second:
        warm = second.generate(REQUESTS)
        assert warm.token_ids == expected
        assert [
            found >= loadable_tokens(request)
            for found, request in zip(warm.cached_token_counts, REQUESTS, strict=True)
        ] == [True] * len(REQUESTS)
    with VllmEngine(tmp_path, connector=connector) as third:
        node.kill()
        alone = third.generate(REQUESTS)
        assert alone.token_ids == expected
        assert alone.cached_token_counts == [0] * len(REQUESTS)
