"""Log lines stay one line, bounded, and parse."""

from __future__ import annotations

import json
import logging
import sys

from octavo_server.telemetry.logs import MESSAGE_CHARACTERS_MAX, JsonFormatter, TextFormatter


def record(message: str, *arguments: object, failed: bool = False) -> logging.LogRecord:
    error = None
    if failed:
        try:
            raise ValueError("boom")
        except ValueError:
            error = sys.exc_info()
    return logging.LogRecord("octavo", logging.WARNING, __file__, 1, message, arguments, error)


def test_json_line_parses_whatever_the_message_holds() -> None:
    line = JsonFormatter().format(record('a "quoted" %s\n\x00ü', "value"))
    assert "\n" not in line
    found = json.loads(line)
    assert found["message"] == 'a "quoted" value\n\x00ü'
    assert found["level"] == "warning"
    assert "error" not in found


def test_json_line_carries_the_error() -> None:
    assert (
        "ValueError: boom" in json.loads(JsonFormatter().format(record("x", failed=True)))["error"]
    )


def test_text_message_cannot_forge_a_second_line() -> None:
    line = TextFormatter().format(record("x\n12:00:00 error octavo: forged"))
    assert len(line.splitlines()) == 1


def test_long_messages_are_cut() -> None:
    for formatter in (JsonFormatter(), TextFormatter()):
        assert len(formatter.format(record("x" * 10**6))) < MESSAGE_CHARACTERS_MAX + 200
