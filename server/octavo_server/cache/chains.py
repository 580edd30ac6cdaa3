"""A request's chain, checked: what the cache works with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo_proto import columns
from octavo_proto.v1 import cache_pb2
from octavo_server.cache.session import Session, SessionLayout
from octavo_server.errors import RequestError


@dataclass(frozen=True, slots=True)
class ChainView:
    """Pages of one prompt in one namespace under one layout. ``keys`` has shape [pages, 2]."""

    namespace: int
    layout: SessionLayout
    keys: NDArray[np.uint64]
    parent: NDArray[np.uint64] | None
    unlinked: bool

    @property
    def layout_number(self) -> int:
        """Registry number of the layout in this namespace."""
        return self.layout.numbers[self.namespace]

    def __len__(self) -> int:
        return len(self.keys)


def read_chain(session: Session, chain: cache_pb2.Chain, pages_max: int) -> ChainView:
    """The chain that a request names.

    Raises:
        RequestError: it names what the session doesn't have, or its columns are malformed.
    """
    if chain.namespace_index >= len(session.namespaces):
        raise RequestError(
            f"namespace_index is {chain.namespace_index}; the session has "
            f"{len(session.namespaces)} namespaces"
        )
    if chain.layout_index >= len(session.layouts):
        raise RequestError(
            f"layout_index is {chain.layout_index}; the session has {len(session.layouts)} layouts"
        )
    parent = None
    if chain.parent_key:
        if len(chain.parent_key) != 16:
            raise RequestError(f"parent_key has {len(chain.parent_key)} bytes, must have 16")
        parent = columns.read_keys("parent_key", chain.parent_key, 1)
    return ChainView(
        namespace=session.namespaces[chain.namespace_index],
        layout=session.layouts[chain.layout_index],
        keys=columns.read_keys("chain.keys", chain.keys, pages_max),
        parent=parent,
        unlinked=chain.unlinked,
    )


def check_distinct(chain: ChainView) -> None:
    """Raises RequestError when a key occurs twice, the parent's included."""
    keys = chain.keys
    if chain.parent is not None and (keys == chain.parent).all(axis=1).any():
        raise RequestError("parent_key: is the key of one of the chain's pages as well")
    if len(keys) < 2:
        return
    order = np.lexsort((keys[:, 1], keys[:, 0]))
    ordered = keys[order]
    twice = np.flatnonzero((ordered[1:] == ordered[:-1]).all(axis=1))
    if len(twice):
        first, second = sorted((int(order[twice[0]]), int(order[twice[0] + 1])))
        raise RequestError(f"chain.keys: pages {first} and {second} have the same key")


def unit_indices(mask: int, layout: SessionLayout) -> NDArray[np.int32]:
    """Unit indices of a request's mask; 0 means all.

    Raises:
        RequestError: a bit stands for a unit that the layout doesn't have.
    """
    all_units = layout.layout.all_units
    if mask & ~all_units:
        raise RequestError(
            f"unit_mask is {mask:#x}; layout {layout.layout.name!r} has "
            f"{layout.layout.unit_count} units"
        )
    chosen = mask or all_units
    return np.array(
        [unit for unit in range(layout.layout.unit_count) if chosen >> unit & 1], dtype=np.int32
    )
