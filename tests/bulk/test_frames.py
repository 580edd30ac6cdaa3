"""Frames of bulk streams: what is packed is read back, and nothing else is taken for one."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from octavo_proto import bulk, columns


def test_a_request_is_read_as_it_was_packed() -> None:
    request = bulk.Request(bulk.GET, first=7, row_count=bulk.ROWS_MAX, name=2**64 - 1)
    assert bulk.read_request(request.pack()) == request
    assert len(request.pack()) == bulk.REQUEST_BYTES == 24


def test_an_answer_is_read_as_it_was_packed() -> None:
    asked = bulk.Request(bulk.PUT, 0, 3, 9)
    answer = bulk.Answer(bulk.PUT, status=14, row_count=3, size_bytes=2**40)
    assert bulk.read_answer(answer.pack(), asked) == answer
    assert len(answer.pack()) == bulk.ANSWER_BYTES == 24


def test_units_are_read_as_they_were_packed() -> None:
    sent = bulk.UnitsSent(
        np.array([0, 65_535, 2**32 - 1]),
        np.array([0, 63, 255]),
        np.array([1, 4096, 2**32 - 1]),
        np.array([0, 1, 2**64 - 1], dtype=columns.U64),
    )
    data = sent.pack()
    assert len(data) == 3 * bulk.UNIT_ROW_BYTES == 3 * 17
    for column, back in zip(sent, bulk.read_units(data, 3), strict=True):
        assert back.tolist() == column.tolist()


@pytest.mark.parametrize(
    "fields",
    [
        (bulk.MAGIC + 1, bulk.GET, 0, 1, 5),
        (bulk.MAGIC, 0, 0, 1, 5),
        (bulk.MAGIC, 3, 0, 1, 5),
        (bulk.MAGIC, bulk.GET, 0, 0, 5),
        (bulk.MAGIC, bulk.GET, 0, bulk.ROWS_MAX + 1, 5),
    ],
)
def test_what_is_no_request_is_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(bulk.FrameError):
        bulk.read_request(struct.pack("<IIIIQ", *fields))


@pytest.mark.parametrize(
    "fields",
    [
        (bulk.MAGIC + 1, bulk.GET, 14, 2, 5),
        (bulk.MAGIC, bulk.PUT, 14, 2, 5),
        (bulk.MAGIC, bulk.GET, 14, 3, 5),
        (bulk.MAGIC, bulk.GET, 256, 2, 5),
    ],
)
def test_what_answers_something_else_is_refused(fields: tuple[int, ...]) -> None:
    with pytest.raises(bulk.FrameError):
        bulk.read_answer(struct.pack("<IIIIQ", *fields), bulk.Request(bulk.GET, 0, 2, 5))
