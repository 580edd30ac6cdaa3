"""Packed columns: ``bytes`` of little-endian integers, read as numpy arrays without copying."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from octavo_proto.limits import KEY_BYTES

U8: Final = np.dtype("u1")
U16: Final = np.dtype("<u2")
U32: Final = np.dtype("<u4")
U64: Final = np.dtype("<u8")


class ColumnError(ValueError):
    """A column's length is not what it must be; the message names the column."""


def read(name: str, data: bytes, dtype: np.dtype[Any], rows: int | None = None) -> NDArray[Any]:
    """A read-only view of ``data``.

    Raises:
        ColumnError: ``data`` is no whole number of rows, or not ``rows`` of them.
    """
    if len(data) % dtype.itemsize:
        raise ColumnError(f"{name} has {len(data)} bytes, which is no multiple of {dtype.itemsize}")
    column = np.frombuffer(data, dtype=dtype)
    if rows is not None and len(column) != rows:
        raise ColumnError(f"{name} has {len(column)} rows, must have {rows}")
    return column


def read_keys(name: str, data: bytes, rows_max: int) -> NDArray[np.uint64]:
    """Page keys as an array of shape [pages, 2] (low word, high word).

    Raises:
        ColumnError: no multiple of 16 bytes, or more than ``rows_max`` pages.
    """
    if len(data) % KEY_BYTES:
        raise ColumnError(f"{name} has {len(data)} bytes, which is no multiple of {KEY_BYTES}")
    if len(data) // KEY_BYTES > rows_max:
        raise ColumnError(f"{name} has {len(data) // KEY_BYTES} pages, at most {rows_max} allowed")
    return np.frombuffer(data, dtype=U64).reshape(-1, 2)


def write(values: Any, dtype: np.dtype[Any]) -> bytes:
    """``values`` (an array or a sequence of integers) as a packed column."""
    return np.ascontiguousarray(values, dtype=dtype).tobytes()
