"""vLLM's requests and steps in this package's words. Reads by attribute, imports nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from octavo.vllm.identity import MediaSpan, RequestIdentity
from octavo.vllm.params import BadParams, RequestParams
from octavo.vllm.requests import NewRequest, ScheduledRequest
from octavo.vllm.weights import weights_digest

logger = logging.getLogger("octavo.vllm")


def new_request(
    request: Any, namespaces: tuple[str, ...], count: Callable[[str, int], None]
) -> NewRequest:
    """A request that arrived. One that says what nobody understands goes without the cache."""
    usable = request.prompt_token_ids is not None and request.prompt_embeds is None
    # A session that takes its input in pieces takes tokens back when the next piece comes.
    usable = usable and not getattr(request, "resumable", False)
    try:
        params = RequestParams.parse(
            request.kv_transfer_params,
            namespaces,
            getattr(request, "session_id", None),
            getattr(request, "kv_hints", None),  # new in vLLM 0.32
        )
    except BadParams as error:
        logger.warning("octavo: request %s goes without: %s", request.request_id, error)
        count("bad_params", 1)
        params, usable = RequestParams(), False
    return NewRequest(
        request.request_id,
        request.prompt_token_ids or (),
        params,
        _identity(request),
        may_load=usable and not request.skip_reading_prefix_cache,
        may_save=usable,
    )


def all_tokens(request: Any) -> Sequence[int] | None:
    """Accepted tokens of a request, prompt first; None for one that is gone."""
    return None if request is None else request.all_token_ids


def event_parts(
    request: Any,
) -> tuple[Sequence[bytes], Sequence[int], str | None, str | None]:
    """What events say of a request: block hashes, tokens, adapter and session."""
    lora = request.lora_request
    return (
        request.block_hashes,
        request.all_token_ids,
        None if lora is None else lora.lora_name,
        getattr(request, "session_id", None),
    )


def scheduled_requests(scheduler_output: Any) -> Iterator[ScheduledRequest]:
    """The requests of a step."""
    scheduled = scheduler_output.num_scheduled_tokens
    for new in scheduler_output.scheduled_new_reqs:
        yield ScheduledRequest(
            new.req_id,
            new.block_ids[0],
            replaces_blocks=True,
            computed_tokens=new.num_computed_tokens + scheduled[new.req_id],
        )
    cached = scheduler_output.scheduled_cached_reqs
    for request_id, block_ids, computed in zip(
        cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
    ):
        yield ScheduledRequest(
            request_id,
            block_ids[0] if block_ids else (),
            replaces_blocks=request_id in cached.resumed_req_ids,
            computed_tokens=computed + scheduled[request_id],
        )


def _identity(request: Any) -> RequestIdentity:
    return RequestIdentity(
        salt=request.cache_salt or "",
        adapter="" if request.lora_request is None else _adapter(request.lora_request),
        media=tuple(
            MediaSpan(
                str(getattr(feature, "identifier", None) or feature.mm_hash),
                int(feature.mm_position.offset),
                int(feature.mm_position.length),
            )
            for feature in request.mm_features or ()
        ),
    )


def _adapter(lora_request: Any) -> str:
    return f"{lora_request.lora_name}\0{_adapter_revision(str(lora_request.lora_path))}"


@lru_cache(maxsize=1024)
def _adapter_revision(path: str) -> str:
    """A digest of the adapter's files; its path or hub id where there are none here."""
    try:
        return weights_digest(Path(path))
    except OSError:
        return path
