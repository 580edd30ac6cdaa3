"""The demo's story: three workers, one node, one ``kill -9``, and the same answers.

A answers six turns and puts pages as it goes. B, a new process, goes on from the node's
memory. The node is flushed, killed and started again; C goes on from NVMe, and D answers B's
question from pages of each codec. Beside them one process answers all turns without Octavo, and
one computes the last two from nothing.
"""

from __future__ import annotations

import contextlib
import json as json_format
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from octavo.codec import codec_names
from octavo.demo import story
from octavo.demo.checkpoint import CheckpointError, ensure_checkpoint
from octavo.demo.messages import WorkerTask
from octavo.demo.processes import Places, ProcessError, WorkerResult, demo_node, run_worker
from octavo.demo.report import Narrator
from octavo.demo.verdict import Runs, judge, summary
from octavo.errors import OctavoError
from octavo.local_node import LocalNodeError

EXIT_INTERRUPTED: Final = 130

# Workers import these, not the demo itself; better to hear of a missing one now.
for _name in ("accelerate", "gguf", "octavo_server", "torch", "transformers"):
    if find_spec(_name) is None:
        raise ModuleNotFoundError(f"No module named {_name!r}", name=_name)


def run_demo(*, json: bool = False, keep: bool = False) -> int:
    """Runs the demo. With ``json``, prints one JSON object as the last line.

    ``keep`` leaves logs and the NVMe tier behind and says where.

    Returns:
        0; 1 if answers differ, a page failed or a process did; 130 if interrupted.
    """
    narrator = Narrator(to_stderr=json)
    begin = time.perf_counter()
    try:
        with _signals_interrupt():
            checkpoint = ensure_checkpoint(narrator.step)
            with _places(checkpoint.parent, keep, narrator) as places:
                runs = _tell(checkpoint, places, narrator)
    except (CheckpointError, LocalNodeError, ProcessError, OctavoError) as error:
        narrator.problem(str(error))
        if json:
            print(json_format.dumps({"ok": False, "problems": [str(error)]}))
        return 1
    except KeyboardInterrupt:
        narrator.problem("interrupted; the demo's processes have been ended")
        return EXIT_INTERRUPTED
    verdict = judge(runs)
    elapsed_s = time.perf_counter() - begin
    narrator.result(runs, verdict, elapsed_s)
    if json:
        print(json_format.dumps(summary(runs, verdict, elapsed_s)))
    return 1 if verdict.problems else 0


def _tell(checkpoint: Path, places: Places, narrator: Narrator) -> Runs:
    threads = len(os.sched_getaffinity(0))

    def work(name: str, task: WorkerTask) -> WorkerResult:
        return run_worker(name, task, places, narrator.turn)

    def compare(name: str, task: WorkerTask) -> WorkerResult:
        return run_worker(name, task, places, narrator.figures)

    def task(
        questions: tuple[str, ...],
        *,
        after: WorkerResult | None = None,
        address: str | None = None,
        forget_each_turn: bool = False,
        codecs: tuple[str, ...] = (),
    ) -> WorkerTask:
        return WorkerTask(
            checkpoint=str(checkpoint),
            questions=questions,
            history=() if after is None else after.end.history,
            address=address,
            forget_each_turn=forget_each_turn,
            codecs=codecs,
            thread_count=threads,
        )

    last_questions = (story.QUESTION_FROM_MEMORY, story.QUESTION_FROM_NVME)
    with demo_node(places) as node:
        narrator.step("Starting a node: shared memory, and NVMe behind it")
        narrator.detail(f"serving after {node.start():.2f} s at {node.address}")

        narrator.step("Worker A answers six turns about a handbook, and puts pages as it goes")
        first = work("a", task(story.QUESTIONS, address=node.address))

        narrator.step("Worker B, a new process, goes on from the node's memory")
        memory = work("b", task((story.QUESTION_FROM_MEMORY,), after=first, address=node.address))

        narrator.step("Flush, kill -9 of the node, restart")
        with node.client() as client:
            flush = client.flush()
            tiers_before_kill = client.statistics().tiers
        node.kill()
        restart_s = node.start()
        narrator.detail(
            f"{flush.durable_pages} pages durable; serving again after {restart_s:.2f} s"
        )

        narrator.step("Worker C, a new process, goes on from what lies on NVMe")
        nvme = work("c", task((story.QUESTION_FROM_NVME,), after=memory, address=node.address))
        with node.client() as client:
            client.flush()
            tiers_after = client.statistics().tiers

        narrator.step("Worker D answers turn 7 from memory once more, from each codec's pages")
        by_codec = compare(
            "d",
            task(
                (story.QUESTION_FROM_MEMORY,),
                after=first,
                address=node.address,
                codecs=codec_names(),
            ),
        )
        node.stop()

    narrator.step("For comparison: one process answers all eight turns, without Octavo")
    uninterrupted = compare("uninterrupted", task(story.QUESTIONS + last_questions))

    narrator.step("For comparison: the last two turns, each computed from nothing")
    cold = compare("cold", task(last_questions, after=first, forget_each_turn=True))
    return Runs(
        uninterrupted=uninterrupted,
        cold=cold,
        first=first,
        memory=memory,
        nvme=nvme,
        by_codec=by_codec,
        flush=flush,
        tiers_before_kill=tiers_before_kill,
        tiers_after=tiers_after,
        restart_s=restart_s,
        page_tokens=story.PAGE_TOKENS,
    )


@contextlib.contextmanager
def _places(cache: Path, keep: bool, narrator: Narrator) -> Generator[Places]:
    """Temporary directories: one for logs, one on the cache's disk for NVMe."""
    runtime = Path(tempfile.mkdtemp(prefix="octavo-demo-"))
    disk = Path(tempfile.mkdtemp(prefix="demo-", dir=cache))
    try:
        yield Places(runtime, disk)
    finally:
        if keep:
            narrator.step(f"Kept: logs in {runtime}, the NVMe tier in {disk}")
        else:
            shutil.rmtree(runtime, ignore_errors=True)
            shutil.rmtree(disk, ignore_errors=True)


@contextlib.contextmanager
def _signals_interrupt() -> Generator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does, so that its processes are ended too."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before: list[tuple[int, Callable[..., object] | int | None]] = [
        (number, signal.signal(number, interrupt)) for number in (signal.SIGTERM, signal.SIGHUP)
    ]
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
