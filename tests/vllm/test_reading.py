"""vLLM's requests and steps in our words. Stand-ins have the attributes that are read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from octavo.vllm.reading import new_request, scheduled_requests


def request(**changes: Any) -> SimpleNamespace:
    values = {
        "request_id": "r",
        "prompt_token_ids": [1, 2, 3],
        "prompt_embeds": None,
        "kv_transfer_params": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "skip_reading_prefix_cache": False,
        "resumable": False,
        **changes,
    }
    return SimpleNamespace(**values)


def read(**changes: Any) -> Any:
    counted: list[str] = []
    found = new_request(request(**changes), ("default",), lambda name, _count: counted.append(name))
    return found, counted


def test_a_plain_request_loads_and_saves() -> None:
    found, _counted = read()
    assert (found.prompt, found.may_load, found.may_save) == ([1, 2, 3], True, True)


def test_prompt_logprobs_need_the_prompt_computed_and_it_is_saved() -> None:
    found, _counted = read(skip_reading_prefix_cache=True)
    assert (found.may_load, found.may_save) == (False, True)


def test_embeddings_and_streaming_input_go_without() -> None:
    for change in ({"prompt_embeds": object()}, {"prompt_token_ids": None}, {"resumable": True}):
        found, _counted = read(**change)
        assert (found.may_load, found.may_save) == (False, False), change


def test_what_nobody_understands_is_counted_and_goes_without() -> None:
    found, counted = read(kv_transfer_params={"octavo": {"namespace": "other"}})
    assert (found.may_load, found.may_save) == (False, False)
    assert counted == ["bad_params"]


def test_salt_adapter_and_media_are_identity() -> None:
    lora = SimpleNamespace(lora_name="sql", lora_path="/nonexistent/sql")
    image = SimpleNamespace(identifier="digest", mm_position=SimpleNamespace(offset=20, length=30))
    found, _counted = read(cache_salt="s", lora_request=lora, mm_features=[image])
    extras = found.identity.extras(16)
    assert list(extras) == [0, 1, 2, 3]
    assert extras[0] == (b"lora\0sql\0/nonexistent/sql", b"salt\0s")
    assert extras[1] == (b"media\0" + (4).to_bytes(8, "little", signed=True) + b"digest",)
    assert extras[3] == (b"media\0" + (-28).to_bytes(8, "little", signed=True) + b"digest",)


def test_a_step_tells_new_running_and_resumed_requests() -> None:
    step = SimpleNamespace(
        num_scheduled_tokens={"new": 30, "old": 1, "back": 50},
        scheduled_new_reqs=[
            SimpleNamespace(req_id="new", block_ids=([1, 2],), num_computed_tokens=32)
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=["old", "back"],
            new_block_ids=[None, ([7, 8],)],
            num_computed_tokens=[99, 0],
            resumed_req_ids={"back"},
        ),
    )
    new, old, back = scheduled_requests(step)
    assert (new.new_block_ids, new.replaces_blocks, new.computed_tokens) == ([1, 2], True, 62)
    assert (old.new_block_ids, old.replaces_blocks, old.computed_tokens) == ((), False, 100)
    assert (back.new_block_ids, back.replaces_blocks, back.computed_tokens) == ([7, 8], True, 50)
