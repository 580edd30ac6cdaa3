"""Layouts: everything that decides what the bytes of a page mean.

A layout's fingerprint is hashed into every page key, so pages of two layouts can never be
taken for each other. ``docs/page-identity.md`` has the encoding and test vectors.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, fields
from enum import IntEnum
from typing import Final

from octavo_proto import limits
from octavo_proto.v1 import cache_pb2

KEY_SCHEME: Final = "octavo-1"

DTYPE_BYTES: Final[dict[str, int]] = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "uint8": 1,
    "int8": 1,
}
"""Element types an engine may hold KV in, and their bytes."""


class KvKind(IntEnum):
    """Shape of the KV. Values are those of the protocol."""

    GQA = 1
    MLA = 2
    FOREIGN = 3


class LayoutError(ValueError):
    """A layout field is out of range; the message names it and says what is allowed."""


@dataclass(frozen=True, slots=True)
class UnitRange:
    """The part of a page that one unit holds: half-open ranges of layers and KV heads."""

    layer_begin: int
    layer_end: int
    head_begin: int
    head_end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What the bytes of a page mean. Field meanings stand in ``octavo/v1/cache.proto``.

    ``name`` is only a handle and is not hashed; every other field is.

    Raises:
        LayoutError: a field is out of range.
    """

    name: str
    model: str
    weights_revision: str = ""
    weights_quantisation: str = ""
    weights_epoch: int = 0
    adapter: str = ""
    kv_group: int = 0
    kind: KvKind = KvKind.GQA
    layers: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    rope_dim: int = 0
    dtype: str = "bfloat16"
    kv_scales: str = ""
    rope: str = ""
    page_tokens: int = 16
    physical_form: str = "canonical"
    layer_parts: int = 1
    head_parts: int = 1
    key_scheme: str = KEY_SCHEME

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                bound = limits.TEXT_BYTES_MAX if field.name == "rope" else limits.NAME_BYTES_MAX
                if len(value.encode()) > bound:
                    raise LayoutError(f"{field.name} is longer than {bound} bytes")
        _require("name", self.name, bool(self.name), "a name")
        _require("model", self.model, bool(self.model), "a model identity")
        _require("key_scheme", self.key_scheme, self.key_scheme == KEY_SCHEME, repr(KEY_SCHEME))
        _require(
            "weights_epoch", self.weights_epoch, 0 <= self.weights_epoch < 2**63, "0 to 2^63-1"
        )
        _require("kv_group", self.kv_group, 0 <= self.kv_group < 2**16, "0 to 65535")
        parts = self.layer_parts * self.head_parts
        _require("layer_parts", self.layer_parts, self.layer_parts >= 1, "at least 1")
        _require("head_parts", self.head_parts, self.head_parts >= 1, "at least 1")
        _require(
            "layer_parts x head_parts",
            parts,
            parts <= limits.UNITS_MAX,
            f"at most {limits.UNITS_MAX} units",
        )
        if self.kind is KvKind.FOREIGN:
            _require("page_tokens", self.page_tokens, 1 <= self.page_tokens <= 2**20, "1 to 2^20")
            return
        _require(
            "page_tokens",
            self.page_tokens,
            self.page_tokens % limits.PAGE_TOKENS_STEP == 0
            and limits.PAGE_TOKENS_STEP <= self.page_tokens <= limits.PAGE_TOKENS_MAX,
            f"a multiple of {limits.PAGE_TOKENS_STEP} up to {limits.PAGE_TOKENS_MAX}",
        )
        _require("dtype", self.dtype, self.dtype in DTYPE_BYTES, f"one of {', '.join(DTYPE_BYTES)}")
        _require("layers", self.layers, 1 <= self.layers <= 1024, "1 to 1024")
        _require("kv_heads", self.kv_heads, 1 <= self.kv_heads <= 1024, "1 to 1024")
        _require("head_dim", self.head_dim, 1 <= self.head_dim <= 4096, "1 to 4096")
        _require("rope_dim", self.rope_dim, 0 <= self.rope_dim <= 4096, "0 to 4096")
        _require(
            "layer_parts", self.layer_parts, self.layer_parts <= self.layers, "at most `layers`"
        )
        if self.kind is KvKind.MLA:
            _require("kv_heads", self.kv_heads, self.kv_heads == 1, "1 for MLA")
            _require("head_parts", self.head_parts, self.head_parts == 1, "1 for MLA")
        else:
            _require("rope_dim", self.rope_dim, self.rope_dim == 0, "0 unless MLA")
            _require(
                "head_parts",
                self.head_parts,
                self.head_parts <= self.kv_heads,
                "at most `kv_heads`",
            )

    @property
    def unit_count(self) -> int:
        """Units of a page, 1 to 64."""
        return self.layer_parts * self.head_parts

    @property
    def all_units(self) -> int:
        """Mask with a bit for each unit."""
        return (1 << self.unit_count) - 1

    def unit_range(self, unit: int) -> UnitRange:
        """Layers and heads of ``unit``. Parts differ by at most one; the larger ones come first."""
        layer_part, head_part = divmod(unit, self.head_parts)
        layer_begin, layer_end = _part(self.layers, self.layer_parts, layer_part)
        head_begin, head_end = _part(self.kv_heads, self.head_parts, head_part)
        return UnitRange(layer_begin, layer_end, head_begin, head_end)

    def raw_unit_bytes(self, unit: int) -> int:
        """Bytes of ``unit`` as the engine has it (codec ``raw``). Foreign layouts have none."""
        if self.kind is KvKind.FOREIGN:
            raise LayoutError("foreign layouts do not fix the bytes of a unit")
        part = self.unit_range(unit)
        per_head = self.head_dim + self.rope_dim if self.kind is KvKind.MLA else 2 * self.head_dim
        return (
            (part.layer_end - part.layer_begin)
            * (part.head_end - part.head_begin)
            * per_head
            * self.page_tokens
            * DTYPE_BYTES[self.dtype]
        )

    @property
    def raw_page_bytes(self) -> int:
        """Bytes of a whole page in codec ``raw``."""
        return sum(self.raw_unit_bytes(unit) for unit in range(self.unit_count))

    def fingerprint(self) -> bytes:
        """16 bytes: BLAKE2b over each hashed field as length-prefixed name and value."""
        digest = hashlib.blake2b(digest_size=limits.KEY_BYTES, person=b"octavo-layout-1\0")
        for field_name in HASHED_FIELDS:
            for text in (field_name, _canonical(getattr(self, field_name))):
                encoded = text.encode()
                digest.update(struct.pack("<I", len(encoded)))
                digest.update(encoded)
        return digest.digest()

    def to_proto(self) -> cache_pb2.Layout:
        """The protocol's message for this layout."""
        message = cache_pb2.Layout()
        for field in fields(self):
            setattr(message, field.name, getattr(self, field.name))
        return message

    @classmethod
    def from_proto(cls, message: cache_pb2.Layout) -> Layout:
        """A validated layout. Raises LayoutError, which names the field that is wrong."""
        values = {field.name: getattr(message, field.name) for field in fields(cls)}
        try:
            values["kind"] = KvKind(message.kind)
        except ValueError:
            raise LayoutError(f"kind is {message.kind}, allowed: GQA, MLA, FOREIGN") from None
        return cls(**values)

    def first_difference(self, other: Layout) -> str | None:
        """Name of the first hashed field in which the two differ, or None."""
        for field_name in HASHED_FIELDS:
            if getattr(self, field_name) != getattr(other, field_name):
                return field_name
        return None


HASHED_FIELDS: Final = tuple(field.name for field in fields(Layout) if field.name != "name")
"""Fields that enter the fingerprint, in the order in which they enter it."""


def foreign_layout(name: str, system: str, *, unit_count: int = 1) -> Layout:
    """A layout for bytes of another system under keys of its own (sizes vary by page)."""
    return Layout(
        name=name,
        model=system,
        kind=KvKind.FOREIGN,
        dtype="uint8",
        page_tokens=1,
        physical_form=f"foreign:{system}",
        layer_parts=unit_count,
    )


def _canonical(value: str | int) -> str:
    return value if isinstance(value, str) else str(int(value))


def _part(total: int, parts: int, index: int) -> tuple[int, int]:
    """Half-open range of part ``index`` when ``total`` is cut into ``parts`` near-equal parts."""
    small, larger_parts = divmod(total, parts)
    begin = index * small + min(index, larger_parts)
    return begin, begin + small + (1 if index < larger_parts else 0)


def _require(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise LayoutError(f"{name} is {value!r}, allowed: {allowed}")
