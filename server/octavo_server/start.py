"""From a command line to a running node: settings, checks, logs, then the assembly."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NoReturn

from octavo_server.places import (
    PlaceError,
    SocketClaim,
    make_private_directory,
    make_writable_directory,
    require_free_port,
    require_memory,
)
from octavo_server.settings import Settings
from octavo_server.settings_sources import SettingsError, load_settings, suggestion
from octavo_server.telemetry.logs import configure_logs

EXIT_REFUSED: Final = 2
"""The node did not start because of how it was asked to."""

_EXAMPLES: Final = """\
examples:
  octavo serve                                     a node of 4 GiB on the default socket
  octavo serve --memory-bytes 8GiB --nvme-dir /mnt/nvme/octavo --nvme-bytes 500GiB
  octavo serve --config octavo.toml --log-format json
  OCTAVO_MEMORY_BYTES=64GiB octavo serve --http off
  octavo serve --config octavo.toml --print-settings

Every flag is also a key of the TOML file (memory_bytes = "8GiB") and a variable
(OCTAVO_MEMORY_BYTES=8GiB). Flags win over variables, variables over the file.
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)


def main(
    arguments: Sequence[str],
    environ: Mapping[str, str] = os.environ,
    program: str = "octavo serve",
) -> int:
    """Runs a node until SIGTERM or SIGINT; returns the process's exit code."""
    try:
        config, flags, print_only = _parse(arguments, program)
        settings = load_settings(flags, environ, config)
        if print_only:
            print(json.dumps(settings.model_dump(mode="json"), indent=2))
            return 0
        return start(settings)
    except (SettingsError, PlaceError) as error:
        for line in str(error).splitlines():
            print(f"{program}: {line}", file=sys.stderr)
        return EXIT_REFUSED


def start(settings: Settings) -> int:
    """Checks the places that ``settings`` name, then serves.

    Raises:
        PlaceError: one of them cannot be used.
    """
    with ExitStack() as stack:
        make_private_directory(
            settings.listen_unix.parent, allow_open=settings.allow_open_socket_directory
        )
        stack.enter_context(SocketClaim(settings.listen_unix))
        make_writable_directory("state_dir", settings.state_directory)
        if settings.nvme_dir is not None:
            make_writable_directory("nvme_dir", settings.nvme_dir)
        if settings.tcp_address is not None:
            require_free_port("listen_tcp", settings.tcp_address)
        if settings.bulk_address is not None:
            require_free_port("listen_bulk", settings.bulk_address)
        if settings.http_address is not None:
            require_free_port("http", settings.http_address)
        require_memory(settings.memory_bytes)
        configure_logs(settings.log_level, settings.log_format)
        # Late: a refusal above should not wait for gRPC and numpy to load.
        from octavo_server import assembly

        return assembly.serve(settings)


def _parse(arguments: Sequence[str], program: str) -> tuple[Path | None, dict[str, object], bool]:
    parser = _Parser(
        prog=program,
        usage=f"{program} [--config FILE] [--SETTING VALUE ...]",
        description="Run a node until SIGTERM or SIGINT.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument(
        "--print-settings", action="store_true", help="print the settings as JSON and stop"
    )
    for name, field in Settings.model_fields.items():
        is_switch = field.annotation is bool
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            dest=name,
            default=argparse.SUPPRESS,
            nargs="?" if is_switch else None,
            const="true" if is_switch else None,
            metavar="true|false" if is_switch else "VALUE",
            help=(field.description or "") + _default_text(field.default),
        )
    found, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = unknown[0].partition("=")[0].removeprefix("--").replace("-", "_")
        raise SettingsError(f"{unknown[0]} is no setting{suggestion(name, Settings.model_fields)}")
    flags = vars(found)
    config, print_only = flags.pop("config"), flags.pop("print_settings")
    return config, flags, print_only


def _default_text(default: object) -> str:
    if isinstance(default, bool) or default is None or not isinstance(default, (int, float, str)):
        return ""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if isinstance(default, int) and default >= factor and default % factor == 0:
            return f" [{default // factor}{unit}]"
    return f" [{default}]"
