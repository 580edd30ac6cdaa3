"""An experiment: Octavo as a secondary tier of vLLM's own OffloadingConnector.

docs/decisions/0009-offloading-tier.md has what it measures beside Octavo's own connector. vLLM
copies blocks to a primary tier in host memory, and this tier moves chunks between there and the
node, as foreign pages under vLLM's block hashes. ``CpuTieringSpec`` brings what vLLM has for GPUs
alone: a worker that copies blocks to and from the primary tier.
"""

from __future__ import annotations

import functools
import importlib
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo.bench.engine_timing import timed_connector
from octavo.client import Client
from octavo.memory import copy_extents
from octavo.sinks import BufferSink, BufferSource
from octavo.status import Status
from octavo_proto.layout import foreign_layout

# By name, for the type checkers work where there is no vLLM.
_load: Final = importlib.import_module
BASE: Final = "vllm.v1.kv_offload.base"
TIERING: Final = "vllm.v1.kv_offload.tiering.base"

THREADS: Final = 4
IDLE_WAIT_S: Final = 0.001
"""As long as Octavo's own connector waits in steps that compute nothing."""


def offloading_connector(address: str, primary_bytes: int) -> dict[str, Any]:
    """``kv_transfer_config`` with this tier."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": __name__,
            "cpu_bytes_to_use": primary_bytes,
            "offload_prompt_only": False,
            "secondary_tiers": [
                {"type": "OctavoTier", "module_path": __name__, "address": address}
            ],
        },
    }


@contextmanager
def no_region_left() -> Generator[None]:
    """Removes primary tiers from /dev/shm that engines left there: kill -9 has no other end."""
    pattern = "vllm_offload_*.mmap"
    before = set(Path("/dev/shm").glob(pattern))
    try:
        yield
    finally:
        for path in set(Path("/dev/shm").glob(pattern)) - before:
            path.unlink(missing_ok=True)


class NodeTier:
    """The methods of ``SecondaryTierManager``. vLLM's scheduler thread calls all of them."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        address: str,
        backpressure_detector: Any = None,
    ) -> None:
        base: Any = _load(TIERING).SecondaryTierManager
        base.__init__(self, offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        view = np.asarray(primary_kv_view)
        self._primary: Final = (int(view.ctypes.data), view.nbytes)
        self._chunk_bytes: Final = view.strides[0]
        # vLLM's hashes name tokens alone: what else a chunk's bytes hang on is ours to name.
        config = offloading_spec.config
        layout = foreign_layout(
            "offload", f"vllm {config.model} {config.cache} {config.parallel.world_size}"
        )
        self._client: Final = Client(address, layouts=[layout])
        self._threads: Final = ThreadPoolExecutor(THREADS, thread_name_prefix="octavo-tier")
        self._found: dict[str, dict[bytes, bool | None]] = {}
        """By request and key: whether it is on the node; None until that is known."""
        self._unasked: dict[str, list[bytes]] = {}
        self._open: set[Future[None]] = set()
        self._ended: list[Any] = []
        self._waits: list[Future[None]] = []
        self._threads.submit(self._client.connect)

    def on_new_request(self, req_context: Any) -> Any:
        self._found[req_context.req_id] = {}
        return _load(BASE).RequestOffloadingContext()

    def on_request_finished(self, req_context: Any) -> None:
        self._found.pop(req_context.req_id, None)
        self._unasked.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: Any) -> Any:
        """All keys of a prompt are looked up in turn until one misses: the step's end asks the
        node about all of them at once, and the next step's lookups answer."""
        results = _load(BASE).LookupResult
        found = self._found[req_context.req_id]
        if key not in found:
            found[key] = None
            self._unasked.setdefault(req_context.req_id, []).append(key)
        known = found[key]
        if known is None:
            return results.RETRY
        return results.HIT if known else results.MISS

    def on_schedule_end(self, context: Any) -> None:
        for req_id, keys in self._unasked.items():
            self._waits.append(self._submit(self._match, self._found[req_id], keys))
        self._unasked = {}
        if self._waits:
            wait(self._waits, IDLE_WAIT_S)
            self._waits = [each for each in self._waits if not each.done()]

    def submit_store(self, job_metadata: Any) -> None:
        self._submit(self._store, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        found = self._found.get(job_metadata.req_context.req_id, {})
        self._waits.append(self._submit(self._fetch, job_metadata, found))

    def get_finished_jobs(self) -> Iterable[Any]:
        self._open = {each for each in self._open if not each.done()}
        ended, self._ended = self._ended, []
        return ended

    def has_pending_work(self) -> bool:
        return bool(self._open)

    def drain_jobs(self) -> None:
        wait(self._open)

    def shutdown(self) -> None:
        self._threads.shutdown()
        self._client.close()

    def _submit(self, work: Callable[..., None], *arguments: Any) -> Future[None]:
        future = self._threads.submit(work, *arguments)
        self._open.add(future)
        return future

    def _match(self, found: dict[bytes, bool | None], keys: Sequence[bytes]) -> None:
        present = self._client.match(self._client.foreign_chain(keys)).page_count
        found.update((key, place < present) for place, key in enumerate(keys))

    def _store(self, job: Any) -> None:
        begin_s, stored = time.monotonic(), False
        try:
            source = BufferSource(self._primary, self._chunk_bytes, job.chunk_ids)
            put = self._client.put(self._client.foreign_chain(list(job.keys)), source)
            stored = put.failed_pages == 0
        finally:  # a job that never ends would keep its chunks, and the engine stepping
            self._end(job, stored, None, begin_s)

    def _fetch(self, job: Any, found: dict[bytes, bool | None]) -> None:
        begin_s, keys = time.monotonic(), list(job.keys)
        good: list[bytes] = []
        try:
            sink = BufferSink(self._primary, self._chunk_bytes, job.chunk_ids)
            got = self._client.get(self._client.foreign_chain(keys), sink)
            good = [key for key, status in zip(keys, got.statuses, strict=True)
                    if status == Status.DONE]  # fmt: skip
        finally:
            found.update((key, False) for key in set(keys).difference(good))
            self._end(job, len(good) == len(keys), good, begin_s)

    def _end(self, job: Any, success: bool, good: list[bytes] | None, begin_s: float) -> None:
        self._ended.append(
            _load(TIERING).JobResult(
                job.job_id,
                success,
                good if job.is_promotion else None,
                time.monotonic() - begin_s,
                len(job.keys) * self._chunk_bytes,
            )
        )


class PlainCopies:
    """The methods of ``OffloadingWorker``: blocks to and from the primary tier, on a thread."""

    def __init__(self, kv_caches: Any, region: Any) -> None:
        self._region = region
        self._layers: Final = [
            (each.tensor.view(_load("torch").int8), region.create_next_worker_view(size))
            for each in kv_caches.tensors
            for size in (each.page_size_bytes,)
        ]
        self._threads: Final = ThreadPoolExecutor(1, thread_name_prefix="octavo-copies")
        self._open: dict[int, Future[None]] = {}
        self._ended: list[Any] = []
        self._condition = threading.Condition()

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, src_spec.block_ids, dst_spec.chunk_ids, into_blocks=False)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._submit(job_id, dst_spec.block_ids, src_spec.chunk_ids, into_blocks=True)

    def get_finished(self) -> list[Any]:
        with self._condition:
            if self._open and not self._ended:
                self._condition.wait(IDLE_WAIT_S)
            ended, self._ended = self._ended, []
        for each in ended:
            del self._open[each.job_id]
        return ended

    def wait(self, job_ids: set[int]) -> None:
        wait([self._open[each] for each in job_ids if each in self._open])

    def shutdown(self) -> None:
        self._threads.shutdown()
        self._layers.clear()
        self._region.cleanup()

    def _submit(
        self, job_id: int, blocks: NDArray[Any], chunks: NDArray[Any], *, into_blocks: bool
    ) -> bool:
        self._open[job_id] = self._threads.submit(self._copy, job_id, blocks, chunks, into_blocks)
        return True

    def _copy(
        self, job_id: int, blocks: NDArray[Any], chunks: NDArray[Any], into_blocks: bool
    ) -> None:
        begin_s = time.monotonic()
        size_bytes = 0
        for cache, rows in self._layers:
            lengths = np.full(len(blocks), rows.shape[1], dtype=np.int64)
            in_cache = cache.data_ptr() + blocks.astype(np.int64) * cache.stride(0)
            in_rows = rows.data_ptr() + chunks.astype(np.int64) * rows.stride(0)
            if into_blocks:
                copy_extents(in_cache, in_rows, lengths)
            else:
                copy_extents(in_rows, in_cache, lengths)
            size_bytes += int(lengths.sum())
        result = _load(BASE).TransferResult(job_id, True, size_bytes, time.monotonic() - begin_s)
        with self._condition:
            self._ended.append(result)
            self._condition.notify()


@functools.cache
def _made(name: str) -> type:
    """Classes of vLLM's, when vLLM asks for them: the test's own process need not import it."""
    if name == "OctavoTier":
        base = _load(TIERING).SecondaryTierManager
        return type(name, (NodeTier, base), {"medium": _load(BASE).Medium.CPU})
    plain = _load("vllm.v1.kv_offload.tiering.spec").TieringOffloadingSpec

    def get_worker(self: Any, kv_caches: Any) -> Any:
        worker = type("PlainCopyWorker", (PlainCopies, _load(BASE).OffloadingWorker), {})
        shared = _load("vllm.v1.kv_offload.cpu.shared_offload_region").SharedOffloadRegion
        region = shared(
            engine_id=self._engine_id,
            num_chunks=self.num_chunks,
            rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk,
            cpu_page_size=self.cpu_page_size_per_worker,
        )
        return worker(kv_caches, region)

    return type(name, (plain,), {"get_worker": get_worker})


def __getattr__(name: str) -> Any:
    if name == "TimedOffloadingConnector":
        kv_connectors = "vllm.distributed.kv_transfer.kv_connector.v1"
        return timed_connector(
            name, _load(f"{kv_connectors}.offloading_connector").OffloadingConnector
        )
    if name in ("OctavoTier", "CpuTieringSpec"):
        return _made(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
