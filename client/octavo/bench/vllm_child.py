"""A vLLM engine as a child process of a benchmark."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

from octavo.bench.vllm_jobs import Answer, Request
from octavo.local_node import with_log

START_S: Final = 240.0
"""Three processes take a minute on two idle cores."""

ANSWER_S: Final = 300.0
STOP_S: Final = 60.0
WAIT_S: Final = 0.5
"""Between two looks whether the engine still runs."""

ENDED_S: Final = 10.0
LOG_LINES: Final = 60
"""vLLM logs the traceback of each of its processes, and the first one says why."""

ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # One thread: others would spin for cores that the node and a second engine need.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Functions, not only names, may be called in workers: how ``drain`` waits for saves.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
}

OPTIONS: Final[Mapping[str, Any]] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",
    "max_model_len": 4096,
    "max_num_seqs": 16,
    "block_size": 32,
    "enforce_eager": True,
    "enable_prefix_caching": True,
    "seed": 0,
}
"""What an engine gets unless told otherwise."""


class EngineError(RuntimeError):
    """An engine did not start, ended, or did not answer; the message ends with its log's end."""


class NoEngineError(RuntimeError):
    """No Python on this machine that was looked at has vLLM."""


def engine_python() -> Path:
    """This Python if it has vLLM, else that of ``.venv-engines`` in a checkout.

    Raises:
        NoEngineError: neither is there.
    """
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    found = Path(__file__).resolve().parents[3] / ".venv-engines" / "bin" / "python"
    if found.exists():
        return found
    raise NoEngineError("this needs vLLM: install octavo[vllm] beside it, or run `make engines`")


def octavo_connector(address: str, **extra: object) -> dict[str, Any]:
    """``kv_transfer_config`` as the documents give it; ``extra`` are the connector's settings."""
    return {
        "kv_connector": "OctavoConnector",
        "kv_connector_module_path": "octavo.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **extra},
    }


class VllmChild:
    """One engine. Leaving the ``with`` block kills it and the processes that it started.

    Any number of requests may run at a time: each is submitted when it is due, and answers are
    taken as they come.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: Mapping[str, Any] | None = None,
        in_process: bool = False,
        env: Mapping[str, str] | None = None,
        **options: object,
    ) -> None:
        """``options`` are vLLM's engine arguments, beside and instead of ``OPTIONS``.

        ``in_process``: scheduler and worker share the first process, instead of vLLM's default
        of a process each. ``env`` adds to this process's environment.
        """
        self.log: Final = log
        self.options: Final[dict[str, object]] = {
            "model": str(model),
            **OPTIONS,
            **({"kv_transfer_config": dict(connector)} if connector else {}),
            **options,
        }
        self._env: Final = {
            **os.environ,
            **ENVIRONMENT,
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if in_process else "1",
            **(env or {}),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe = -1
        self._unread = b""
        self._job_count = 0
        self._requests: set[int] = set()
        self._answers: dict[int, Any] = {}

    def start(self) -> float:
        """Starts the engine and waits until it takes requests. Seconds that took.

        Raises:
            EngineError: it ended, or was not ready in time.
        """
        begin_s = time.monotonic()
        self._pipe, writing = os.pipe()
        command = [str(engine_python()), "-m", "octavo.bench.vllm_serving"]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, json.dumps(self.options), str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                # A group of its own, so that ``kill`` reaches the processes that vLLM starts.
                start_new_session=True,
                env=self._env,
            )
        os.close(writing)
        self._wait(0, START_S)
        return time.monotonic() - begin_s

    def generate(self, requests: Sequence[Request], timeout_s: float = ANSWER_S) -> list[Answer]:
        """Runs the requests at the same time; their answers in the same order."""
        return [self.answer(each, timeout_s) for each in [self.submit(r) for r in requests]]

    def submit(self, request: Request) -> int:
        """Starts a request; its number."""
        job_id = self._send(
            {"do": "generate", "request": asdict(request), "submitted_s": time.monotonic()}
        )
        self._requests.add(job_id)
        return job_id

    def answer(self, number: int, timeout_s: float = ANSWER_S) -> Answer:
        """Waits for the answer to one request."""
        self._requests.remove(number)
        return Answer(**self._wait(number, timeout_s))

    def next_answer(self, timeout_s: float = ANSWER_S) -> tuple[int, Answer]:
        """Waits for the answer to any request: its number, and the answer."""
        assert self._requests, "no request is running"
        deadline_s = time.monotonic() + timeout_s
        while not (there := self._requests & self._answers.keys()):
            self._read(deadline_s)
        number = min(there)
        return number, self.answer(number)

    def answer_within(self, timeout_s: float) -> tuple[int, Answer] | None:
        """The answer to any request; None if none comes within ``timeout_s``."""
        deadline_s = time.monotonic() + timeout_s
        while not self._requests & self._answers.keys():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return None
            self._take(left_s)
        return self.next_answer()

    def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges by name, as ``vllm:prompt_tokens_by_source/local_compute``."""
        return dict(self._call({"do": "metrics"}))

    def drain(self, timeout_s: float = 30.0) -> None:
        """Waits until all that was saved so far is visible in the node.

        Raises:
            EngineError: some of it was not in time.
        """
        if not all(self._call({"do": "drain", "timeout_s": timeout_s})):
            raise self._error(f"has not put its saves after {timeout_s} s")

    def reset_prefix_cache(self) -> None:
        """Makes the engine forget the blocks that it has.

        Raises:
            EngineError: it did not, since requests are running.
        """
        if not self._call({"do": "reset_prefix_cache"}):
            raise self._error("did not reset its prefix cache")

    def cpu_s(self) -> float:
        """Processor time that the engine's processes have used so far."""
        return sum(
            process_cpu_s(path, self._running().pid) for path in Path("/proc").glob("[0-9]*/stat")
        )

    def stop(self) -> None:
        """Ends the engine as a user would who is done with it.

        Raises:
            EngineError: it ended with another code than 0, or not in time.
        """
        process = self._running()
        assert process.stdin is not None
        process.stdin.close()
        try:
            code = process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            raise self._error(f"did not end within {STOP_S:.0f} s") from None
        self.kill()
        if code != 0:
            raise self._error(f"ended with {code}")

    def kill(self) -> None:
        """``kill -9``, its processes included. Harmless when it does not run."""
        if self._process is None:
            return
        # What vLLM started can outlive the first process; the group is empty if it did not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        os.close(self._pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.kill()

    def _call(self, job: Mapping[str, object]) -> Any:
        return self._wait(self._send(job), ANSWER_S)

    def _send(self, job: Mapping[str, object]) -> int:
        self._job_count += 1
        process = self._running()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({"id": self._job_count, **job}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            raise self._error("took no job") from None
        return self._job_count

    def _wait(self, job_id: int, timeout_s: float) -> Any:
        deadline_s = time.monotonic() + timeout_s
        while job_id not in self._answers:
            self._read(deadline_s)
        return self._answers.pop(job_id)

    def _read(self, deadline_s: float) -> None:
        """Takes what has come; waits a while if it is nothing."""
        if not self._take(WAIT_S) and time.monotonic() > deadline_s:
            raise self._error("did not answer in time")

    def _take(self, timeout_s: float) -> bool:
        """Whether something has come, within ``timeout_s`` or ``WAIT_S``."""
        # Processes of vLLM's own can hold the pipe open after the first has ended.
        readable, _, _ = select.select([self._pipe], [], [], min(timeout_s, WAIT_S))
        if readable:
            piece = os.read(self._pipe, 1 << 16)
            if not piece:
                # It closes its pipe before it writes its traceback.
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._running().wait(ENDED_S)
                raise self._error("closed its pipe")
            *lines, self._unread = (self._unread + piece).split(b"\n")
            self._answers.update(json.loads(line) for line in lines)
        elif (code := self._running().poll()) is not None:
            raise self._error(f"ended with {code}")
        return bool(readable)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "the engine does not run"
        return self._process

    def _error(self, what: str) -> EngineError:
        return EngineError(with_log(f"the engine {what}; its log ends:", self.log, LOG_LINES))


def process_cpu_s(stat: Path, group: int) -> float:
    """Processor time of a process if it is in a process group, else 0."""
    try:
        # Behind the name, which may hold anything: state, parent, group, ..., utime, stime.
        fields = stat.read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # it has ended meanwhile
    if int(fields[2]) != group:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
