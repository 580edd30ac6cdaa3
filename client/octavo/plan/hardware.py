"""GPUs and links that plans are made for. Rates are per second, bytes and operations decimal."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

GB: Final = 10**9
TFLOPS: Final = 10**12


@dataclass(frozen=True, slots=True)
class Gpu:
    """Makers' figures: HBM and dense tensor throughput. ``fp8_flops`` 0: has no FP8 units."""

    name: str
    hbm_bytes: int
    bf16_flops: int
    fp8_flops: int = 0

    def flops(self, weight_bits: int) -> int:
        """Peak for weights of that width. Narrower ones than 8 bits are multiplied in bf16."""
        return self.fp8_flops if weight_bits == 8 and self.fp8_flops else self.bf16_flops


@dataclass(frozen=True, slots=True)
class Link:
    """A way for pages to come back. ``is_per_gpu``: every rank has one of its own."""

    name: str
    label: str
    bytes_per_s: int
    is_per_gpu: bool = False


GPUS: Final = MappingProxyType(
    {
        gpu.name: gpu
        for gpu in (
            Gpu("a100-40gb", 40 * GB, 312 * TFLOPS),
            Gpu("a100-80gb", 80 * GB, 312 * TFLOPS),
            Gpu("l40s", 48 * GB, 362 * TFLOPS, 733 * TFLOPS),
            Gpu("h100", 80 * GB, 989 * TFLOPS, 1979 * TFLOPS),
            Gpu("h200", 141 * GB, 989 * TFLOPS, 1979 * TFLOPS),
            Gpu("b200", 180 * GB, 2250 * TFLOPS, 4500 * TFLOPS),
            Gpu("mi300x", 192 * GB, 1307 * TFLOPS, 2615 * TFLOPS),
        )
    }
)

# What such links were measured to carry, not what is printed on them: 63 GB/s of PCIe 5 x16 give
# about 50 one way, 50 GB/s of a 400G port about 48. PCIe 4 is taken as half of PCIe 5.
LINKS: Final = (
    Link("pcie5_x16", "PCIe 5 x16", 50 * GB, is_per_gpu=True),
    Link("pcie4_x16", "PCIe 4 x16", 25 * GB, is_per_gpu=True),
    Link("rdma_400g", "RDMA 400G", 48 * GB),
    Link("rdma_200g", "RDMA 200G", 24 * GB),
    Link("nvme_gen5", "NVMe Gen5", 12 * GB),
    Link("nvme_gen4", "NVMe Gen4", 7 * GB),
)
