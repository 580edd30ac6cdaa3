"""Makes ``docs/page-identity.json``: ``python tests/repo/identity_vectors.py > FILE``.

The inputs are small and fixed; the outputs come from the product's own code. A test compares
them with the committed file, and recomputes them from the documented byte layout alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict

from octavo_proto import keys
from octavo_proto.layout import HASHED_FIELDS, KvKind, Layout, foreign_layout

NAMESPACE_KEY = bytes(range(32))
OTHER_NAMESPACE_KEY = bytes(range(32, 64))
IMAGE_DIGEST = bytes(range(200, 232))

LAYOUTS = {
    "gqa": Layout(
        name="any",
        model="example/gqa-8b",
        weights_revision="3f1c",
        layers=32,
        kv_heads=8,
        head_dim=128,
        rope='{"base":500000.0}',
        head_parts=2,
    ),
    "mla": Layout(
        name="any",
        model="example/mla",
        kind=KvKind.MLA,
        layers=61,
        kv_heads=1,
        head_dim=512,
        rope_dim=64,
        dtype="float8_e4m3fn",
        kv_scales="in the weights",
        page_tokens=64,
        weights_epoch=7,
        adapter="zürich-lora",
    ),
    "foreign": foreign_layout("any", "lmcache", unit_count=4),
}


def compute() -> dict[str, object]:
    """All vectors, as they stand in the file; bytes are lower-case hex."""
    return {
        "namespace_key": NAMESPACE_KEY.hex(),
        "layouts": [
            {
                "id": identifier,
                "fields": {name: asdict(layout)[name] for name in HASHED_FIELDS},
                "fingerprint": layout.fingerprint().hex(),
                "chain_seed": keys.chain_seed(NAMESPACE_KEY, layout.fingerprint()).hex(),
            }
            for identifier, layout in LAYOUTS.items()
        ],
        "chains": [
            _chain("gqa", "one page", list(range(16)), {}),
            _chain("gqa", "a page and a half: the half has no key", list(range(24)), {}),
            _chain("gqa", "large token ids", [0, 1, 2**31, 2**32 - 1] * 8, {}),
            _chain("gqa", "an image in the second page", list(range(48)), {1: [IMAGE_DIGEST]}),
            _chain("gqa", "two extras, one empty", list(range(16)), {0: [b"", b"salt"]}),
            _chain("mla", "64 tokens a page", list(range(1000, 1128)), {}),
            _chain("gqa", "another namespace", list(range(16)), {}, OTHER_NAMESPACE_KEY),
        ],
        "foreign_keys": [
            {
                "layout": "foreign",
                "foreign": foreign.hex(),
                "key": keys.foreign_key(
                    NAMESPACE_KEY, LAYOUTS["foreign"].fingerprint(), foreign
                ).hex(),
            }
            for foreign in (b"", b"chunk@0f", bytes(range(64)))
        ],
        "digests": [
            _digest(unit=0, variant=1, data=b""),
            _digest(unit=0, variant=1, data=b"octavo"),
            _digest(unit=1, variant=1, data=b"octavo"),
            _digest(unit=1, variant=513, data=bytes(range(256)) * 5),
        ],
    }


def _chain(
    layout_id: str,
    what: str,
    token_ids: list[int],
    extras: dict[int, list[bytes]],
    namespace_key: bytes = NAMESPACE_KEY,
) -> dict[str, object]:
    layout = LAYOUTS[layout_id]
    column = keys.page_keys(
        namespace_key, layout.fingerprint(), layout.page_tokens, token_ids, extras
    )
    return {
        "what": what,
        "layout": layout_id,
        "namespace_key": namespace_key.hex(),
        "page_tokens": layout.page_tokens,
        "token_ids": token_ids,
        "extras": {str(page): [each.hex() for each in values] for page, values in extras.items()},
        "keys": [column[start : start + 16].hex() for start in range(0, len(column), 16)],
    }


def _digest(*, unit: int, variant: int, data: bytes) -> dict[str, object]:
    fingerprint = LAYOUTS["gqa"].fingerprint()
    key = keys.page_keys(NAMESPACE_KEY, fingerprint, 16, range(16))
    seed = keys.digest_seed(key, fingerprint, unit, variant, len(data))
    return {
        "layout": "gqa",
        "key": key.hex(),
        "unit": unit,
        "variant": variant,
        "data": data.hex(),
        "seed": f"{seed:016x}",
        "digest": f"{keys.unit_digest(data, seed):016x}",
    }


if __name__ == "__main__":
    print(json.dumps(compute(), indent=1, ensure_ascii=False))
