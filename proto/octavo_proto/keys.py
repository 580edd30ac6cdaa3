"""Page identity: the one definition of page keys.

A page key is 16 bytes of keyed BLAKE2b over the parent's key, the page's token ids and any
further identity of what those tokens stand for (an image's digest, say). The first page's
parent is the chain seed, made from the layout's fingerprint. The BLAKE2b key is the
namespace's secret: who doesn't have it can neither make nor guess a key.

Equal keys mean equal prefixes under one layout in one namespace. ``docs/page-identity.md``
has the byte layout and test vectors, so that another language can reproduce them.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import xxhash

from octavo_proto.limits import KEY_BYTES, NAMESPACE_KEY_BYTES

PERSON_SEED: Final = b"octavo-seed-1\0\0\0"
PERSON_PAGE: Final = b"octavo-page-1\0\0\0"
PERSON_FOREIGN: Final = b"octavo-foreign-1"

_NO_EXTRAS: Final[Mapping[int, Sequence[bytes]]] = {}


def chain_seed(namespace_key: bytes, layout_fingerprint: bytes) -> bytes:
    """The parent of a chain's first page: 16 bytes."""
    _require_bytes("namespace_key", namespace_key, NAMESPACE_KEY_BYTES)
    _require_bytes("layout_fingerprint", layout_fingerprint, KEY_BYTES)
    return hashlib.blake2b(
        layout_fingerprint, digest_size=KEY_BYTES, key=namespace_key, person=PERSON_SEED
    ).digest()


class ChainHasher:
    """Page keys of one growing prompt: hashes only what is new.

    Only full pages have keys; tokens behind the last full page wait for more to come.
    Not safe for use by two threads at once.
    """

    def __init__(self, namespace_key: bytes, layout_fingerprint: bytes, page_tokens: int) -> None:
        if page_tokens < 1:
            raise ValueError(f"page_tokens is {page_tokens}, allowed: at least 1")
        self.page_tokens: Final = page_tokens
        self._parent = chain_seed(namespace_key, layout_fingerprint)
        self._base = hashlib.blake2b(digest_size=KEY_BYTES, key=namespace_key, person=PERSON_PAGE)
        self._keys = bytearray()
        self._waiting = array("I")

    @property
    def keys(self) -> bytes:
        """Keys of all full pages so far, 16 bytes each."""
        return bytes(self._keys)

    @property
    def page_count(self) -> int:
        """Full pages so far."""
        return len(self._keys) // KEY_BYTES

    @property
    def token_count(self) -> int:
        """Tokens so far, those behind the last full page included."""
        return self.page_count * self.page_tokens + len(self._waiting)

    def extend(
        self,
        token_ids: Iterable[int],
        extras: Mapping[int, Sequence[bytes]] = _NO_EXTRAS,
    ) -> bytes:
        """Appends tokens and returns the keys of the pages that they filled.

        ``extras`` maps a page's position in the chain to further identity of that page: byte
        strings of any length, at full width, in a fixed order. An entry is used when its page
        becomes full, so it must be passed with the call that fills it.

        Raises:
            ValueError: a token id is not an unsigned 32-bit integer. Nothing was appended.
        """
        try:
            new_tokens = array("I", token_ids)
        except (OverflowError, TypeError) as error:
            raise ValueError(f"token ids must be integers from 0 to 2^32-1: {error}") from None
        waiting = self._waiting + new_tokens
        page_tokens = self.page_tokens
        page_count = len(waiting) // page_tokens
        raw = memoryview(waiting.tobytes())  # little-endian on every platform Octavo runs on
        stride = 4 * page_tokens
        parent, base = self._parent, self._base
        first_position = self.page_count
        count_bytes = struct.pack("<I", page_tokens)
        new_keys: list[bytes] = []
        for page in range(page_count):
            digest = base.copy()
            digest.update(parent + count_bytes + raw[page * stride : (page + 1) * stride])
            for extra in extras.get(first_position + page, ()):
                digest.update(struct.pack("<I", len(extra)) + extra)
            parent = digest.digest()
            new_keys.append(parent)
        joined = b"".join(new_keys)
        self._parent = parent
        self._keys += joined
        self._waiting = waiting[page_count * page_tokens :]
        return joined


def page_keys(
    namespace_key: bytes,
    layout_fingerprint: bytes,
    page_tokens: int,
    token_ids: Iterable[int],
    extras: Mapping[int, Sequence[bytes]] = _NO_EXTRAS,
) -> bytes:
    """Keys of the full pages of one prompt, 16 bytes each."""
    return ChainHasher(namespace_key, layout_fingerprint, page_tokens).extend(token_ids, extras)


def foreign_key(namespace_key: bytes, layout_fingerprint: bytes, foreign: bytes) -> bytes:
    """The page key that stands for another system's key."""
    return hashlib.blake2b(
        chain_seed(namespace_key, layout_fingerprint) + foreign,
        digest_size=KEY_BYTES,
        key=namespace_key,
        person=PERSON_FOREIGN,
    ).digest()


def digest_seed(key: bytes, layout_fingerprint: bytes, unit: int, variant: int, length: int) -> int:
    """Seed of a unit's digest: binds the bytes to what they are said to be.

    A unit that lies in the wrong place, belongs to another page, or has another length
    fails its check even if its bytes are whole.
    """
    return xxhash.xxh3_64_intdigest(
        key + layout_fingerprint + struct.pack("<BxHI", unit, variant, length)
    )


def unit_digest(data: bytes | memoryview, seed: int) -> int:
    """XXH3-64 of a unit's bytes under ``digest_seed``. Releases the GIL."""
    return xxhash.xxh3_64_intdigest(data, seed=seed)


def _require_bytes(name: str, value: bytes, length: int) -> None:
    if len(value) != length:
        raise ValueError(f"{name} has {len(value)} bytes, must have {length}")
