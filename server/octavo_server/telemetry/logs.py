"""Log lines on standard error, as text or as JSON."""

from __future__ import annotations

import json
import logging
import sys
from typing import Final, Literal

MESSAGE_CHARACTERS_MAX: Final = 4096
"""A line that quotes somebody's input must not become as long as the input."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, and error if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage()[:MESSAGE_CHARACTERS_MAX],
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


class TextFormatter(logging.Formatter):
    """``12:34:56 info octavo_server.assembly: message``; line breaks in messages are escaped."""

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()[:MESSAGE_CHARACTERS_MAX].replace("\n", "\\n")
        line = (
            f"{self.formatTime(record, '%H:%M:%S')} {record.levelname.lower()} "
            f"{record.name}: {message}"
        )
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def configure_logs(
    level: Literal["debug", "info", "warning", "error"], form: Literal["text", "json"]
) -> None:
    """Sends the process's log records to standard error. Replaces what was set before."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # aiohttp would log each scrape and probe.
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
