"""What the connector costs vLLM's scheduler thread: a connector that times its own methods.

An engine whose ``kv_connector`` is ``TimedConnector``, from this module, appends a line a step
and a line a request to the file that ``OCTAVO_BENCH_TIMES`` names. Every public method of the
scheduler's half counts: by the clock on the wall, what it computes, waits for and is kept from;
by the thread's own clock, what it computes.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType
from typing import Any, Final, TextIO

FILE_VARIABLE: Final = "OCTAVO_BENCH_TIMES"
LAST_OF_STEP: Final = "build_connector_meta"
"""What follows in a step, when its output has come, counts towards the next one."""

LAST_OF_REQUEST: Final = "request_finished_all_groups"


@dataclass(slots=True)
class _Sum:
    wall_s: float = 0.0
    cpu_s: float = 0.0

    def add(self, wall_s: float, cpu_s: float) -> None:
        self.wall_s += wall_s
        self.cpu_s += cpu_s


class CallTimes:
    """Sums up the time of calls, by step and by request. Used by one thread."""

    def __init__(self, write: Callable[[dict[str, Any]], None]) -> None:
        """``write`` gets each sum as it is complete: ``step_s``, ``cpu_s`` and ``tokens``, those
        that the step computes; or ``request_s`` and ``cpu_s``."""
        self._write = write
        self._step = _Sum()
        self._requests: dict[str, _Sum] = {}
        self._depth = 0

    def call(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """Calls a method and counts its time: towards the step, and towards the request that
        is its first argument, if one is. A call from within another is part of that one."""
        if self._depth:
            return method(*arguments, **named)
        self._depth += 1
        begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
        try:
            return method(*arguments, **named)
        finally:
            self._depth -= 1
            cpu_s = time.thread_time() - begin_cpu_s
            self._count(name, arguments, time.perf_counter() - begin_s, cpu_s)

    def _count(self, name: str, arguments: tuple[Any, ...], wall_s: float, cpu_s: float) -> None:
        self._step.add(wall_s, cpu_s)
        request_id = getattr(arguments[0], "request_id", None) if arguments else None
        if request_id is not None:
            request = self._requests.setdefault(request_id, _Sum())
            request.add(wall_s, cpu_s)
            if name == LAST_OF_REQUEST:
                del self._requests[request_id]
                self._write({"request_s": request.wall_s, "cpu_s": request.cpu_s})
        if name == LAST_OF_STEP:
            step, self._step = self._step, _Sum()
            tokens = int(arguments[0].total_num_scheduled_tokens)
            self._write({"step_s": step.wall_s, "cpu_s": step.cpu_s, "tokens": tokens})


def timed_methods(times: CallTimes, timed: object, plain: type) -> dict[str, Callable[..., Any]]:
    """The public methods that ``plain`` itself defines, bound to ``timed`` and timed."""
    return {
        name: functools.partial(times.call, name, getattr(timed, name))
        for name, member in vars(plain).items()
        if isinstance(member, FunctionType) and not name.startswith("_")
    }


@dataclass(slots=True)
class Times:
    """Milliseconds, by what they were spent on."""

    step_ms: list[float] = field(default_factory=list[float])
    step_cpu_ms: list[float] = field(default_factory=list[float])
    idle_step_ms: list[float] = field(default_factory=list[float])
    """Steps that compute nothing, in which the connector may wait."""

    request_ms: list[float] = field(default_factory=list[float])
    request_cpu_ms: list[float] = field(default_factory=list[float])


def read_times(path: Path) -> Times:
    """What a timed connector has written."""
    times = Times()
    for line in path.read_text().splitlines():
        found = json.loads(line)
        if "request_s" in found:
            times.request_ms.append(found["request_s"] * 1e3)
            times.request_cpu_ms.append(found["cpu_s"] * 1e3)
        elif found["tokens"]:
            times.step_ms.append(found["step_s"] * 1e3)
            times.step_cpu_ms.append(found["cpu_s"] * 1e3)
        else:
            times.idle_step_ms.append(found["step_s"] * 1e3)
    return times


def timed_connector(name: str, plain: Any) -> type:
    """A connector class that is ``plain`` and times its scheduler's half."""

    def start(self: Any, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        plain.__init__(self, vllm_config, role, kv_cache_config)
        if role.name == "SCHEDULER":
            file = Path(os.environ[FILE_VARIABLE]).open("a", buffering=1)  # noqa: SIM115
            times = CallTimes(functools.partial(_write_line, file))
            self.__dict__.update(timed_methods(times, self, plain))

    return type(name, (plain,), {"__init__": start})


def _write_line(file: TextIO, found: dict[str, Any]) -> None:
    file.write(json.dumps(found) + "\n")


def __getattr__(name: str) -> Any:
    # Made when vLLM asks for it: only the engine's processes have vLLM.
    if name == "TimedConnector":
        return timed_connector(name, importlib.import_module("octavo.vllm").OctavoConnector)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
