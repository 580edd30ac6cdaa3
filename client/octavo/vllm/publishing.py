"""Events in vLLM's words. With ``connector.py`` and ``statistics.py`` all that imports vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

from octavo.vllm.events import EventLog, StoredBlocks

MEDIUM: Final = "CPU"
"""vLLM's word for host memory, which routers know."""

OWNERSHIP: Final = "octavo"


def engine_events(log: EventLog, block_tokens: int) -> Iterator[Any]:
    """What happened since the last call, as vLLM publishes it."""
    for event in log.take():
        hashes = [maybe_convert_block_hash(each) for each in event.hashes]
        if not isinstance(event, StoredBlocks):
            yield BlockRemoved(block_hashes=hashes, medium=MEDIUM, **_newer(BlockRemoved))
            continue
        yield BlockStored(
            block_hashes=hashes,
            parent_block_hash=None
            if event.parent is None
            else maybe_convert_block_hash(event.parent),
            token_ids=list(event.token_ids),
            block_size=block_tokens,
            lora_id=None,
            medium=MEDIUM,
            lora_name=event.lora_name,
            **_newer(BlockStored, session_id=event.session_id),
        )


def _newer(kind: Any, **values: Any) -> dict[str, Any]:
    """Fields that not every release has."""
    known = set(kind.__struct_fields__)
    stated = {"ownership": OWNERSHIP, "group_idx": 0, **values}
    return {name: value for name, value in stated.items() if name in known}
