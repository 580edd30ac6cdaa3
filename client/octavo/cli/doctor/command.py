"""Runs the checks and shows what they found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from octavo.cli.doctor.disk import check_disk
from octavo.cli.doctor.finding import Finding, Verdict
from octavo.cli.doctor.memory import check_memory
from octavo.cli.doctor.software import check_gpu, check_node, check_versions

DEFAULT_MEMORY_BYTES = 4 << 30
DEFAULT_GUARD_BYTES = 1 << 30


def examine(
    flags: dict[str, object], config: Path | None, address: str, *, load_torch: bool
) -> list[Finding]:
    """Every check, against the settings that a node with ``flags`` and ``config`` would have."""
    findings: list[Finding] = []
    memory_bytes, nvme_bytes, guard_bytes = DEFAULT_MEMORY_BYTES, None, DEFAULT_GUARD_BYTES
    nvme_dir: Path | None = None
    try:
        from octavo_server.settings_sources import SettingsError, load_settings
    except ModuleNotFoundError as error:
        findings.append(
            Finding(
                "server",
                Verdict.WARN,
                f"{error.name} is not installed",
                "this environment can run a worker but no node",
                "pip install 'octavo[server]'",
            )
        )
    else:
        try:
            settings = load_settings(flags, os.environ, config)
        except SettingsError as error:
            findings += [
                Finding("settings", Verdict.FAIL, line, "a node would refuse to start")
                for line in str(error).splitlines()
            ]
        else:
            memory_bytes, nvme_bytes = settings.memory_bytes, settings.nvme_bytes
            guard_bytes, nvme_dir = settings.nvme_free_space_guard_bytes, settings.nvme_dir
    findings += check_versions()
    findings += check_memory(memory_bytes)
    if nvme_dir is not None:
        findings += check_disk(nvme_dir, nvme_bytes, guard_bytes)
    findings += check_gpu(load_torch=load_torch)
    findings.append(check_node(address))
    return findings


def report(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Prints the findings; 1 if one of them is a failure, else 0."""
    healthy = all(finding.verdict is not Verdict.FAIL for finding in findings)
    if as_json:
        print(json.dumps({"healthy": healthy, "findings": [asdict(each) for each in findings]}))
        return 0 if healthy else 1
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    colours = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}
    for finding in findings:
        line = Text.assemble(
            (f"{finding.verdict:>4} ", colours[finding.verdict]),
            (f"{finding.check}: ", "bold"),
            finding.found,
        )
        console.print(line, soft_wrap=True)
        for label, text in (("means", finding.meaning), ("do", finding.action)):
            if text:
                console.print(Text.assemble((f"     {label}: ", "dim"), text), soft_wrap=True)
    return 0 if healthy else 1
