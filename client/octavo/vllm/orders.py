"""What the scheduler's half tells the workers' halves in each step, and what they answer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from octavo.vllm.params import NO_WISH, Retention


@dataclass(frozen=True, slots=True)
class ChainPart:
    """Tokens of a request that the workers do not have yet, as bytes of an array of uint32.

    The part that begins at token 0 begins a new chain.
    """

    request_id: str
    first_token: int
    tokens: bytes
    namespace: str = ""
    extras: dict[int, tuple[bytes, ...]] = field(default_factory=dict[int, tuple[bytes, ...]])


@dataclass(frozen=True, slots=True)
class PageOrder:
    """Pages ``first_page`` to ``page_end`` of a request's chain, and the blocks that hold them.

    ``block_ids`` begins with the block of ``first_page``.
    """

    request_id: str
    first_page: int
    page_end: int
    block_ids: tuple[int, ...]
    order_id: int = 0
    timeout_s: float = 0.0
    """Of a load: when it has not ended by then, what is missing is computed."""
    retention: Retention = NO_WISH
    """Of a save."""

    def beyond(self, page: int, pages_per_block: int) -> PageOrder:
        """What is left of the order from ``page`` on."""
        done = page // pages_per_block - self.first_page // pages_per_block
        return replace(self, first_page=page, block_ids=self.block_ids[done:])


@dataclass(slots=True)
class StepOrders:
    """A step's orders. Chains come first, then loads; saves are of what the step computes."""

    epoch: int = 0
    computes: bool = True
    """Whether the step computes anything. If not, it has time to wait for loads."""
    chains: list[ChainPart] = field(default_factory=list[ChainPart])
    loads: list[PageOrder] = field(default_factory=list[PageOrder])
    saves: list[PageOrder] = field(default_factory=list[PageOrder])
    lost_blocks_of: list[str] = field(default_factory=list[str])
    """Requests whose blocks may be given to others in this step: preempted ones."""
    ended: list[str] = field(default_factory=list[str])
    """Requests that ended: their blocks are lost, and no more orders come."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """What became of a load on one worker."""

    request_id: str
    first_page: int
    page_end: int
    loaded_end: int
    """Pages up to here are in the engine's blocks."""
    size_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """Pages of a save order that are visible on the node now, on one worker's part."""

    order_id: int
    first_page: int
    page_end: int


@dataclass(slots=True)
class WorkerReport:
    """A step's answers of one worker, or of several."""

    loads: list[LoadReport] = field(default_factory=list[LoadReport])
    saves: list[SaveReport] = field(default_factory=list[SaveReport])

    def aggregate(self, other: WorkerReport) -> Self:
        """Both together. Called by vLLM for each further worker."""
        self.loads += other.loads
        self.saves += other.saves
        return self
