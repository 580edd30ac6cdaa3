"""Which codec packs which page."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tests.codec.kv import gqa, mla, units

from octavo import foreign_layout
from octavo.codec import PROFILES, NamespaceProfiles, Profile, UnknownCodec, codec_names, codec_of
from octavo.codec.roundtrip import BASELINES, roundtrip


def test_profiles_choose_the_codecs_that_the_guide_promises() -> None:
    assert dict(PROFILES) == {
        "general": "fp8_e5m2",
        "code": "fp8_e4m3",
        "math": "fp8_e4m3",
        "exact": "raw",
        "best": "int8",
        "dense": "int5",
    }


def test_a_codecs_name_is_a_profile_too_and_others_are_refused_by_name() -> None:
    assert Profile.named("int6").codec_name == "int6"
    with pytest.raises(UnknownCodec, match="'fast' is neither a profile"):
        Profile.named("fast")


@pytest.mark.parametrize("name", [*PROFILES, *codec_names()])
def test_the_first_16_tokens_of_a_chain_are_raw_and_no_others(name: str) -> None:
    profile = Profile.named(name)
    for page_tokens in (16, 32, 256):
        layout = gqa(page_tokens=page_tokens)
        first, second = profile.codec_at(layout, 0), profile.codec_at(layout, 1)
        if profile.codec_name == "raw" or page_tokens == 16:
            assert first.variant == 1
        else:
            assert first.variant == second.variant + 32
        assert second.name == profile.codec_name
        assert profile.codec_at(layout, 9999) is second


@pytest.mark.parametrize("name", PROFILES)
def test_caches_that_are_quantised_already_pass_untouched(name: str) -> None:
    for layout in (gqa("float8_e5m2"), gqa("int8"), foreign_layout("f", "lmcache")):
        for position in (0, 1):
            assert Profile.named(name).codec_at(layout, position).variant == 1


def test_bytes_of_a_token_do_not_depend_on_the_length_of_a_page() -> None:
    for name in codec_names():
        profile = Profile.named(name)
        chains = {
            page_tokens: sum(
                profile.page_bytes(gqa(page_tokens=page_tokens), position)
                for position in range(768 // page_tokens)
            )
            for page_tokens in (16, 32, 48, 256)
        }
        assert len(set(chains.values())) == 1, chains


def test_a_namespace_has_its_own_profile_or_the_default() -> None:
    profiles = NamespaceProfiles.parsed("best", {"code-review": "code"})
    assert profiles.of("code-review").codec_name == "fp8_e4m3"
    assert profiles.of("anything else").codec_name == "int8"
    assert NamespaceProfiles.parsed().of("default").codec_name == "raw"
    with pytest.raises(UnknownCodec, match="'nope'"):
        NamespaceProfiles.parsed("exact", {"a": "nope"})


@pytest.mark.parametrize("name", [*codec_names(), *BASELINES, "best"])
@pytest.mark.parametrize("page_tokens", [16, 48])
def test_a_roundtrip_is_what_a_reader_of_the_chain_gets(name: str, page_tokens: int) -> None:
    for layout in (gqa(page_tokens=page_tokens), mla(page_tokens=page_tokens)):
        values = units(layout, 3)
        before = values.clone()
        whole = roundtrip(name, values, layout)
        tokens = 2 if layout.name == "mla" else 3
        assert torch.equal(whole[:1].narrow(tokens, 0, 16), values[:1].narrow(tokens, 0, 16))
        assert torch.equal(roundtrip(name, values[1:], layout, first_page=1), whole[1:])
        assert torch.equal(roundtrip(name, values, layout, rounds=3), whole)
        assert torch.equal(values, before)
        assert (name == "raw") == torch.equal(whole, values)


def test_readers_take_every_variant_so_a_profile_may_change_at_any_time() -> None:
    """A chain of which each page was written under another profile reads back whole."""
    layout = gqa(page_tokens=32)
    values = units(layout, len(PROFILES))
    for position, name in enumerate(PROFILES):
        codec = Profile.named(name).codec_at(layout, position)
        packed = codec.pack(values[position : position + 1], layout)
        got = codec_of(codec.variant).unpack(packed, layout, 0)
        error = (got.float() - values[position : position + 1].float()).abs().max()
        assert float(error) < 0.5


def test_choosing_codecs_and_sizes_needs_no_torch() -> None:
    code = (
        "import sys; from octavo import Layout; from octavo.codec import Profile;"
        "layout = Layout(name='l', model='m', layers=2, kv_heads=2, head_dim=8);"
        "assert Profile.named('best').page_bytes(layout, 1) > 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
