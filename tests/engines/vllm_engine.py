"""vLLM engines for tests: a long-lived process each, which takes one job after another."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.engines.jobs import Answer, Answers, Request
from tests.engines.tiny_model import ROOT, ensure_tiny_model

from octavo.bench import vllm_child
from octavo.bench.vllm_child import ENVIRONMENT, LOG_LINES, OPTIONS
from octavo.local_node import with_log

START_S: Final = 240.0
"""Three processes take a minute on two idle cores, and tests do not have them alone."""

JOB_S: Final = 120.0
STOP_S: Final = 60.0
BLOCK_TOKENS: Final = 32
"""The smallest block that vLLM takes on a CPU."""


def octavo_connector(address: str, **extra: object) -> dict[str, Any]:
    """``kv_transfer_config`` as the documents give it, with the node's address.

    Whatever the match finds is loaded, and it may take its time: how fast this machine is must
    not decide a test.
    """
    settings = {"load_policy": "always", "match_timeout_s": 20.0, **extra}
    return vllm_child.octavo_connector(address, **settings)


def loadable_tokens(request: Request) -> int:
    """Tokens of a prompt that a node can deliver: whole blocks, and never the last token."""
    return (len(request.token_ids) - 1) // BLOCK_TOKENS * BLOCK_TOKENS


class Mode(Enum):
    """Where vLLM's scheduler and workers run."""

    IN_PROCESS = "in-process"
    """In the first process: it starts in a third of the time."""
    PROCESSES = "processes"
    """vLLM's default: the scheduler in one process, the worker in another."""
    TWO_WORKERS = "two-workers"
    """Tensor parallel: each worker has half of the KV heads."""


class EngineEndedError(AssertionError):
    """The engine's process ended, or did not answer in time; carries the end of its log."""


class VllmEngine(AbstractContextManager["VllmEngine"]):
    """A process with one ``vllm.LLM`` of the tiny model; ``options`` go to it.

    Leaving the context kills it and what it started.
    """

    def __init__(
        self,
        directory: Path,
        *,
        connector: dict[str, Any] | None = None,
        mode: Mode = Mode.IN_PROCESS,
        environment: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / f"vllm-{time.monotonic_ns()}.log"
        self._environment = {
            **ENVIRONMENT,
            "PYTHONPATH": str(ROOT),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if mode is Mode.IN_PROCESS else "1",
            **(environment or {}),
        }
        self.options: dict[str, object] = {
            "model": str(ensure_tiny_model()),
            **OPTIONS,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": 32 << 20,
            "disable_log_stats": False,
            "tensor_parallel_size": 2 if mode is Mode.TWO_WORKERS else 1,
            **({"kv_transfer_config": connector} if connector else {}),
            **options,
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._answers = -1
        self._received = b""

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started, and neither stopped nor killed since."""
        return self._process is not None

    def generate(self, requests: Sequence[Request], timeout_s: float = JOB_S) -> Answers:
        """Runs the requests at the same time."""
        self.submit(requests)
        return self.result(timeout_s)

    def submit(self, requests: Sequence[Request]) -> None:
        """Starts the requests; ``result`` waits for them."""
        self._send({"do": "generate", "requests": [asdict(each) for each in requests]})

    def result(self, timeout_s: float = JOB_S) -> Answers:
        found = self._receive(timeout_s)
        answers = [Answer(**each) for each in found.pop("answers")]
        return Answers(answers, **found)

    def reset_prefix_cache(self, **arguments: bool) -> None:
        """Makes the engine forget the blocks that it has."""
        assert self._call({"do": "reset_prefix_cache", "arguments": arguments}) is True

    def metrics(self) -> dict[str, float]:
        """Counters and gauges by name, as ``vllm:prompt_tokens_by_source/local_compute``."""
        return dict(self._call({"do": "metrics"}))

    def drain(self, timeout_s: float = 20.0) -> None:
        """Waits until all that was saved so far is visible in the node."""
        drained = self._call({"do": "drain", "timeout_s": timeout_s})
        assert drained, "no worker answered"
        assert all(drained), drained

    def stop(self) -> None:
        """Ends the process as a user would who is done with it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        code = self._process.wait(timeout=STOP_S)
        assert code == 0, self._ended(f"ended with {code}")
        self._close()

    def kill(self) -> None:
        """kill -9, its processes included."""
        assert self._process is not None
        # What vLLM started can outlive the first process; the group is empty if it did not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=STOP_S)
        self._close()

    def start(self) -> VllmEngine:
        """Starts the process and waits until it takes jobs."""
        self.launch()
        assert self._receive(START_S) == "ready"
        return self

    def launch(self) -> None:
        self._received = b""
        self._answers, writing = os.pipe()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.engines.vllm_process"),
                    *(json.dumps(self.options), str(writing)),
                ],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                # A group of its own, so that ``kill`` reaches the processes that vLLM starts.
                start_new_session=True,
                env={**os.environ, **self._environment},
            )
        os.close(writing)

    def __enter__(self) -> VllmEngine:
        try:
            return self.start()
        except BaseException:
            self._discard()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._discard()

    def _call(self, job: dict[str, object]) -> Any:
        self._send(job)
        return self._receive(JOB_S)

    def _send(self, job: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(job).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended("took no job") from None

    def _receive(self, timeout_s: float) -> Any:
        assert self._process is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            # Processes of vLLM's own can hold the pipe open after the first has ended.
            readable, _, _ = select.select([self._answers], [], [], 0.5)
            if readable:
                piece = os.read(self._answers, 1 << 16)
                if not piece:
                    raise self._ended("closed its pipe")
                self._received += piece
            elif self._process.poll() is not None:
                raise self._ended(f"ended with {self._process.returncode}")
            elif time.monotonic() > deadline:
                raise self._ended(f"did not answer within {timeout_s} s")
        line, _, self._received = self._received.partition(b"\n")
        return json.loads(line)

    def _ended(self, what: str) -> EngineEndedError:
        return EngineEndedError(with_log(f"the engine {what}; its log ends:", self.log, LOG_LINES))

    def _discard(self) -> None:
        if self._process is not None:
            self.kill()

    def _close(self) -> None:
        os.close(self._answers)
        self._process = None
