"""The pages of one prompt in order."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from octavo.errors import InvalidRequest
from octavo_proto.keys import ChainHasher, foreign_key
from octavo_proto.layout import KvKind, Layout
from octavo_proto.limits import KEY_BYTES

TOKEN_ID_MAX: Final = 2**32 - 1


class Chain:
    """A growing prompt. Hashes only what is new, and only when keys are asked for.

    It keeps the token ids, not just the keys: a node that comes back with another namespace key
    (a new master key) is served by hashing again. Safe for use by several threads.
    """

    is_unlinked: Final = False

    def __init__(self, layout: Layout, namespace: str, resolve_key: Callable[[str], bytes]) -> None:
        """``resolve_key`` answers the namespace key of the session, connecting if need be."""
        if layout.kind is KvKind.FOREIGN:
            raise InvalidRequest(f"layout {layout.name!r} is foreign: use foreign_chain")
        self.layout: Final = layout
        self.namespace: Final = namespace
        self.page_tokens: Final = layout.page_tokens
        self._resolve_key = resolve_key
        self._lock = threading.Lock()
        self._tokens = array("I")
        self._extras: dict[int, tuple[bytes, ...]] = {}
        self._fingerprint = layout.fingerprint()
        self._hashed_with = b""
        self._hasher: ChainHasher | None = None

    @property
    def token_count(self) -> int:
        """Tokens so far, those behind the last full page included."""
        return len(self._tokens)

    @property
    def page_count(self) -> int:
        """Full pages so far. Partial pages are never stored or matched."""
        return len(self._tokens) // self.page_tokens

    @property
    def keys(self) -> bytes:
        """Keys of all full pages, 16 bytes each.

        Raises:
            NodeUnavailable: keys depend on a secret that the node gives; there is no node.
        """
        return self.keys_under(self._resolve_key(self.namespace))

    def extend(
        self, token_ids: Iterable[int], extras: Mapping[int, Sequence[bytes]] | None = None
    ) -> None:
        """Appends tokens (an iterable of integers, a numpy array or a tensor of one dimension).

        ``extras`` maps a page's position to further identity of that page (an image's digest),
        at full width and in a fixed order. It must come with the tokens that fill its page at
        the latest.

        Raises:
            InvalidRequest: a token id is no unsigned 32-bit integer, or an extra belongs to a
                page that is full already. Nothing was appended.
        """
        new_tokens = _token_array(token_ids)
        with self._lock:
            full_pages = self.page_count
            for position in extras or {}:
                if position < full_pages:
                    raise InvalidRequest(
                        f"extras for page {position}, which is full; {full_pages} pages are"
                    )
            for position, values in (extras or {}).items():
                self._extras[position] = tuple(bytes(value) for value in values)
            self._tokens += new_tokens

    def keys_under(self, namespace_key: bytes) -> bytes:
        """Keys of all full pages under a namespace key."""
        with self._lock:
            hasher = self._hasher
            if hasher is None or self._hashed_with != namespace_key:
                hasher = ChainHasher(namespace_key, self._fingerprint, self.page_tokens)
                self._hasher, self._hashed_with = hasher, namespace_key
            # Only whole pages enter the hasher, so extras may still come for the page behind.
            begin, end = hasher.token_count, self.page_count * self.page_tokens
            if begin < end:
                hasher.extend(self._tokens[begin:end], self._extras)
            return hasher.keys


class ForeignChain:
    """Pages under another system's keys, each present or absent for itself."""

    is_unlinked: Final = True

    def __init__(
        self,
        layout: Layout,
        namespace: str,
        resolve_key: Callable[[str], bytes],
        foreign_keys: Sequence[bytes],
    ) -> None:
        if layout.kind is not KvKind.FOREIGN:
            raise InvalidRequest(f"layout {layout.name!r} is not foreign: use chain")
        self.layout: Final = layout
        self.namespace: Final = namespace
        self.page_tokens: Final = layout.page_tokens
        self._resolve_key = resolve_key
        self._foreign_keys = tuple(bytes(key) for key in foreign_keys)
        self._fingerprint = layout.fingerprint()
        self._hashed: tuple[bytes, bytes] = (b"", b"")

    @property
    def page_count(self) -> int:
        return len(self._foreign_keys)

    @property
    def keys(self) -> bytes:
        """The page keys that stand for the foreign ones, 16 bytes each."""
        return self.keys_under(self._resolve_key(self.namespace))

    def keys_under(self, namespace_key: bytes) -> bytes:
        hashed_with, keys = self._hashed
        if hashed_with != namespace_key:
            keys = b"".join(
                foreign_key(namespace_key, self._fingerprint, key) for key in self._foreign_keys
            )
            self._hashed = (namespace_key, keys)
        return keys


AnyChain = Chain | ForeignChain


def key_at(keys: bytes, position: int) -> bytes:
    """The key of one page of a key column."""
    return keys[position * KEY_BYTES : (position + 1) * KEY_BYTES]


def _token_array(token_ids: Iterable[int]) -> array[int]:
    if hasattr(token_ids, "tolist"):  # numpy arrays and tensors: element access is slow
        token_ids = cast("Iterable[int]", cast("Any", token_ids).tolist())
    if isinstance(token_ids, array) and token_ids.typecode == "I":
        return token_ids
    try:
        return array("I", token_ids)
    except (OverflowError, TypeError) as error:
        raise InvalidRequest(
            f"token ids must be integers from 0 to {TOKEN_ID_MAX}: {error}"
        ) from None


assert np.dtype(np.uint32).itemsize == array("I").itemsize, "a token id takes 4 bytes"
