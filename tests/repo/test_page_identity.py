"""The committed vectors are what the code computes, and what the document describes."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

import xxhash
from tests.repo import identity_vectors
from tests.repo.tree import ROOT

VECTORS: dict[str, Any] = json.loads((ROOT / "docs/page-identity.json").read_text())


def framed(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def blake2b_16(data: bytes, person: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(data, digest_size=16, key=key, person=person).digest()


def fingerprint_of(layout_id: str) -> bytes:
    (found,) = [each for each in VECTORS["layouts"] if each["id"] == layout_id]
    return bytes.fromhex(found["fingerprint"])


def test_committed_vectors_equal_computed_ones() -> None:
    assert json.loads(json.dumps(identity_vectors.compute())) == VECTORS


def test_fingerprints_follow_from_the_documented_bytes() -> None:
    for layout in VECTORS["layouts"]:
        data = b"".join(
            framed(name) + framed(str(value)) for name, value in layout["fields"].items()
        )
        fingerprint = blake2b_16(data, b"octavo-layout-1\0")
        assert fingerprint.hex() == layout["fingerprint"]
        seed = blake2b_16(
            fingerprint, b"octavo-seed-1\0\0\0", bytes.fromhex(VECTORS["namespace_key"])
        )
        assert seed.hex() == layout["chain_seed"]


def test_page_keys_follow_from_the_documented_bytes() -> None:
    for chain in VECTORS["chains"]:
        namespace_key = bytes.fromhex(chain["namespace_key"])
        parent = blake2b_16(fingerprint_of(chain["layout"]), b"octavo-seed-1\0\0\0", namespace_key)
        size = chain["page_tokens"]
        page_count = len(chain["token_ids"]) // size
        assert page_count == len(chain["keys"])
        for page in range(page_count):
            tokens = chain["token_ids"][page * size : (page + 1) * size]
            data = parent + struct.pack(f"<I{size}I", size, *tokens)
            for extra in chain["extras"].get(str(page), []):
                data += struct.pack("<I", len(extra) // 2) + bytes.fromhex(extra)
            parent = blake2b_16(data, b"octavo-page-1\0\0\0", namespace_key)
            assert parent.hex() == chain["keys"][page], chain["what"]


def test_foreign_keys_follow_from_the_documented_bytes() -> None:
    namespace_key = bytes.fromhex(VECTORS["namespace_key"])
    for each in VECTORS["foreign_keys"]:
        seed = blake2b_16(fingerprint_of(each["layout"]), b"octavo-seed-1\0\0\0", namespace_key)
        key = blake2b_16(seed + bytes.fromhex(each["foreign"]), b"octavo-foreign-1", namespace_key)
        assert key.hex() == each["key"]


def test_digests_follow_from_the_documented_bytes() -> None:
    for each in VECTORS["digests"]:
        data = bytes.fromhex(each["data"])
        bound = bytes.fromhex(each["key"]) + fingerprint_of(each["layout"])
        bound += bytes((each["unit"], 0)) + struct.pack("<HI", each["variant"], len(data))
        seed = xxhash.xxh3_64_intdigest(bound)
        assert f"{seed:016x}" == each["seed"]
        assert f"{xxhash.xxh3_64_intdigest(data, seed=seed):016x}" == each["digest"]


def test_any_changed_input_changes_the_key() -> None:
    keys = [chain["keys"][-1] for chain in VECTORS["chains"]]
    # "a page and a half" has the same one key as "one page": the half is not hashed.
    assert VECTORS["chains"][0]["keys"] == VECTORS["chains"][1]["keys"]
    assert len(set(keys)) == len(keys) - 1
