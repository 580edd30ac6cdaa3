"""Reads settings from flags, environment and file, and says which of them is wrong."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import ValidationError

from octavo_proto.places import ADDRESS_VARIABLE
from octavo_server.settings import Settings

PREFIX: Final = "OCTAVO_"
CONFIG_VARIABLE: Final = "OCTAVO_CONFIG"
CONFIG_BYTES_MAX: Final = 1 << 20
"""A settings file has a few hundred bytes; more than this is another kind of file."""

_NOT_SETTINGS: Final = frozenset({CONFIG_VARIABLE, ADDRESS_VARIABLE, "OCTAVO_CACHE"})
_NOT_OURS: Final = re.compile(r"OCTAVO_(TEST_.*|SERVICE_.*|PORT(_.*)?)")
"""Kubernetes sets the last two in every pod beside a service that is called ``octavo``."""


class _Found(NamedTuple):
    name: str
    value: object
    origin: str


class SettingsError(ValueError):
    """The settings are wrong; the message is one line for each that is."""


def load_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], config: Path | None = None
) -> Settings:
    """The node's settings.

    ``flags`` maps setting names to texts or values. ``config`` is a TOML file; without it,
    ``OCTAVO_CONFIG`` may name one.

    Raises:
        SettingsError: a key is unknown, a value is refused, or the file cannot be read.
    """
    if config is None and environ.get(CONFIG_VARIABLE):
        config = Path(environ[CONFIG_VARIABLE])
    values: dict[str, object] = {}
    origins: dict[str, str] = {}
    unknown: list[str] = []
    for name, value, origin in (*_from_file(config), *_from_environment(environ), *_from(flags)):
        if name in Settings.model_fields:
            values[name], origins[name] = value, origin
        else:
            unknown.append(f"{origin} is no setting{suggestion(name, Settings.model_fields)}")
    if unknown:
        raise SettingsError("\n".join(unknown))
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError("\n".join(_lines(error, origins))) from None


def suggestion(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` for the closest known name, or nothing if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _from(flags: Mapping[str, object]) -> Iterable[_Found]:
    for name, value in flags.items():
        yield _Found(name, value, f"--{name.replace('_', '-')}")


def _from_environment(environ: Mapping[str, str]) -> Iterable[_Found]:
    for key, value in environ.items():
        if key.startswith(PREFIX) and key not in _NOT_SETTINGS and not _NOT_OURS.fullmatch(key):
            yield _Found(key.removeprefix(PREFIX).lower(), value, key)


def _from_file(path: Path | None) -> Iterable[_Found]:
    if path is not None:
        for name, value in _read_file(path).items():
            yield _Found(name, value, f"{path}: {name}")


def _read_file(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            content = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from None
    if len(content) > CONFIG_BYTES_MAX:
        raise SettingsError(f"{path}: has more than {CONFIG_BYTES_MAX} bytes")
    try:
        return tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: is no TOML ({error})") from None


def _lines(error: ValidationError, origins: Mapping[str, str]) -> Iterable[str]:
    for problem in error.errors(include_url=False):
        message = problem["msg"].removeprefix("Value error, ").replace("\n", " ")
        name = ".".join(str(part) for part in problem["loc"])
        origin = origins.get(str(problem["loc"][0]), name) if problem["loc"] else ""
        if origin and problem["type"] != "value_error" and not isinstance(problem["input"], dict):
            message = f"{problem['input']!r}: {message[:1].lower()}{message[1:]}"
        yield f"{origin}: {message}" if origin else message
