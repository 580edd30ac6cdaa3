"""vLLM's KV connector: prefixes come from and go to an Octavo node.

    LLM(..., kv_transfer_config=dict(
        kv_connector="OctavoConnector", kv_connector_module_path="octavo.vllm",
        kv_role="kv_both", kv_load_failure_policy="recompute"))

``connector.py`` is the face that vLLM calls; ``scheduler.py`` and ``worker.py`` are the two
halves behind it, and neither imports vLLM. ``docs/engines/vllm.md`` tells users the rest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.vllm.draining import drain_saves

if TYPE_CHECKING:
    from octavo.vllm.connector import OctavoConnector

__all__ = ["OctavoConnector", "drain_saves"]


def __getattr__(name: str) -> Any:
    """Only whoever asks for the connector needs vLLM."""
    if name == "OctavoConnector":
        from octavo.vllm.connector import OctavoConnector

        return OctavoConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
