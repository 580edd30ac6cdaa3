"""The examples of docs/engines/vllm.md, run: as they stand, with nothing set that they do not set
but what makes an engine small."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.engines import documents
from tests.engines.api_server import ApiServer
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.tiny_model import ensure_tiny_model
from tests.engines.vllm_engine import (
    BLOCK_TOKENS,
    VllmEngine,
    loadable_tokens,
    octavo_connector,
)
from tests.nodes import NodeProcess

LONG = pytest.mark.long
REQUEST = Request(prompt(700, 2048))
"""Long enough to be worth loading whatever the machine is busy with."""

TRIES = 3
"""A match may take longer than its quarter of a second on a machine with other work."""


@pytest.fixture
def home() -> Iterator[Path]:
    """``$XDG_RUNTIME_DIR``, short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="octavo-test-") as folder:
        yield Path(folder)


@pytest.fixture
def node(home: Path, tmp_path: Path) -> Iterator[NodeProcess]:
    """A node on its default socket."""
    (home / "octavo").mkdir(mode=0o700)
    socket = home / "octavo" / "octavo.sock"
    node = NodeProcess(tmp_path / "node", listen_unix=socket)
    node.socket = socket
    with node:
        yield node


def test_python_example_loads_after_a_restart(
    node: NodeProcess, home: Path, reference: Reference, tmp_path: Path
) -> None:
    program = documents.program()
    assert program.count('model="..."') == 1
    program = program.replace('"..."', repr(str(ensure_tiny_model())))
    expected = reference.token_ids([REQUEST])
    environment = {"XDG_RUNTIME_DIR": str(home), "OCTAVO_ADDRESS": ""}
    with VllmEngine(tmp_path, program=program, environment=environment) as first:
        cold = first.generate([REQUEST])
        assert cold.token_ids == expected
        assert cold.cached_token_counts == [0]
        first.stop()
    with VllmEngine(tmp_path, program=program, environment=environment) as second:
        cached: list[int] = []
        for _try in range(TRIES):
            second.reset_prefix_cache()
            warm = second.generate([REQUEST])
            assert warm.token_ids == expected
            cached += warm.cached_token_counts
            if any(cached):
                break
        assert cached[-1] == loadable_tokens(REQUEST)


@LONG
def test_settings_example_is_one_that_an_engine_takes(
    reference: Reference, node: NodeProcess, tmp_path: Path
) -> None:
    extra = json.loads(documents.settings())
    connector = octavo_connector(node.address, **extra)
    with VllmEngine(tmp_path, connector=connector) as engine:
        assert engine.generate([REQUEST]).token_ids == reference.token_ids([REQUEST])
        engine.drain()
        engine.reset_prefix_cache()
        found = engine.generate([REQUEST])
    assert found.token_ids == reference.token_ids([REQUEST])
    assert found.cached_token_counts == [loadable_tokens(REQUEST)]


@LONG
def test_server_with_the_example_loads_after_a_restart_and_heeds_what_requests_say(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    environment = {"OCTAVO_ADDRESS": node.address}
    kept, elsewhere, unkept = (Request(prompt(seed, 2048)) for seed in (710, 711, 712))
    expected = reference.token_ids([kept, elsewhere, unkept])
    pages = loadable_tokens(kept) // BLOCK_TOKENS

    with ApiServer(tmp_path, documents.transfer_config(), environment) as server:
        for request, right in zip((kept, elsewhere), expected, strict=False):
            assert _token_ids(server.complete(request.token_ids)) == right
        server.complete(unkept.token_ids, kv_transfer_params={"octavo": {"store": False}})
        server.stop()

    configured = json.loads(documents.transfer_config())
    configured["kv_connector_extra_config"] = {
        "namespaces": ["second"],
        "load_policy": "always",
        "match_timeout_s": 20.0,
    }
    with ApiServer(tmp_path, json.dumps(configured), environment) as server:
        answers = [
            server.complete(kept.token_ids),
            server.complete(
                elsewhere.token_ids, kv_transfer_params={"octavo": {"namespace": "second"}}
            ),
            server.complete(unkept.token_ids),
        ]
        assert [_token_ids(each) for each in answers] == expected
        assert [_cached(each) for each in answers] == [loadable_tokens(kept), 0, 0]
        unknown = prompt(713, 100)
        server.complete(unknown, kv_transfer_params={"octavo": {"namespace": "third"}})
        metrics = server.metrics()
    assert metrics["vllm:octavo_loaded_pages_total"] == pages
    assert metrics["vllm:octavo_bad_params_total"] == 1
    assert metrics["vllm:octavo_matches_total"] == 3
    assert metrics["vllm:external_prefix_cache_hits_total"] == loadable_tokens(kept)
    by_source = "vllm:prompt_tokens_by_source_total/external_kv_transfer"
    assert metrics[by_source] == loadable_tokens(kept)


def _token_ids(answer: dict[str, Any]) -> list[int]:
    (choice,) = answer["choices"]
    token_ids: list[int] = choice["token_ids"]
    return token_ids


def _cached(answer: dict[str, Any]) -> int:
    details: dict[str, int] = answer["usage"]["prompt_tokens_details"]
    return details["cached_tokens"]
