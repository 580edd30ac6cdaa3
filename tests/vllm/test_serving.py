"""Both halves together, with a real node: what is stored is loaded, into the right places."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.nodes import NodeProcess
from tests.vllm.engine import Engine, engine_kv

from octavo.vllm.identity import MediaSpan, RequestIdentity
from octavo.vllm.params import RequestParams
from octavo.vllm.settings import ConnectorSettings, Role

PROMPT = list(range(100, 300))
"""200 tokens: 6 blocks of 32, and 8 tokens."""

ALWAYS = ConnectorSettings(load_policy="always", match_timeout_s=20.0)


def test_another_engine_loads_what_one_has_computed(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as first:
        assert first.serve(PROMPT).loaded_tokens == 0
        first.drain()
        assert first.count("saved_pages") == 6
    with Engine(node.address, engine_kv(), ALWAYS) as second:
        assert second.serve(PROMPT).loaded_tokens == 192
        assert second.serve([*PROMPT[:100], *range(500, 600)]).loaded_tokens == 96
        assert second.serve(PROMPT, local_tokens=64).loaded_tokens == 128
        assert second.serve([1, *PROMPT]).loaded_tokens == 0


def test_what_is_saved_right_after_the_start_is_whole(node: NodeProcess) -> None:
    """Staging memory was once made ready by writing to it while saves lay in it."""
    for number in range(8):
        prompt = [number, *PROMPT]
        with Engine(node.address, engine_kv(), ALWAYS) as first:
            first.serve(prompt)
            first.drain()
        with Engine(node.address, engine_kv(), ALWAYS) as second:
            assert second.serve(prompt).loaded_tokens == 192


def test_the_last_token_is_computed_also_where_all_pages_are_there(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT[:192])
        engine.drain()
        assert engine.serve(PROMPT[:192]).loaded_tokens == 160
        assert engine.serve(PROMPT[:193]).loaded_tokens == 192


def test_sync_loads_are_there_when_the_step_begins(node: NodeProcess) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, load="sync")
    with Engine(node.address, engine_kv(), settings) as engine:
        engine.serve(PROMPT)
        engine.drain()
        assert engine.serve(PROMPT).loaded_tokens == 192


@pytest.mark.parametrize(("saved_at", "loaded_at"), [(2, 2), (1, 2), (4, 1), (2, 4)])
def test_ranks_load_their_heads_of_what_other_ranks_have_saved(
    node: NodeProcess, saved_at: int, loaded_at: int
) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, tp_sizes=(1, 2, 4))
    with Engine(node.address, engine_kv(tp=saved_at), settings) as first:
        first.serve(PROMPT)
        first.drain()
    with Engine(node.address, engine_kv(tp=loaded_at), settings) as second:
        assert second.serve(PROMPT).loaded_tokens == 192


def test_ranks_with_the_same_latents_share_the_saving(node: NodeProcess) -> None:
    kv = engine_kv(tp=2, opaque=False, mla=True)
    with Engine(node.address, kv, ALWAYS) as engine:
        engine.serve(PROMPT)
        engine.drain()
        assert engine.count("saved_pages") == 12  # pages of 16 tokens, each put once
        assert engine.count("save_present_pages") == 0
        assert engine.serve(PROMPT).loaded_tokens == 192


# Layouts of FlashAttention, Triton and FlashInfer: heads or tokens first within a block.
@pytest.mark.parametrize("strides", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
@pytest.mark.parametrize("block_tokens", [16, 64])
def test_gpu_layouts_share_pages_of_16_tokens_whatever_their_blocks_and_strides(
    node: NodeProcess, strides: tuple[int, ...], block_tokens: int
) -> None:
    with Engine(node.address, engine_kv(block_tokens=32, opaque=False), ALWAYS) as first:
        first.serve(PROMPT)
        first.drain()
        assert first.count("saved_pages") == 12
    kv = engine_kv(block_tokens=block_tokens, opaque=False)
    with Engine(node.address, kv, ALWAYS, strides=strides) as second:
        assert second.serve(PROMPT).loaded_tokens == 192 // block_tokens * block_tokens


def test_blocks_that_a_codec_packed_come_back_close(node: NodeProcess) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, profile="best")
    with Engine(node.address, engine_kv(opaque=False), settings) as engine:
        engine.serve(PROMPT)
        engine.drain()
        raw_bytes = engine.count("saved_pages") * engine.layout.raw_page_bytes
        assert engine.count("saved_bytes") < 0.5 * raw_bytes
        with pytest.raises(AssertionError):  # not bit by bit
            engine.serve(PROMPT)


def test_salt_adapter_media_and_namespace_part_prefixes(node: NodeProcess) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, namespaces=("other",))
    identities = [
        RequestIdentity(),
        RequestIdentity(salt="a"),
        RequestIdentity(salt="b"),
        RequestIdentity(adapter="a"),
        RequestIdentity(media=(MediaSpan("cat", 3, 5),)),
        RequestIdentity(media=(MediaSpan("cat", 4, 5),)),
        RequestIdentity(media=(MediaSpan("dog", 3, 5),)),
    ]
    with Engine(node.address, engine_kv(), settings) as engine:
        for identity in identities:
            assert engine.serve(PROMPT, identity=identity).loaded_tokens == 0
            engine.drain()
        other = RequestParams(namespace="other")
        assert engine.serve(PROMPT, params=other).loaded_tokens == 0
        for identity in identities:
            assert engine.serve(PROMPT, identity=identity).loaded_tokens == 192


def test_a_request_may_go_without_storing_or_loading(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT, params=RequestParams(store=False))
        engine.drain()
        assert engine.serve(PROMPT).loaded_tokens == 0
        engine.drain()
        assert engine.serve(PROMPT, params=RequestParams(load=False)).loaded_tokens == 0


def test_after_a_reset_nothing_old_is_found_and_new_pages_are(node: NodeProcess) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT)
        engine.drain()
        engine.scheduler.next_epoch()
        assert engine.serve(PROMPT).loaded_tokens == 0
        engine.drain()
        assert engine.serve(PROMPT).loaded_tokens == 192


def test_two_engines_that_were_reset_share_nothing(node: NodeProcess) -> None:
    """Each may have got other weights."""
    for _engine in range(2):
        with Engine(node.address, engine_kv(), ALWAYS) as engine:
            engine.scheduler.next_epoch()
            assert engine.serve(PROMPT).loaded_tokens == 0
            engine.drain()


def test_a_producer_stores_and_never_loads_a_consumer_loads_and_never_stores(
    node: NodeProcess,
) -> None:
    with (
        Engine(node.address, engine_kv(), ALWAYS, Role.PRODUCER) as producer,
        Engine(node.address, engine_kv(), ALWAYS, Role.CONSUMER) as consumer,
    ):
        assert consumer.serve(PROMPT).loaded_tokens == 0
        assert producer.serve(PROMPT).params == 6
        producer.drain()
        assert producer.serve(PROMPT).loaded_tokens == 0
        assert consumer.serve(PROMPT).loaded_tokens == 192
        assert consumer.count("saved_pages") == 0


def test_a_consumer_waits_for_what_a_producer_has_announced(node: NodeProcess) -> None:
    with (
        Engine(node.address, engine_kv(), ALWAYS, Role.PRODUCER) as producer,
        Engine(node.address, engine_kv(), ALWAYS, Role.CONSUMER) as consumer,
    ):
        later = threading.Timer(0.4, lambda: producer.serve(PROMPT))
        later.start()
        announced = RequestParams(tokens=192)
        assert consumer.serve(PROMPT, params=announced).loaded_tokens == 192
        later.join()


def test_a_consumer_waits_in_vain_no_longer_than_it_was_told(node: NodeProcess) -> None:
    settings = ConnectorSettings(pending_timeout_s=0.3, match_timeout_s=20.0)
    with Engine(node.address, engine_kv(), settings, Role.CONSUMER) as consumer:
        begin_s = time.monotonic()
        assert consumer.serve(PROMPT, params=RequestParams(tokens=192)).loaded_tokens == 0
        assert 0.3 <= time.monotonic() - begin_s < 3


def test_without_a_node_every_prompt_is_computed() -> None:
    with Engine("unix:/nonexistent/octavo.sock", engine_kv(), ALWAYS) as engine:
        assert engine.serve(PROMPT).loaded_tokens == 0
        engine.drain()
        assert engine.count("save_failed_pages") == 6


def test_log_says_once_why_a_node_does_not_take_pages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_slabs = NodeProcess(tmp_path / "node", slab_bytes="4KiB")
    with small_slabs as node, Engine(node.address, engine_kv(), ALWAYS) as engine:
        for prompt in (PROMPT, PROMPT[::-1]):
            engine.serve(prompt)
            engine.drain()
        assert engine.count("save_failed_pages") == 12
    said = [record.getMessage() for record in caplog.records if "saves fail" in record.message]
    assert said == ["octavo: saves fail: TOO_LARGE"]


@contextmanager
def paused(pid: int) -> Generator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_node_that_hangs_costs_the_match_its_timeout_and_nothing_more(
    mortal_node: NodeProcess,
) -> None:
    settings = ConnectorSettings(match_timeout_s=0.2)
    with Engine(mortal_node.address, engine_kv(), settings) as engine:
        engine.serve(PROMPT)
        engine.drain()
        before = engine.count("match_timeouts")
        with paused(mortal_node.pid):
            begin_s = time.monotonic()
            assert engine.serve(PROMPT).loaded_tokens == 0
            assert time.monotonic() - begin_s < 1.5
        assert engine.count("match_timeouts") == before + 1


@pytest.mark.parametrize("blow", ["hangs", "dies"])
def test_pages_that_do_not_come_any_more_are_reported_and_computed(
    mortal_node: NodeProcess, blow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, load_timeout_s=0.5)
    with Engine(mortal_node.address, engine_kv(), settings) as engine:
        engine.serve(PROMPT)
        engine.drain()
        client = engine.workers[0].client
        real_get = client.get

        def get_after_the_blow(*args: object, **kwargs: object) -> object:
            mortal_node.pause() if blow == "hangs" else mortal_node.kill()
            return real_get(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(client, "get", get_after_the_blow)
        try:
            served = engine.serve(PROMPT)
        finally:
            if blow == "hangs":
                mortal_node.resume()
        assert served.loaded_tokens == 192
        assert len(served.failed_blocks) == 6
        assert engine.count("load_failed_pages") == 6


def test_pages_that_went_between_match_and_load_are_computed_and_stored_again(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        engine.serve(PROMPT)
        engine.drain()
        client = engine.workers[0].client
        real_get = client.get

        def get_after_they_went(*args: object, **kwargs: object) -> object:
            with engine.client(engine.layout) as other:
                other.delete(other.chain(PROMPT))
            return real_get(*args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(client, "get", get_after_they_went)
        assert len(engine.serve(PROMPT).failed_blocks) == 6
        monkeypatch.undo()
        engine.drain()
        assert engine.serve(PROMPT).loaded_tokens == 192


def test_a_save_that_breaks_costs_its_own_pages_and_no_later_ones(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(node.address, engine_kv(), ALWAYS) as engine:
        with monkeypatch.context() as broken:
            fault = Mock(side_effect=RuntimeError("out of memory"))
            broken.setattr(engine.workers[0].client, "put", fault)
            engine.serve(PROMPT)
            engine.drain()
        assert engine.count("save_failed_pages") == 6
        other = PROMPT[::-1]
        engine.serve(other)
        engine.drain()
        assert engine.serve(other).loaded_tokens == 192


def test_saves_that_find_no_room_wait_while_their_request_keeps_its_blocks(
    node: NodeProcess,
) -> None:
    settings = ConnectorSettings(load_policy="always", match_timeout_s=20.0, staging_bytes=1 << 20)
    with Engine(node.address, engine_kv(), settings) as engine:
        for number in range(40):
            engine.serve([number, *PROMPT])
        engine.drain()
        done = engine.count("saved_pages") + engine.count("save_dropped_pages")
        assert done == 40 * 6
