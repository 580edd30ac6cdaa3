"""Checks of the machine's memory: what an arena needs."""

from __future__ import annotations

import fcntl
import mmap
import os
import platform
import resource
from pathlib import Path
from typing import Final

from octavo.cli.doctor.finding import Finding, Verdict
from octavo.cli.text import bytes_text

F_SEAL_FUTURE_WRITE: Final = 0x10
"""Linux 5.1; Python 3.11 has no name for it."""

MADV_COLLAPSE_SINCE: Final = (6, 1)
"""The kernel release from which memory can be made huge on request."""

SHMEM_ENABLED: Final = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")

UNLIMITED_BYTES: Final = 1 << 60
"""Control groups write "no limit" as a number near 2^63."""


def read_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` as bytes (or counts, where it has no unit)."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        parts = rest.split()
        if parts and parts[0].isdigit():
            values[name] = int(parts[0]) * (1024 if parts[1:] == ["kB"] else 1)
    return values


def check_room(memory_bytes: int, meminfo: dict[str, int], cgroup_max: str | None) -> Finding:
    """Whether an arena of ``memory_bytes`` fits into the machine and its control group."""
    available = meminfo.get("MemAvailable", 0) + _free_huge_bytes(meminfo)
    limit = int(cgroup_max) if cgroup_max and cgroup_max.isdigit() else UNLIMITED_BYTES
    found = f"{bytes_text(available)} available, arena {bytes_text(memory_bytes)}"
    if limit < UNLIMITED_BYTES:
        found += f", control group {bytes_text(limit)}"
    if memory_bytes > limit:
        return Finding(
            "memory",
            Verdict.FAIL,
            found,
            "the arena counts against the control group: the kernel will kill the node as it fills",
            "raise the container's memory limit, or lower memory_bytes",
        )
    if memory_bytes > available:
        return Finding(
            "memory",
            Verdict.WARN,
            found,
            "the arena is larger than what is free now; as it fills, the machine will swap or kill",
            "lower memory_bytes, or stop what else uses memory",
        )
    return Finding("memory", Verdict.OK, found)


def check_huge_pages(
    memory_bytes: int, meminfo: dict[str, int], release: str, shmem_enabled: str | None
) -> Finding:
    """Whether an arena of ``memory_bytes`` gets huge pages: reserved ones, or made when asked.

    ``release`` of the kernel; ``shmem_enabled``: the file of that name, None without it.
    """
    page_bytes = meminfo.get("Hugepagesize", 2 << 20)
    free_bytes = _free_huge_bytes(meminfo)
    found = f"{bytes_text(free_bytes)} free in huge pages of {bytes_text(page_bytes)}"
    if free_bytes >= memory_bytes:
        return Finding("huge pages", Verdict.OK, found)
    refused = shmem_enabled is None or "[deny]" in shmem_enabled
    if _version(release) >= MADV_COLLAPSE_SINCE and not refused:
        return Finding("huge pages", Verdict.OK, f"{found}; the kernel makes them when asked")
    wanted = -(-memory_bytes // page_bytes)
    return Finding(
        "huge pages",
        Verdict.WARN,
        found,
        "the arena will use ordinary pages: slower reads from NVMe, more page faults on first use",
        f"sudo sysctl vm.nr_hugepages={wanted} (soon after boot, before memory is fragmented)",
    )


def check_memlock(memory_bytes: int, limit: int) -> Finding:
    """Whether the arena may be locked in memory, which RDMA asks for."""
    if limit == resource.RLIM_INFINITY or limit >= memory_bytes:
        text = "unlimited" if limit == resource.RLIM_INFINITY else bytes_text(limit)
        return Finding("memlock", Verdict.OK, text)
    return Finding(
        "memlock",
        Verdict.WARN,
        f"limit {bytes_text(limit)}, arena {bytes_text(memory_bytes)}",
        "RDMA cannot register the arena; shared memory and TCP do not need this",
        "ulimit -l unlimited (LimitMEMLOCK=infinity in systemd, --ulimit memlock=-1 in Docker)",
    )


def check_sealing() -> Finding:
    """Whether memory can be shared so that only the node may write it."""
    seals = F_SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
    try:
        descriptor = os.memfd_create("octavo-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return _no_sealing(f"memfd_create: {error.strerror}")
    try:
        os.ftruncate(descriptor, mmap.PAGESIZE)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as own:
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
            own[:4] = b"node"  # the node's own mapping must stay writable
            if _can_map_writable(descriptor):
                return _no_sealing("a sealed descriptor can still be mapped writable")
    except OSError as error:
        return _no_sealing(f"sealing: {error.strerror}")
    finally:
        os.close(descriptor)
    return Finding("sealed memory", Verdict.OK, "memfd with F_SEAL_FUTURE_WRITE works")


def check_memory(memory_bytes: int) -> list[Finding]:
    """All checks of this module on this machine."""
    meminfo = read_meminfo(Path("/proc/meminfo").read_text())
    cgroup = Path("/sys/fs/cgroup/memory.max")
    return [
        check_room(memory_bytes, meminfo, cgroup.read_text().strip() if cgroup.is_file() else None),
        check_huge_pages(
            memory_bytes,
            meminfo,
            platform.release(),
            SHMEM_ENABLED.read_text() if SHMEM_ENABLED.is_file() else None,
        ),
        check_memlock(memory_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        check_sealing(),
    ]


def _can_map_writable(descriptor: int) -> bool:
    try:
        reopened = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    except OSError:
        return False
    try:
        mmap.mmap(reopened, mmap.PAGESIZE).close()
    except OSError:
        return False
    finally:
        os.close(reopened)
    return True


def _version(release: str) -> tuple[int, ...]:
    """The numbers that a kernel's release begins with: (6, 1) of ``6.1.0-13-amd64``."""
    numbers = release.split("-")[0].split(".")[:2]
    return tuple(int(number) for number in numbers if number.isdigit())


def _free_huge_bytes(meminfo: dict[str, int]) -> int:
    return meminfo.get("HugePages_Free", 0) * meminfo.get("Hugepagesize", 0)


def _no_sealing(found: str) -> Finding:
    return Finding(
        "sealed memory",
        Verdict.FAIL,
        found,
        "workers could write into the arena, so the node will not share it",
        "use Linux 5.1 or later; in a sandbox, allow memfd_create and sealing",
    )
