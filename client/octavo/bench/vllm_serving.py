"""A vLLM engine that takes jobs: JSON objects, a line each, on stdin; answers on a pipe.

``python -m octavo.bench.vllm_serving OPTIONS FD`` with vLLM's engine arguments as JSON and the
pipe's descriptor; vLLM itself writes to stdout. Jobs run at the same time and may be answered in
another order. An error ends the process with its traceback; so does, orderly, the end of stdin.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final, TextIO

from octavo.bench.vllm_jobs import Answer, Request

LINE_BYTES_MAX: Final = 64 << 20
READY: Final = "ready"

# By name, for the type checkers work where there is no vLLM.
_load: Final = importlib.import_module
Job = dict[str, Any]


class InProcess:
    """vLLM's synchronous engine behind the methods of its asynchronous one that are used here."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._outputs: dict[str, asyncio.Queue[Any]] = {}
        self._arrived = asyncio.Event()
        self._stepping = asyncio.ensure_future(self._step())

    async def generate(self, prompt: Any, sampling: Any, name: str) -> AsyncIterator[Any]:
        outputs = self._outputs[name] = asyncio.Queue[Any]()
        self._engine.add_request(name, prompt, sampling)
        self._arrived.set()
        while name in self._outputs:
            output = await outputs.get()
            if output.finished:
                del self._outputs[name]
            yield output

    async def reset_prefix_cache(self) -> bool:
        return bool(self._engine.reset_prefix_cache())

    async def collective_rpc(self, function: Any, args: tuple[Any, ...]) -> list[Any]:
        return list(self._engine.collective_rpc(function, args=args))

    def shutdown(self) -> None:
        self._stepping.cancel()
        self._engine.engine_core.shutdown()

    async def _step(self) -> None:
        while await self._arrived.wait():
            self._arrived.clear()
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    self._outputs[output.request_id].put_nowait(output)
                # Answers leave and requests come in between two steps.
                await asyncio.sleep(0)


class Jobs:
    """One method a job."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def generate(self, job: Job) -> dict[str, Any]:
        request = Request(**job["request"])
        submitted_s, first_s, output = float(job["submitted_s"]), 0.0, None
        async for output in self._engine.generate(
            _prompt(request), _sampling(request), str(job["id"])
        ):
            if output.outputs[0].token_ids and not first_s:
                # This clock is the same in all processes of a host.
                first_s = time.monotonic()
        assert output is not None
        (completion,) = output.outputs
        return asdict(
            Answer(
                list(completion.token_ids),
                output.num_cached_tokens or 0,
                first_s - submitted_s,
                time.monotonic() - submitted_s,
            )
        )

    async def reset_prefix_cache(self, _: Job) -> bool:
        return bool(await self._engine.reset_prefix_cache())

    async def metrics(self, _: Job) -> dict[str, float]:
        """Counters and gauges by name, a ``source`` label behind a slash; summed over the rest."""
        found: dict[str, float] = {}
        for metric in _load("vllm.v1.metrics.reader").get_metrics_snapshot():
            if hasattr(metric, "value"):
                source = metric.labels.get("source")
                name = f"{metric.name}/{source}" if source else metric.name
                found[name] = found.get(name, 0.0) + metric.value
        return found

    async def drain(self, job: Job) -> list[bool]:
        """Waits until each worker has put all that it took."""
        from octavo.vllm import drain_saves

        return list(await self._engine.collective_rpc(drain_saves, args=(job["timeout_s"],)))


def _prompt(request: Request) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": list(request.token_ids)}
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def _sampling(request: Request) -> Any:
    extra = request.kv_transfer_params
    return _load("vllm").SamplingParams(
        temperature=0,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=None if extra is None else {"kv_transfer_params": dict(extra)},
    )


def _start(options: dict[str, Any]) -> Any:
    """The engine, in this process or in processes of its own, as vLLM's variable says."""
    arguments = _load("vllm.engine.arg_utils")
    if connector := options.pop("kv_transfer_config", None):
        options["kv_transfer_config"] = _load("vllm.config").KVTransferConfig(**connector)
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        engine = _load("vllm.v1.engine.llm_engine").LLMEngine
        return InProcess(engine.from_engine_args(arguments.EngineArgs(**options)))
    engine = _load("vllm.v1.engine.async_llm").AsyncLLM
    return engine.from_engine_args(arguments.AsyncEngineArgs(**options))


async def _serve(options: dict[str, Any], answers: TextIO) -> None:
    def say(job_id: int, answer: object) -> None:
        print(json.dumps([job_id, answer]), file=answers, flush=True)

    async def run(job: Job) -> None:
        say(job["id"], await getattr(jobs, job["do"])(job))

    engine = _start(options)
    jobs = Jobs(engine)
    lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    say(0, READY)
    # A job that fails ends all others, and with them the process.
    async with asyncio.TaskGroup() as running:
        async for line in lines:
            running.create_task(run(json.loads(line)))
    engine.shutdown()


# vLLM starts further processes in its default mode, and they import this module again.
if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w") as pipe:
        asyncio.run(_serve(json.loads(sys.argv[1]), pipe))
