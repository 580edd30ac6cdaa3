"""Namespaces and layouts by number, so that a record names them in six bytes.

Numbers are never given out twice: a record of a dropped layout can't be taken for another's.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from octavo_proto.layout import KvKind, Layout, LayoutError
from octavo_server.store.file_ops import FileOps
from octavo_server.store.io_pool import IoPool
from octavo_server.store.nvme.config import StoreError
from octavo_server.store.nvme.directory import REGISTRY_NAME, read_json, write_json
from octavo_server.store.nvme.records import FORMAT_VERSION

LAYOUT_NUMBERS_MAX: Final = 2**16 - 1
NAMESPACE_NUMBERS_MAX: Final = 2**32 - 1


class Registry:
    """``registry.json`` of one store and what it says."""

    def __init__(self, directory: Path, io: IoPool, files: FileOps) -> None:
        self.namespaces: dict[int, str] = {}
        self.layouts: dict[int, Layout] = {}
        self.layout_namespaces: dict[int, int] = {}
        """Which namespace the layout of a number belongs to."""
        self._path = directory / REGISTRY_NAME
        self._io = io
        self._files = files
        self._next_namespace = 1
        self._next_layout = 1
        self._writing = asyncio.Lock()

    async def load(self) -> None:
        """Reads the file, if there is one. Raises StoreError where it makes no sense."""
        if not self._path.exists():
            return
        stored = await read_json(self._path)
        if stored.get("format") != FORMAT_VERSION:
            raise StoreError(f"{self._path} has format {stored.get('format')!r}, must have 1")
        try:
            self._next_namespace = int(stored["next_namespace"])
            self._next_layout = int(stored["next_layout"])
            self.namespaces = {int(n): str(name) for n, name in stored["namespaces"].items()}
            for number, entry in stored["layouts"].items():
                values = dict(entry["layout"])
                values["kind"] = KvKind(values["kind"])
                self.layouts[int(number)] = Layout(**values)
                self.layout_namespaces[int(number)] = int(entry["namespace"])
        except (KeyError, ValueError, TypeError, AttributeError, LayoutError) as error:
            raise StoreError(
                f"{self._path} is damaged ({error!r}): empty the directory to begin anew"
            ) from None

    async def register_namespace(self, name: str) -> int:
        """The number of ``name``: durable when this returns. Raises OSError, and has none then."""
        async with self._writing:
            for number, known in self.namespaces.items():
                if known == name:
                    return number
            number = self._next_namespace
            if number > NAMESPACE_NUMBERS_MAX:
                raise StoreError("the store has used up its namespace numbers: begin a new one")
            self.namespaces[number] = name
            self._next_namespace += 1
            try:
                await self._save()
            except OSError:
                del self.namespaces[number]
                raise
            return number

    async def register_layout(self, namespace_number: int, layout: Layout) -> int:
        """The number of ``layout`` in a namespace: durable when this returns.

        Raises:
            OSError: it could not be made durable, and has no number then.
            StoreError: the numbers are used up.
        """
        async with self._writing:
            for number, known in self.layouts.items():
                if known == layout and self.layout_namespaces[number] == namespace_number:
                    return number
            number = self._next_layout
            if number > LAYOUT_NUMBERS_MAX:
                raise StoreError("the store has used up its layout numbers: begin a new one")
            self.layouts[number] = layout
            self.layout_namespaces[number] = namespace_number
            self._next_layout += 1
            try:
                await self._save()
            except OSError:
                del self.layouts[number], self.layout_namespaces[number]
                raise
            return number

    async def drop_layout(self, number: int) -> None:
        """Makes all records of a layout void, now and after any restart. Raises OSError."""
        async with self._writing:
            if number not in self.layouts:
                return
            layout, namespace = self.layouts.pop(number), self.layout_namespaces.pop(number)
            try:
                await self._save()
            except OSError:
                self.layouts[number], self.layout_namespaces[number] = layout, namespace
                raise

    async def _save(self) -> None:
        layouts: dict[str, Any] = {
            str(number): {"namespace": self.layout_namespaces[number], "layout": asdict(layout)}
            for number, layout in self.layouts.items()
        }
        value = {
            "format": FORMAT_VERSION,
            "next_namespace": self._next_namespace,
            "next_layout": self._next_layout,
            "namespaces": {str(number): name for number, name in self.namespaces.items()},
            "layouts": layouts,
        }
        await write_json(self._path, value, self._io, self._files)
