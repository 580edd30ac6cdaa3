"""Which tokens are loaded, which pages saved."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from octavo import Run, Tier
from octavo.vllm.loading import failed_blocks
from octavo.vllm.orders import PageOrder
from octavo.vllm.plan import (
    covering_blocks,
    loadable_tokens,
    pages_by_tier,
    saveable_pages,
    turn_of,
)

counts = st.integers(0, 300)


@given(counts, st.sampled_from([16, 32]), st.sampled_from([32, 64, 96]), st.data())
def test_loads_are_whole_blocks_of_what_is_there_and_never_the_whole_prompt(
    matched: int, page_tokens: int, block_tokens: int, data: st.DataObject
) -> None:
    token_count = data.draw(st.integers(1, 5000))
    local = data.draw(st.integers(0, (token_count - 1) // block_tokens)) * block_tokens
    tokens = loadable_tokens(matched, page_tokens, block_tokens, token_count, local)
    assert tokens % block_tokens == 0
    assert tokens >= 0
    assert local + tokens < token_count
    if tokens:
        assert local + tokens <= matched * page_tokens
        longer = local + tokens + block_tokens
        assert longer > matched * page_tokens or longer >= token_count


def test_a_page_with_a_token_that_was_not_accepted_is_not_saved() -> None:
    # 30 accepted tokens; the step computes three speculated ones behind them.
    assert saveable_pages(33, 30, 16) == 1
    assert saveable_pages(33, 32, 16) == 2
    assert saveable_pages(20, 64, 16) == 1


def test_blocks_cover_pages_also_where_they_begin_and_end_within_one() -> None:
    assert covering_blocks(0, 4, 4) == (0, 1)
    assert covering_blocks(3, 5, 4) == (0, 2)
    assert covering_blocks(4, 5, 1) == (4, 5)


def test_an_order_keeps_the_blocks_of_what_is_left_of_it() -> None:
    order = PageOrder("r", 3, 9, (10, 11, 12))  # four pages a block
    assert order.beyond(5, 4).block_ids == (11, 12)
    assert order.beyond(4, 4).block_ids == (11, 12)
    assert order.beyond(3, 4) == order


def test_a_block_with_one_missing_page_has_failed() -> None:
    order = PageOrder("r", 4, 12, (10, 11))
    assert failed_blocks(order, 12, 4) == ()
    assert failed_blocks(order, 11, 4) == (11,)
    assert failed_blocks(order, 8, 4) == (11,)
    assert failed_blocks(order, 7, 4) == (10, 11)
    assert failed_blocks(order, 4, 4) == (10, 11)


def test_hits_are_counted_where_they_lie() -> None:
    runs = [Run(Tier.MEMORY, "", 4, 0.0), Run(Tier.NVME, "", 3, 0.1), Run(Tier.MEMORY, "", 2, 0.0)]
    assert pages_by_tier(runs, 2, 8) == {Tier.MEMORY: 3, Tier.NVME: 3}
    assert pages_by_tier(runs, 0, 3) == {Tier.MEMORY: 3}


@given(st.integers(1, 8), counts, counts)
def test_replicas_share_a_window_without_gap_or_overlap(
    replicas: int, first_page: int, count: int
) -> None:
    turns = [turn_of(each, replicas, first_page, first_page + count) for each in range(replicas)]
    pages = [page for begin, end in turns for page in range(begin, end)]
    assert pages == list(range(first_page, first_page + count))
