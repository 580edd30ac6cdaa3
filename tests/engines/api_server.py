"""vLLM's own API server of the tiny model, in a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tests.engines.tiny_model import ROOT, ensure_tiny_model
from tests.engines.vllm_engine import BLOCK_TOKENS

from octavo.bench.vllm_child import ENVIRONMENT, LOG_LINES
from octavo.local_node import with_log

START_S: Final = 240.0
STOP_S: Final = 60.0
ANSWER_S: Final = 120.0

FLAGS: Final = (
    *("--served-model-name", "tiny"),
    *("--host", "127.0.0.1"),
    "--skip-tokenizer-init",
    *("--dtype", "float32"),
    *("--max-model-len", "4096"),
    *("--max-num-seqs", "16"),
    *("--block-size", str(BLOCK_TOKENS)),
    *("--kv-cache-memory-bytes", str(32 << 20)),
    "--enforce-eager",
    "--enable-prompt-tokens-details",
)


class ApiServer(AbstractContextManager["ApiServer"]):
    """``--kv-transfer-config`` gets ``connector`` as it is. Leaving the context kills it."""

    def __init__(self, directory: Path, connector: str, environment: Mapping[str, str]) -> None:
        self._log = directory / f"server-{time.monotonic_ns()}.log"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(ensure_tiny_model())),
            *("--port", str(self._port)),
            *("--kv-transfer-config", connector),
            *FLAGS,
        ]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT), **environment},
            )

    def complete(
        self, token_ids: list[int], max_tokens: int = 16, **fields: object
    ) -> dict[str, Any]:
        """A greedy completion, with further fields of the request's body."""
        body = {
            "model": "tiny",
            "prompt": token_ids,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        found: dict[str, Any] = json.loads(self._ask("POST", "/v1/completions", body))
        return found

    def metrics(self) -> dict[str, float]:
        """Values of ``/metrics`` by name, summed over labels but for ``source``."""
        found: dict[str, float] = {}
        for line in self._ask("GET", "/metrics").decode().splitlines():
            if line.startswith("#"):
                continue
            series, _, value = line.rpartition(" ")
            name, _, labels = series.partition("{")
            _, has_source, rest = labels.partition('source="')
            if has_source:
                source, _, _ = rest.partition('"')
                name = f"{name}/{source}"
            found[name] = found.get(name, 0.0) + float(value)
        return found

    def stop(self) -> None:
        """Ends it as an operator does, with SIGTERM."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=STOP_S)

    def __enter__(self) -> ApiServer:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._ask("GET", "/health")
            except OSError:
                pass
            else:
                return self
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._kill()
                raise AssertionError(with_log("no API server; its log ends:", self._log, LOG_LINES))
            time.sleep(0.2)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def _ask(self, method: str, path: str, body: object = None) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_S)
        try:
            sent = None if body is None else json.dumps(body)
            connection.request(method, path, sent, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
        finally:
            connection.close()
        assert answer.status == 200, (answer.status, text)
        return text

    def _kill(self) -> None:
        # The engine's processes can outlive the first one; the group is empty if they did not.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=STOP_S)
