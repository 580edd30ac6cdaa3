"""``octavo serve``: hands its arguments to the node."""

from __future__ import annotations

from collections.abc import Sequence

from octavo.cli.extras import need_extra


def serve(arguments: Sequence[str]) -> int:
    """Runs a node until SIGTERM or SIGINT and returns its exit code.

    Raises:
        CommandError: the server's packages are not installed.
    """
    with need_extra("server"):
        from octavo_server.start import main
    return main(arguments)
