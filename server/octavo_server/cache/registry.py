"""Which namespaces and layouts this node knows, and the numbers it calls them by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Final

from octavo_proto.layout import Layout
from octavo_server.errors import LimitReached, SessionRefusedError
from octavo_server.store.nvme.store import NvmeStore

NAMESPACES_MAX: Final = 65_536
LAYOUTS_MAX: Final = 65_535
"""Every session may bring new names, and a node remembers them all: what a node knows is read
at its start and written whole with each new name."""


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout of one namespace, its registry number and its fingerprint."""

    number: int
    layout: Layout
    fingerprint: bytes


class Registry:
    """Names and numbers. Durable when the node has an NVMe store: records there use the numbers.

    A layout's name stands for one layout within a namespace: a session that means another one
    by it is refused, for it would find nothing and never learn why. Only the weights' epoch may
    differ: whoever updates weights in place raises it under the same name, and older pages miss.
    """

    def __init__(self, store: NvmeStore | None) -> None:
        self._store: Final = store
        self._namespaces: dict[str, int] = {}
        self._layouts: dict[int, KnownLayout] = {}
        self._numbers: dict[tuple[int, str, int], int] = {}  # namespace, name, weights epoch
        self._named: dict[tuple[int, str], KnownLayout] = {}
        self._registering = asyncio.Lock()  # two sessions may bring two layouts of one name
        if store is not None:
            self._namespaces = {name: number for number, name in store.namespaces.items()}
            for number, layout in store.layouts.items():
                self._add(number, store.registry.layout_namespaces[number], layout)

    @property
    def namespace_count(self) -> int:
        """Namespaces known."""
        return len(self._namespaces)

    async def namespace(self, name: str) -> int:
        """The namespace's number; a new one is made durable first."""
        async with self._registering:
            number = self._namespaces.get(name)
            if number is None:
                if len(self._namespaces) >= NAMESPACES_MAX:
                    raise LimitReached(f"the node knows {NAMESPACES_MAX} namespaces, the limit")
                if self._store is not None:
                    number = await self._store.register_namespace(name)
                else:
                    number = len(self._namespaces) + 1
                self._namespaces[name] = number
            return number

    async def layout(self, namespace: int, layout: Layout) -> KnownLayout:
        """The layout under its name; a new one is made durable first.

        Raises:
            SessionRefusedError: the name stands for another layout; says which field differs.
        """
        async with self._registering:
            known = self._named.get((namespace, layout.name))
            if known is not None:
                self._require_same(known.layout, layout)
            number = self._numbers.get((namespace, layout.name, layout.weights_epoch))
            if number is not None:
                return self._layouts[number]
            if len(self._layouts) >= LAYOUTS_MAX:
                raise LimitReached(f"the node knows {LAYOUTS_MAX} layouts, the limit")
            if self._store is not None:
                number = await self._store.register_layout(namespace, layout)
            else:
                number = len(self._layouts) + 1
            return self._add(number, namespace, layout)

    def fingerprint(self, number: int) -> bytes:
        """Fingerprint of a layout by its number."""
        return self._layouts[number].fingerprint

    def _require_same(self, known: Layout, layout: Layout) -> None:
        field = replace(known, weights_epoch=layout.weights_epoch).first_difference(layout)
        if field is None:
            return
        raise SessionRefusedError(
            f"layout {layout.name!r}: {field} is {getattr(layout, field)!r}, but this node knows "
            f"the layout of that name with {field} {getattr(known, field)!r}; pages of the two "
            f"would never match. Use another name, or the same {field}"
        )

    def _add(self, number: int, namespace: int, layout: Layout) -> KnownLayout:
        known = KnownLayout(number, layout, layout.fingerprint())
        self._layouts[number] = known
        self._numbers[namespace, layout.name, layout.weights_epoch] = number
        self._named[namespace, layout.name] = known
        return known
