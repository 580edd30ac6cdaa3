"""Pages carry a cache bit for bit, and a model goes on from them as if nothing had happened."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.nodes import NodeProcess
from tests.transformers.tiny import hf, make_model

from octavo import RAW_VARIANT, Client, InvalidRequest, Rows, Transfer
from octavo.codec import UnknownVariant
from octavo.transformers import CacheSink, CacheSource, kv_layout, next_logits
from octavo_proto.layout import Layout

PAGES = 3
TOKENS = PAGES * 16 + 5


def make_layout(model: Any, *, layer_parts: int = 1, head_parts: int = 1) -> Layout:
    return kv_layout(
        model,
        "tiny",
        model_id="tiny",
        weights_revision="1",
        layer_parts=layer_parts,
        head_parts=head_parts,
    )


def prompt(length: int = TOKENS) -> list[int]:
    return [(token * 31 + 7) % 97 for token in range(length)]


def filled_cache(model: Any, length: int = TOKENS) -> Any:
    cache = hf.DynamicCache(config=model.config)
    next_logits(model, prompt(length), cache)
    return cache


def gather(cache: Any, layout: Layout, first_page: int = 0) -> dict[tuple[int, int], bytearray]:
    """All units of pages from ``first_page`` on, as a node would keep them."""
    page_count = PAGES - first_page
    source = CacheSource(cache, layout, page_count=page_count, first_page=first_page)
    transfer = Transfer(layout, first_page, page_count, tuple(range(layout.unit_count)))
    return {place: body for place, (_variant, body) in taken(source, transfer).items()}


def taken(source: CacheSource, transfer: Transfer) -> dict[tuple[int, int], tuple[int, bytearray]]:
    """Variant and bytes of all units of a transfer, drawn as a transport does."""
    source.begin(transfer)
    numbers = np.arange(transfer.row_count, dtype=np.int64)
    lengths = spread(source.unit_lengths(), transfer).astype(np.int64)
    variants = spread(source.page_variants(), transfer)
    positions, units = transfer.positions_of(numbers), transfer.units_of(numbers)
    bodies = [bytearray(length) for length in lengths.tolist()]
    views = [np.frombuffer(body, dtype=np.uint8) for body in bodies]
    addresses = np.array([view.ctypes.data for view in views], dtype=np.int64)
    source.fill_rows(Rows(numbers, positions, units, variants, lengths, addresses))
    places = zip(positions.tolist(), units.tolist(), strict=True)
    return dict(zip(places, zip(variants.tolist(), bodies, strict=True), strict=True))


def spread(column: NDArray[Any], transfer: Transfer) -> NDArray[Any]:
    """One for all or one a page, as one a row."""
    if len(column) == transfer.page_count:
        return column.repeat(len(transfer.units))
    return np.broadcast_to(column, transfer.row_count).copy()


def scatter(model: Any, layout: Layout, units: dict[tuple[int, int], bytearray]) -> Any:
    sink = CacheSink(layout, page_count=PAGES)
    for (page, unit), body in reversed(units.items()):  # any order will do
        sink.accept(page, unit, RAW_VARIANT, memoryview(body).toreadonly())
    cache = hf.DynamicCache(config=model.config)
    sink.extend(cache, PAGES)
    return cache


def greedy(model: Any, cache: Any, tokens: list[int], count: int) -> list[int]:
    answer: list[int] = []
    for _ in range(count):
        answer.append(int(next_logits(model, tokens, cache).argmax()))
        tokens = answer[-1:]
    return answer


def test_unit_bytes_are_layer_kv_token_head(model: Any) -> None:
    cache = filled_cache(model)
    body = gather(cache, make_layout(model))[1, 0]
    page = np.frombuffer(body, dtype=np.float32).reshape(3, 2, 16, 2, 8)
    for layer in range(3):
        for token in range(16):
            keys = cache.layers[layer].keys[0, :, 16 + token].numpy()
            values = cache.layers[layer].values[0, :, 16 + token].numpy()
            assert np.array_equal(page[layer, 0, token], keys)
            assert np.array_equal(page[layer, 1, token], values)


@pytest.mark.parametrize("parts", [(1, 1), (3, 1), (1, 2), (2, 2)])
def test_round_trip_is_exact_however_pages_are_cut(model: Any, parts: tuple[int, int]) -> None:
    layout = make_layout(model, layer_parts=parts[0], head_parts=parts[1])
    cache = filled_cache(model)
    loaded = scatter(model, layout, gather(cache, layout))
    for before, after in zip(cache.layers, loaded.layers, strict=True):
        assert torch.equal(before.keys[:, :, : PAGES * 16], after.keys)
        assert torch.equal(before.values[:, :, : PAGES * 16], after.values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_round_trip_keeps_every_bit_of_other_dtypes(dtype: torch.dtype) -> None:
    model = make_model(dtype)
    cache = hf.DynamicCache(config=model.config)
    bits = torch.arange(TOKENS * 16, dtype=torch.int32).to(torch.int16) * 5  # NaNs among them
    for index in range(3):
        values = (bits + index).view(dtype).reshape(1, TOKENS, 2, 8).transpose(1, 2)
        cache.update(values, values.flip(2), index)
    layout = make_layout(model)
    loaded = scatter(model, layout, gather(cache, layout))
    for before, after in zip(cache.layers, loaded.layers, strict=True):
        for name in ("keys", "values"):
            kept, got = getattr(before, name)[:, :, : PAGES * 16], getattr(after, name)
            assert torch.equal(kept.contiguous().view(torch.int16), got.view(torch.int16))


def test_continuing_from_pages_equals_the_uninterrupted_run(model: Any) -> None:
    layout = make_layout(model)
    loaded = scatter(model, layout, gather(filled_cache(model), layout))
    uninterrupted = greedy(model, filled_cache(model), [11], 24)
    tail = [*prompt()[PAGES * 16 :], 11]
    assert greedy(model, loaded, tail, 24) == uninterrupted


def test_a_corrupted_page_changes_the_answer(model: Any) -> None:
    layout = make_layout(model)
    units = gather(filled_cache(model), layout)
    body = np.frombuffer(units[1, 0], dtype=np.float32)
    body *= -1.0
    loaded = scatter(model, layout, units)
    uninterrupted = greedy(model, filled_cache(model), [11], 24)
    tail = [*prompt()[PAGES * 16 :], 11]
    assert greedy(model, loaded, tail, 24) != uninterrupted


def test_source_of_later_pages_equals_the_whole(model: Any) -> None:
    layout, cache = make_layout(model), filled_cache(model)
    whole = gather(cache, layout)
    assert gather(cache, layout, first_page=2) == {k: v for k, v in whole.items() if k[0] == 2}


def test_source_does_not_see_what_comes_later(model: Any) -> None:
    layout, cache = make_layout(model), filled_cache(model)
    source = CacheSource(cache, layout, page_count=1)
    before = gather(cache, layout)[0, 0]
    with torch.inference_mode():
        cache.layers[0].keys.zero_()
    _variant, body = taken(source, Transfer(layout, 0, 1, (0,)))[0, 0]
    assert body == before


def test_a_source_gives_the_pages_it_has_and_no_others(model: Any) -> None:
    layout, cache = make_layout(model, layer_parts=3, head_parts=2), filled_cache(model)
    source = CacheSource(cache, layout, page_count=2, first_page=1)
    chosen = Transfer(layout, 1, 1, (1, 4), np.array([2]))
    whole = gather(cache, layout)
    assert {place: bytes(body) for place, (_, body) in taken(source, chosen).items()} == {
        (2, unit): bytes(whole[2, unit]) for unit in (1, 4)
    }
    for first_page, page in ((0, "page 0"), (2, "page 3")):
        with pytest.raises(InvalidRequest, match=f"{page} is wanted, the source has pages 1 to 2"):
            source.begin(Transfer(layout, first_page, 2, (0,)))
    with pytest.raises(InvalidRequest, match="layout 'tiny' is not the source's"):
        source.begin(Transfer(make_layout(model), 1, 1, (0,)))


def test_tokens_behind_the_last_full_page_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=f"holds {TOKENS} tokens, 64 are wanted"):
        CacheSource(filled_cache(model), make_layout(model), page_count=PAGES + 1)


def test_source_refuses_another_models_cache(model: Any) -> None:
    layout = make_layout(model)
    cache = hf.DynamicCache()
    for index in range(3):
        cache.update(torch.zeros(1, 4, 16, 8), torch.zeros(1, 4, 16, 8), index)
    with pytest.raises(ValueError, match="heads"):
        CacheSource(cache, layout, page_count=1)


def test_sink_refuses_unknown_variants_and_missized_units(model: Any) -> None:
    layout = make_layout(model)
    sink = CacheSink(layout, page_count=1)
    body = memoryview(bytes(layout.raw_unit_bytes(0)))
    with pytest.raises(UnknownVariant, match="variant 999"):
        sink.accept(0, 0, 999, body)
    with pytest.raises(ValueError, match="must have"):
        sink.accept(0, 0, RAW_VARIANT, body[:-4])
    with pytest.raises(IndexError, match="page 1"):
        sink.accept(1, 0, RAW_VARIANT, body)


@pytest.mark.parametrize("profile", ["general", "code", "best", "dense", "int6"])
def test_packed_pages_come_back_near_and_the_first_exactly(model: Any, profile: str) -> None:
    layout, cache = make_layout(model, head_parts=2), filled_cache(model)
    source = CacheSource(cache, layout, page_count=PAGES, profile=profile)
    sink = CacheSink(layout, page_count=PAGES)
    transfer = Transfer(layout, 0, PAGES, tuple(range(layout.unit_count)))
    for (page, unit), (variant, body) in taken(source, transfer).items():
        sink.accept(page, unit, variant, memoryview(body).toreadonly())
    loaded = hf.DynamicCache(config=model.config)
    sink.extend(loaded, PAGES)
    for before, after in zip(cache.layers, loaded.layers, strict=True):
        for name in ("keys", "values"):
            kept, got = getattr(before, name)[:, :, : PAGES * 16], getattr(after, name)
            assert torch.equal(kept[:, :, :16], got[:, :, :16])
            error = (kept - got).norm() / (kept - kept.mean(2, keepdim=True)).norm()
            assert 0 < error < 0.12


def test_a_cache_is_packed_by_its_clients_profile_and_got_back(model: Any, tmp_path: Path) -> None:
    layout, cache = make_layout(model, head_parts=2), filled_cache(model)
    with NodeProcess(tmp_path) as node, Client(node.address, layouts=[layout], profile="best") as c:
        chain, sink = c.chain(prompt()), CacheSink(layout, page_count=PAGES)
        put = c.put(chain, CacheSource(cache, layout, page_count=PAGES))
        assert put.stored_pages == PAGES
        assert put.bytes_put < 0.75 * PAGES * layout.raw_page_bytes  # the first page is raw
        assert c.get(chain, sink).page_count == PAGES
    loaded = hf.DynamicCache(config=model.config)
    sink.extend(loaded, PAGES)
    for before, after in zip(cache.layers, loaded.layers, strict=True):
        kept = before.keys[:, :, : PAGES * 16]
        assert torch.equal(kept[:, :, :16], after.keys[:, :, :16])
        assert 0 < (kept - after.keys).norm() / kept.norm() < 0.02
