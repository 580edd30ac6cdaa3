"""Checks of versions, the GPU and the node."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata
from typing import Final

from octavo.cli.doctor.finding import Finding, Verdict
from octavo.cli.errors import CommandError
from octavo.cli.node import get_statistics
from octavo.version import __version__

NEEDED: Final = {"grpcio": (1, 76), "protobuf": (6, 31, 1), "numpy": (1, 26), "xxhash": (3, 4)}
"""Oldest versions that the client works with, as in pyproject.toml."""

REPORTED: Final = ("torch", "vllm", "sglang", "lmcache", "transformers")
"""Said if installed; never imported."""

COMMAND_TIMEOUT_S: Final = 10.0
NODE_TIMEOUT_S: Final = 2.0


def check_versions() -> list[Finding]:
    """Octavo, Python and the kernel; what the client needs; what it works beside."""
    findings = [
        Finding(
            "versions",
            Verdict.OK,
            f"octavo {__version__}, Python {platform.python_version()}, Linux {platform.release()}",
        )
    ]
    findings += [_check_version(name, oldest) for name, oldest in NEEDED.items()]
    for name in REPORTED:
        if (version := _installed(name)) is not None:
            findings.append(Finding(name, Verdict.OK, version))
    return findings


def check_gpu(*, load_torch: bool) -> list[Finding]:
    """Whether there is a GPU; with ``load_torch`` also whether torch can use it."""
    program = shutil.which("nvidia-smi")
    if program is None:
        findings = [
            Finding(
                "GPU",
                Verdict.OK,
                "nvidia-smi not found",
                "nothing to do on a machine without GPU: pages are copied in CPU memory",
            )
        ]
    else:
        findings = [_ask_nvidia_smi(program)]
    if load_torch:
        findings.append(_ask_torch())
    return findings


def check_node(address: str) -> Finding:
    """Whether a node answers at ``address``, and what it complains about."""
    try:
        answer = get_statistics(address, NODE_TIMEOUT_S)
    except CommandError as error:
        return Finding(
            "node", Verdict.WARN, str(error), "workers will compute every prefix", "octavo serve"
        )
    found = f"{answer.node_id} at {address}, version {answer.version}"
    if answer.problems:
        return Finding(
            "node",
            Verdict.FAIL,
            f"{found}: {'; '.join(answer.problems)}",
            "the node serves, with less than it should",
            "see its log and /healthz",
        )
    if answer.version != __version__:
        return Finding(
            "node",
            Verdict.WARN,
            found,
            f"this client is {__version__}; versions of protocol v1 work together",
            "upgrade the older one when convenient",
        )
    return Finding("node", Verdict.OK, found)


def version_tuple(text: str) -> tuple[int, ...]:
    """The leading numbers of a version: ``6.33.6rc1`` is (6, 33, 6)."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def _check_version(name: str, oldest: tuple[int, ...]) -> Finding:
    version = _installed(name)
    wanted = ".".join(map(str, oldest))
    if version is not None and version_tuple(version) >= oldest:
        return Finding(name, Verdict.OK, version)
    return Finding(
        name,
        Verdict.FAIL,
        version or "not installed",
        f"the client needs {wanted} or later",
        f"pip install '{name}>={wanted}'",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ask_nvidia_smi(program: str) -> Finding:
    command = [program, "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("GPU", Verdict.WARN, f"nvidia-smi: {error}", "the driver does not answer")
    lines = "; ".join(done.stdout.split("\n")).strip("; ")
    if done.returncode != 0 or not lines:
        return Finding(
            "GPU",
            Verdict.WARN,
            f"nvidia-smi: {(done.stderr or done.stdout).strip()[:200]}",
            "the driver is installed and does not work",
            "check the driver, and in a container that the GPU is passed in",
        )
    return Finding("GPU", Verdict.OK, lines)


def _ask_torch() -> Finding:
    try:
        import torch
    except ImportError:
        return Finding(
            "torch", Verdict.WARN, "not installed", "no paged tensors", "pip install torch"
        )
    if not torch.cuda.is_available():
        return Finding(
            "torch and CUDA",
            Verdict.WARN,
            f"torch {torch.__version__} sees no CUDA device",
            "pages are copied in CPU memory",
            "install a CUDA build of torch that fits the driver",
        )
    names = ", ".join(
        torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
    )
    return Finding("torch and CUDA", Verdict.OK, f"torch {torch.__version__}: {names}")
