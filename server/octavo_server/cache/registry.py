"""Which namespaces and layouts this node knows, and the numbers it calls them by."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from octavo_proto.layout import Layout
from octavo_server.errors import SessionRefusedError
from octavo_server.store.nvme.store import NvmeStore


@dataclass(frozen=True, slots=True)
class KnownLayout:
    """A layout of one namespace, its registry number and its fingerprint."""

    number: int
    layout: Layout
    fingerprint: bytes


class Registry:
    """Names and numbers. Durable when the node has an NVMe store: records there use the numbers.

    A layout's name stands for one layout within a namespace: a session that means another one
    by it is refused, for it would find nothing and never learn why.
    """

    def __init__(self, store: NvmeStore | None) -> None:
        self._store: Final = store
        self._namespaces: dict[str, int] = {}
        self._layouts: dict[int, KnownLayout] = {}
        self._numbers: dict[tuple[int, str], int] = {}
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
            number = self._numbers.get((namespace, layout.name))
            if number is not None:
                return self._agreed(self._layouts[number], layout)
            if self._store is not None:
                number = await self._store.register_layout(namespace, layout)
            else:
                number = len(self._layouts) + 1
            return self._add(number, namespace, layout)

    def fingerprint(self, number: int) -> bytes:
        """Fingerprint of a layout by its number."""
        return self._layouts[number].fingerprint

    def _agreed(self, known: KnownLayout, layout: Layout) -> KnownLayout:
        field = known.layout.first_difference(layout)
        if field is None:
            return known
        raise SessionRefusedError(
            f"layout {layout.name!r}: {field} is {getattr(layout, field)!r}, but this node knows "
            f"the layout of that name with {field} {getattr(known.layout, field)!r}; pages of the "
            f"two would never match. Use another name, or the same {field}"
        )

    def _add(self, number: int, namespace: int, layout: Layout) -> KnownLayout:
        known = KnownLayout(number, layout, layout.fingerprint())
        self._layouts[number] = known
        self._numbers[namespace, layout.name] = number
        return known
