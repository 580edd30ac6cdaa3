"""``octavo bench engine``: what Octavo gives a real engine, and what it costs it.

- ``restart``: prompts that an engine computed come back after it was restarted. Time to first
  token beside computing them, and beside the engine's own prefix cache.
- ``misses``: prompts that nobody has seen, asked of an engine with the connector and of one
  without any, in turn (A B, B A, ...), never at the same time, each after the saves of the one
  before are drained.
- ``scheduler``: how long the connector keeps the engine's scheduler thread, by step and by
  request, while requests that hit, miss and decode run together.

Node and engines are processes of their own. A figure counts only if tokens and hits are right.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from octavo.bench.engine_figures import median_upper95, percentiles
from octavo.bench.engine_timing import FILE_VARIABLE, read_times
from octavo.bench.measuring import IdleShare, median, progress
from octavo.bench.vllm_child import OPTIONS, VllmChild, engine_python, octavo_connector
from octavo.bench.vllm_jobs import Answer, Request
from octavo.demo.checkpoint import ensure_checkpoint
from octavo.local_node import LocalNode

PARTS: Final = ("restart", "misses", "scheduler")
RESTART_PROMPTS: Final = 7
TOKEN_IDS: Final = (3, 1000)
"""Drawn from these: any model has them."""

WARM_UP_TOKENS: Final = 256
KV_CACHE_BYTES: Final = 1 << 30
"""Of each engine: all prompts of ``restart`` find room in the demo's model."""

NODE_BYTES: Final = "2GiB"
STORED_S: Final = 30.0
POLL_S: Final = 0.01

BATCH_REQUESTS: Final = 16
BATCHES: Final = 4
DECODED_TOKENS: Final = 32


class BenchmarkError(RuntimeError):
    """An answer is not what it must be, so no figure of the run counts."""


def run(
    *,
    engine: str = "vllm",
    pairs: int = 24,
    prompt_tokens: int = 2048,
    model: Path | None = None,
    in_process: bool = False,
    parts: Sequence[str] = PARTS,
) -> Mapping[str, object]:
    """All figures; names end in their units. ``model``: a checkpoint instead of the demo's."""
    assert engine == "vllm", engine
    engine_python()
    folder = model or ensure_checkpoint(print)
    idle = IdleShare()
    figures: dict[str, object] = {
        "engine": engine,
        "model": folder.name,
        "in_process": in_process,
        "prompt_tokens": prompt_tokens,
    }
    with (
        tempfile.TemporaryDirectory(prefix="octavo-bench-") as logs,
        LocalNode(memory_bytes=NODE_BYTES, staging_ring_bytes="64MiB") as node,
    ):
        node.start()
        bench = EngineBench(folder, Path(logs), node, prompt_tokens, in_process)
        connector = octavo_connector(node.address)
        if "restart" in parts or "misses" in parts:
            with bench.started(None) as plain:
                computed = bench.compute(plain, connector) if "restart" in parts else []
                with bench.started(connector) as connected:
                    if "restart" in parts:
                        figures |= bench.restart(plain, connected, computed)
                    if "misses" in parts:
                        figures |= bench.misses(plain, connected, pairs)
        if "scheduler" in parts:
            timed = {
                "kv_connector": "TimedConnector",
                "kv_connector_module_path": "octavo.bench.engine_timing",
            }
            figures |= bench.scheduler({**connector, **timed})
    return {**figures, "idle_share": idle.since()}


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Engines of one model beside one node. ``connector`` is vLLM's ``kv_transfer_config``."""

    model: Path
    logs: Path
    node: LocalNode
    prompt_tokens: int
    in_process: bool

    def started(
        self, connector: Mapping[str, Any] | None, env: Mapping[str, str] | None = None
    ) -> VllmChild:
        """An engine that has answered once."""
        child = VllmChild(
            self.model,
            self.logs / f"engine-{time.monotonic_ns()}.log",
            connector=connector,
            in_process=self.in_process,
            env=env,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            max_model_len=max(4096, self.prompt_tokens + DECODED_TOKENS),
        )
        try:
            child.start()
            with Stored(self.node) as stored:
                child.generate([Request(new_prompt(WARM_UP_TOKENS))])
                stored.wait(WARM_UP_TOKENS // _block_tokens() if connector else 0)
        except BaseException:
            child.kill()
            raise
        return child

    def compute(
        self, plain: VllmChild, connector: Mapping[str, Any]
    ) -> list[tuple[Request, Answer]]:
        """New prompts that ``plain`` has computed, and an engine that is gone has saved."""
        requests = [Request(new_prompt(self.prompt_tokens)) for _ in range(RESTART_PROMPTS)]
        cold = [_ask_new(plain, each) for each in requests]
        with self.started(connector) as saving, Stored(self.node) as stored:
            for request, answer in zip(requests, cold, strict=True):
                _need_same_tokens([answer], [_ask_new(saving, request)])
                stored.wait(self._prompt_blocks())
            saving.stop()
        return list(zip(requests, cold, strict=True))

    def restart(
        self,
        plain: VllmChild,
        connected: VllmChild,
        computed: Sequence[tuple[Request, Answer]],
    ) -> dict[str, object]:
        """``connected`` was started after the prompts were saved, and loads them."""
        cold = [answer for _, answer in computed]
        loaded: list[Answer] = []
        own: list[Answer] = []
        for request, _ in progress(computed, "restart", len(computed)):
            loaded.append(_ask_again(connected, request))
            own.append(_ask_again(plain, request))
        for answers in (loaded, own):
            _need_same_tokens(cold, answers)
        cold_ms, loaded_ms, own_ms = map(_ttft_ms, (cold, loaded, own))
        return {
            "restart_prompts": len(computed),
            "restart_cold_ms": cold_ms,
            "restart_loaded_ms": loaded_ms,
            "restart_own_hit_ms": own_ms,
            "restart_to_cold": loaded_ms / cold_ms,
            "restart_to_own_hit": loaded_ms / own_ms,
        }

    def misses(self, plain: VllmChild, connected: VllmChild, pairs: int) -> dict[str, object]:
        """The same new prompt for both, and the other one first each time."""
        without: list[Answer] = []
        with_octavo: list[Answer] = []
        cpu_s = [-plain.cpu_s(), -connected.cpu_s()]
        with Stored(self.node) as stored:
            for pair in progress(range(pairs), "misses", pairs):
                request = Request(new_prompt(self.prompt_tokens))
                for child in (plain, connected) if pair % 2 else (connected, plain):
                    answer = _ask_new(child, request)
                    if child is connected:
                        with_octavo.append(answer)
                        stored.wait(self._prompt_blocks())
                    else:
                        without.append(answer)
        cpu_s[0] += plain.cpu_s()
        cpu_s[1] += connected.cpu_s()
        _need_same_tokens(without, with_octavo)
        ratios = [a.ttft_s / b.ttft_s for a, b in zip(with_octavo, without, strict=True)]
        return {
            "miss_pairs": pairs,
            "miss_with_ms": _ttft_ms(with_octavo),
            "miss_without_ms": _ttft_ms(without),
            "miss_ratio": median(ratios),
            "miss_ratio_upper95": median_upper95(ratios),
            # Of all processes of the engine, saving included: less noisy than what a client sees.
            "miss_cpu_ratio": cpu_s[1] / cpu_s[0],
        }

    def scheduler(self, connector: Mapping[str, Any]) -> dict[str, object]:
        """Batches of requests of which half load a prompt that was computed before.

        ``connector`` times itself, as ``engine_timing`` describes.
        """
        file = self.logs / f"times-{time.monotonic_ns()}"
        with self.started(connector, {FILE_VARIABLE: str(file)}) as timed:
            known = [new_prompt(self.prompt_tokens) for _ in range(BATCH_REQUESTS // 2)]
            with Stored(self.node) as stored:
                timed.generate([Request(each) for each in known])
                stored.wait(len(known) * self._prompt_blocks())
            loaded = 0
            for _ in progress(range(BATCHES), "scheduler", BATCHES):
                timed.reset_prefix_cache()
                new = [new_prompt(self.prompt_tokens // 8) for _ in known]
                batch = [Request(each, DECODED_TOKENS) for pair in zip(known, new, strict=True)
                         for each in pair]  # fmt: skip
                loaded += sum(each.cached_token_count > 0 for each in timed.generate(batch))
        if not loaded:
            raise BenchmarkError("no prompt was loaded")
        times = read_times(file)
        return {
            "scheduler_loads": loaded,
            "scheduler_steps": len(times.step_ms),
            **percentiles("scheduler_step_ms", times.step_ms),
            **percentiles("scheduler_step_cpu_ms", times.step_cpu_ms),
            **percentiles("scheduler_idle_step_ms", times.idle_step_ms),
            "scheduler_requests": len(times.request_ms),
            **percentiles("scheduler_request_ms", times.request_ms),
            **percentiles("scheduler_request_cpu_ms", times.request_cpu_ms),
        }

    def _prompt_blocks(self) -> int:
        return self.prompt_tokens // _block_tokens()


class Stored:
    """Waits for pages to be stored, each time for those since it last did."""

    def __init__(self, node: LocalNode) -> None:
        self._client = node.client()
        self._expected = self._count()

    def wait(self, pages: int) -> None:
        """Until ``pages`` more are on the node.

        Raises:
            BenchmarkError: they are not in time.
        """
        self._expected += pages
        deadline_s = time.monotonic() + STORED_S
        while (count := self._count()) < self._expected:
            if time.monotonic() > deadline_s:
                raise BenchmarkError(f"{count} pages are stored, expected {self._expected}")
            time.sleep(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._client.close()

    def _count(self) -> int:
        return self._client.statistics().counters["put_pages_stored"]


def new_prompt(token_count: int) -> list[int]:
    """Token ids that nobody has seen."""
    return random.choices(range(*TOKEN_IDS), k=token_count)  # noqa: S311


def _block_tokens() -> int:
    return int(OPTIONS["block_size"])


def _ask_new(child: VllmChild, request: Request) -> Answer:
    (answer,) = child.generate([request])
    if answer.cached_token_count:
        raise BenchmarkError(f"{answer.cached_token_count} tokens of a new prompt were there")
    return answer


def _ask_again(child: VllmChild, request: Request) -> Answer:
    (answer,) = child.generate([request])
    # Whole blocks; one token at least is always computed.
    expected = (len(request.token_ids) - 1) // _block_tokens() * _block_tokens()
    if answer.cached_token_count < expected:
        raise BenchmarkError(f"{answer.cached_token_count} of {expected} tokens were there")
    return answer


def _need_same_tokens(expected: Sequence[Answer], found: Sequence[Answer]) -> None:
    if [each.token_ids for each in found] != [each.token_ids for each in expected]:
        raise BenchmarkError("the answers differ from those of the engine without connector")


def _ttft_ms(answers: Sequence[Answer]) -> float:
    return median([each.ttft_s for each in answers]) * 1e3
