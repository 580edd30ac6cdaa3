"""A vLLM engine that takes jobs: a JSON object a line on stdin, an answer a line on a pipe.

``python -m tests.engines.vllm_process OPTIONS FD`` with the arguments of ``vllm.LLM`` as JSON and
the pipe's descriptor; vLLM itself writes to stdout. An error ends the process with its traceback.
A user's program that makes an engine and calls it ``llm`` may be among the options, as ``program``:
it runs, with the other options added to those that it states.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.engines.jobs import Answer, Answers, Request

# By name, for the type checkers work where there is no vLLM.
vllm: Any = importlib.import_module("vllm")

Job = dict[str, Any]


class Engine:
    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._request_count = 0
        self._steps = _StepSizes(llm)

    def generate(self, job: Job) -> dict[str, Any]:
        """Adds all requests, then steps until each has ended."""
        engine = self._llm.llm_engine
        requests = {
            f"{self._request_count + n}": Request(**r) for n, r in enumerate(job["requests"])
        }
        self._request_count += len(requests)
        arrived: dict[str, float] = {}
        ttft_s: dict[str, float] = {}
        latest: dict[str, Any] = {}
        most_at_once = 0
        self._steps.clear()
        start = time.perf_counter()
        for name, request in requests.items():
            arrived[name] = time.perf_counter()
            adapter = _adapter(request)
            engine.add_request(
                name,
                _prompt(request),
                _sampling(request),
                lora_request=adapter,
                session_id=request.session_id,
                **_hints(request),
            )
        waiting = {n: Path(r.abort_once) for n, r in requests.items() if r.abort_once}
        while engine.has_unfinished_requests():
            outputs = engine.step()
            most_at_once = max(most_at_once, len(outputs))
            for output in outputs:
                latest[output.request_id] = output
                if output.outputs[0].token_ids and output.request_id not in ttft_s:
                    ttft_s[output.request_id] = time.perf_counter() - arrived[output.request_id]
            for name, path in list(waiting.items()):
                if path.exists():
                    engine.abort_request([name])
                    del waiting[name]
        answers = [_answer(latest.get(name), ttft_s.get(name)) for name in requests]
        duration_s = time.perf_counter() - start
        return asdict(Answers(answers, duration_s, most_at_once, self._steps.tokens_max))

    def reset_prefix_cache(self, job: Job) -> bool:
        return bool(self._llm.reset_prefix_cache(**job["arguments"]))

    def metrics(self, _: Job) -> dict[str, float]:
        """Counters and gauges by name, a ``source`` label behind a slash; summed over the rest."""
        found: dict[str, float] = {}
        for metric in self._llm.get_metrics():
            if not hasattr(metric, "value"):
                continue
            source = metric.labels.get("source")
            name = f"{metric.name}/{source}" if source else metric.name
            found[name] = found.get(name, 0) + metric.value
        return found

    def drain(self, job: Job) -> list[bool]:
        """Waits until each worker has put all that it took."""
        from octavo.vllm import drain_saves

        return list(self._llm.collective_rpc(drain_saves, args=(job["timeout_s"],)))


class _StepSizes:
    """How many tokens each step of the scheduler computes. It must be in this process."""

    def __init__(self, llm: Any) -> None:
        self.tokens_max: int | None = None
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        self._scheduler = getattr(core, "scheduler", None)
        if self._scheduler is not None:
            self._schedule = self._scheduler.schedule
            self._scheduler.schedule = self._watched

    def clear(self) -> None:
        self.tokens_max = None if self._scheduler is None else 0

    def _watched(self, *arguments: Any, **named: Any) -> Any:
        step = self._schedule(*arguments, **named)
        self.tokens_max = max(self.tokens_max or 0, step.total_num_scheduled_tokens)
        return step


def _adapter(request: Request) -> Any:
    if request.adapter is None:
        return None
    lora: Any = importlib.import_module("vllm.lora.request")
    folder = Path(request.adapter)
    # A number of its own for each folder, as vLLM demands, and the same whenever it is asked.
    number = int.from_bytes(hashlib.blake2b(str(folder).encode(), digest_size=3).digest(), "big")
    return lora.LoRARequest(folder.name, number + 1, str(folder))


def _hints(request: Request) -> dict[str, Any]:
    if request.hinted is None:
        return {}
    kv_hints: Any = importlib.import_module("vllm.v1.kv_hints")
    others = kv_hints.KvHintAction("0", "elsewhere", "7", {"anything": True})
    ours = kv_hints.KvHintAction("1", "octavo", "1", request.hinted)
    return {"kv_hints": kv_hints.KvHintsEnvelope("1", "message", [others, ours])}


def _prompt(request: Request) -> dict[str, Any]:
    prompt: dict[str, Any] = {"prompt_token_ids": request.token_ids}
    if request.cache_salt is not None:
        prompt["cache_salt"] = request.cache_salt
    return prompt


def _sampling(request: Request) -> Any:
    extra = request.kv_transfer_params
    return vllm.SamplingParams(
        temperature=0,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        detokenize=False,
        extra_args=None if extra is None else {"kv_transfer_params": extra},
    )


def _answer(output: Any, ttft_s: float | None) -> Answer:
    if output is None:
        return Answer([], 0, None, None)
    (completion,) = output.outputs
    return Answer(
        list(completion.token_ids),
        output.num_cached_tokens or 0,
        ttft_s,
        completion.finish_reason,
        output.kv_transfer_params,
    )


def _llm(options: dict[str, Any]) -> Any:
    program = options.pop("program", None)
    if program is None:
        return vllm.LLM(**options)
    vllm.LLM = functools.partial(vllm.LLM, **options)
    names: dict[str, Any] = {}
    exec(program, names)  # noqa: S102 - an example of the documents
    return names["llm"]


def main() -> None:
    engine = Engine(_llm(json.loads(sys.argv[1])))
    with os.fdopen(int(sys.argv[2]), "w") as answers:
        print(json.dumps("ready"), file=answers, flush=True)
        for line in sys.stdin:
            job = json.loads(line)
            answer = getattr(engine, job["do"])(job)
            print(json.dumps(answer), file=answers, flush=True)


# In the default mode vLLM starts further processes, and they import this module again.
if __name__ == "__main__":
    main()
