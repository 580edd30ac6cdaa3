"""Chains: incremental, repeatable, faithful to the one definition of page keys."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import octavo
from octavo.chain import Chain, ForeignChain
from octavo_proto.keys import foreign_key, page_keys

LAYOUT = octavo.Layout(name="l", model="m", layers=1, kv_heads=1, head_dim=8, page_tokens=16)
FOREIGN = octavo.foreign_layout("f", "lmcache")
KEY = b"k" * 32
OTHER_KEY = b"o" * 32


def chain_of(key: bytes = KEY) -> Chain:
    return Chain(LAYOUT, "default", lambda _namespace: key)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=40), max_size=6), st.booleans())
def test_a_chain_that_grows_has_the_keys_of_one_that_was_given_whole(
    parts: list[list[int]], ask_between: bool
) -> None:
    chain = chain_of()
    for part in parts:
        chain.extend(part)
        if ask_between:
            _ = chain.keys
    tokens = [token for part in parts for token in part]
    assert chain.token_count == len(tokens)
    assert chain.page_count == len(tokens) // 16
    assert chain.keys == page_keys(KEY, LAYOUT.fingerprint(), 16, tokens)


def test_tokens_come_as_lists_arrays_or_numpy() -> None:
    expected = page_keys(KEY, LAYOUT.fingerprint(), 16, range(32))
    for tokens in (list(range(32)), array("I", range(32)), np.arange(32), iter(range(32))):
        chain = chain_of()
        chain.extend(tokens)
        assert chain.keys == expected


def test_another_namespace_key_hashes_the_same_tokens_afresh() -> None:
    chain = chain_of()
    chain.extend(range(40))
    first = chain.keys_under(KEY)
    second = chain.keys_under(OTHER_KEY)
    assert second == page_keys(OTHER_KEY, LAYOUT.fingerprint(), 16, range(40))
    assert first != second
    chain.extend(range(40, 64))
    assert chain.keys_under(KEY) == page_keys(KEY, LAYOUT.fingerprint(), 16, range(64))


def test_extras_change_their_page_and_all_behind_it() -> None:
    plain, pictured = chain_of(), chain_of()
    plain.extend(range(64))
    pictured.extend(range(40))
    _ = pictured.keys
    pictured.extend(range(40, 64), extras={2: [b"image digest"]})
    assert pictured.keys[:32] == plain.keys[:32]
    assert pictured.keys[32:48] != plain.keys[32:48]
    assert pictured.keys[48:] != plain.keys[48:]
    assert pictured.keys == page_keys(
        KEY, LAYOUT.fingerprint(), 16, range(64), {2: [b"image digest"]}
    )


def test_extras_for_a_full_page_are_refused() -> None:
    chain = chain_of()
    chain.extend(range(32))
    with pytest.raises(octavo.InvalidRequest, match="page 1, which is full"):
        chain.extend([], extras={1: [b"late"]})


@pytest.mark.parametrize("tokens", [[-1], [2**32], [1.5], ["a"]])
def test_a_wrong_token_id_is_refused_and_nothing_is_appended(tokens: list[int]) -> None:
    chain = chain_of()
    with pytest.raises(octavo.InvalidRequest, match="token ids"):
        chain.extend([1, 2, *tokens])
    assert chain.token_count == 0


def test_foreign_keys_are_made_from_the_other_systems_keys() -> None:
    chain = ForeignChain(FOREIGN, "default", lambda _namespace: KEY, [b"a", b"b" * 70])
    fingerprint = FOREIGN.fingerprint()
    assert chain.page_count == 2
    assert chain.keys == foreign_key(KEY, fingerprint, b"a") + foreign_key(
        KEY, fingerprint, b"b" * 70
    )
    assert chain.keys_under(OTHER_KEY) != chain.keys_under(KEY)


def test_a_layout_is_used_for_its_own_kind_of_chain() -> None:
    with pytest.raises(octavo.InvalidRequest, match="foreign_chain"):
        Chain(FOREIGN, "default", lambda _namespace: KEY)
    with pytest.raises(octavo.InvalidRequest, match="is not foreign"):
        ForeignChain(LAYOUT, "default", lambda _namespace: KEY, [])
