"""What the connector does to the processes that it lives in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines import watched_processes
from tests.engines.jobs import Request
from tests.engines.reference import prompt
from tests.engines.tiny_model import ROOT
from tests.engines.vllm_engine import Mode, VllmEngine, loadable_tokens, octavo_connector
from tests.engines.watched_processes import Notes
from tests.nodes import NodeProcess

REQUEST = Request(prompt(800, 200))


@pytest.mark.long
def test_channels_are_made_after_the_engine_has_started_its_processes(
    node: NodeProcess, tmp_path: Path
) -> None:
    """A channel has threads: a process forked after it was made can hang in them."""
    notes = Notes(tmp_path / "notes")
    connector = watched_processes.connector_of(octavo_connector(node.address))
    with VllmEngine(
        tmp_path, connector=connector, mode=Mode.TWO_WORKERS, environment=notes.environment
    ) as engine:
        engine.generate([REQUEST])
        engine.drain()
        engine.reset_prefix_cache()
        # Sessions are open everywhere: pages were saved and loaded.
        assert engine.generate([REQUEST]).cached_token_counts == [loadable_tokens(REQUEST)]
        first_pid = engine.pid
    noted = notes.read()
    with_channels = {pid for what, pid in noted if what == "channel"}
    assert len(with_channels) >= 3, "the scheduler's and two workers'"
    assert first_pid not in with_channels
    for pid in with_channels:
        mine = [what for what, its_pid in noted if its_pid == pid]
        assert "fork" not in mine[mine.index("channel") :]


def test_connector_imports_neither_numba_nor_llvmlite() -> None:
    """vLLM in one process fails to start if numba was imported before it."""
    code = """
import sys
import vllm.distributed.kv_events
import vllm.distributed.kv_transfer.kv_connector.v1.metrics
import vllm.v1.core.kv_cache_utils
before = {name.partition(".")[0] for name in sys.modules}
import octavo.vllm.connector
import octavo.vllm.opaque
import octavo.vllm.canonical
after = {name.partition(".")[0] for name in sys.modules}
assert "octavo" in after
assert not {"numba", "llvmlite"} & (after - before), after - before
print("looked")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "looked" in done.stdout
