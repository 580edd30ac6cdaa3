"""Between an engine's paged KV tensors and the units of pages. Needs torch."""

from octavo.paged.cache import PagedKV, PagedKVError
from octavo.paged.transfer import PagedSink, PagedSource

__all__ = ["PagedKV", "PagedKVError", "PagedSink", "PagedSource"]
