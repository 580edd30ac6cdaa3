"""The figures of docs/decisions/0009-offloading-tier.md: both connectors in one run.

``python -m tests.engines.offloading_figures [--model FOLDER] [--pairs N]`` in the repository. One
JSON object a connector and part, then the idle share. Engines are in vLLM's default mode: in one
process, chunks of a request's last step are stored in the next step, whenever that comes.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from tests.engines import offloading_tier
from tests.engines.offloading_tier import no_region_left, offloading_connector
from tests.engines.tiny_model import ROOT

from octavo.bench.engine import NODE_BYTES, EngineBench
from octavo.bench.measuring import IdleShare
from octavo.bench.vllm_child import octavo_connector
from octavo.demo.checkpoint import ensure_checkpoint
from octavo.local_node import LocalNode

PRIMARY_BYTES = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=2048)
    given = parser.parse_args()
    # Engines import the tier by its module's name.
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
    )
    idle = IdleShare()
    with (
        no_region_left(),
        tempfile.TemporaryDirectory(prefix="octavo-bench-") as logs,
        LocalNode(memory_bytes=NODE_BYTES, staging_ring_bytes="64MiB") as node,
    ):
        node.start()
        bench = EngineBench(
            given.model or ensure_checkpoint(print),
            Path(logs),
            node,
            given.prompt_tokens,
            in_process=False,
        )
        connectors = {
            "octavo": octavo_connector(node.address),
            "offloading": offloading_connector(node.address, PRIMARY_BYTES),
        }
        timed = {
            "octavo": ("octavo.bench.engine_timing", "TimedConnector"),
            "offloading": (offloading_tier.__name__, "TimedOffloadingConnector"),
        }
        with bench.started(None) as plain:
            for name, connector in connectors.items():
                computed = bench.compute(plain, connector)
                with bench.started(connector) as connected:
                    figures = bench.restart(plain, connected, computed)
                    figures |= bench.misses(plain, connected, given.pairs)
                print(json.dumps({"connector": name, **figures}), flush=True)
        for name, (module, timed_name) in timed.items():
            names = {"kv_connector": timed_name, "kv_connector_module_path": module}
            figures = bench.scheduler({**connectors[name], **names})
            print(json.dumps({"connector": name, **figures}), flush=True)
    print(json.dumps({"idle_share": idle.since()}))


if __name__ == "__main__":
    main()
