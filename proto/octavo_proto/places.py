"""Where a node listens when nobody says otherwise: both sides must guess the same."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

SOCKET_NAME: Final = "octavo.sock"

ADDRESS_VARIABLE: Final = "OCTAVO_ADDRESS"
"""Environment variable in which a client finds its node: ``unix:<path>`` or ``host:port``."""


def runtime_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """The user's directory for Octavo's sockets; it may not exist yet.

    ``$XDG_RUNTIME_DIR/octavo``, else ``octavo-<uid>`` below the system's temporary directory.
    The latter is a name that others could take first, so a node checks who owns it.
    """
    base = environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base):
        return Path(base) / "octavo"
    # Not tempfile.gettempdir(): TMPDIR may differ between a node and its workers.
    return Path("/tmp") / f"octavo-{os.geteuid()}"  # noqa: S108  ownership is checked


def default_socket(environ: Mapping[str, str] = os.environ) -> Path:
    """The Unix socket of the user's node."""
    return runtime_directory(environ) / SOCKET_NAME


def user_state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the user's nodes keep what must outlive a reboot; it may not exist yet."""
    base = environ.get("XDG_STATE_HOME")
    if base and os.path.isabs(base):
        return Path(base) / "octavo"
    return Path.home() / ".local" / "state" / "octavo"
