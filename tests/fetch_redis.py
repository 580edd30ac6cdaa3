"""Gets a redis-server for the tests: ``python tests/fetch_redis.py`` (``make redis``).

One on PATH will do. Otherwise Debian's packages are downloaded and unpacked below ``.cache``,
which needs apt and no root; elsewhere Redis or Valkey has to be installed by hand. Prints where
the server is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from octavo.bench.redis_servers import FETCHED, NoRedisServerError, redis_server_program

ROOT = Path(__file__).resolve().parents[1]
WRAPPER = ROOT / FETCHED
FOLDER = WRAPPER.parents[1]
PACKAGES = ("redis-server", "redis-tools", "libjemalloc2", "liblzf1", "libatomic1")


def find_redis_server() -> str:
    """A server on PATH, or the one that was fetched.

    Raises:
        NoRedisServerError: there is neither.
    """
    return redis_server_program(checkout=ROOT)


def fetch() -> None:
    """Raises subprocess.CalledProcessError or FileNotFoundError if that fails."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    lists, archives = FOLDER / "lists", FOLDER / "archives"
    for folder in (lists / "partial", archives / "partial"):
        folder.mkdir(parents=True)
    # Lists of our own: whoever is not root cannot renew the system's, and they may be absent.
    apt = [
        "apt-get",
        "-qq",
        "-o",
        "APT::Sandbox::User=root",
        "-o",
        f"Dir::State::Lists={lists}",
        "-o",
        f"Dir::Cache={archives}",
    ]
    run([*apt, "update"])
    run([*apt, "download", *PACKAGES], archives)
    root = FOLDER / "root"
    for package in sorted(archives.glob("*.deb")):
        run(["dpkg-deb", "-x", str(package), str(root)])
    libraries = sorted({str(path.parent) for path in (root / "usr/lib").glob("*/*.so.*")})
    WRAPPER.parent.mkdir()
    WRAPPER.write_text(
        "#!/bin/sh\n"
        f'LD_LIBRARY_PATH="{":".join(libraries)}" exec "{root}/usr/bin/redis-server" "$@"\n'
    )
    WRAPPER.chmod(0o755)
    run([str(WRAPPER), "--version"])
    shutil.rmtree(lists)
    shutil.rmtree(archives)


def run(arguments: list[str], folder: Path | None = None) -> None:
    subprocess.run(
        arguments,
        check=True,
        cwd=folder,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        timeout=300,
    )


if __name__ == "__main__":
    try:
        find_redis_server()
    except NoRedisServerError:
        try:
            fetch()
        except (OSError, subprocess.SubprocessError) as error:
            shutil.rmtree(FOLDER, ignore_errors=True)
            sys.exit(f"No redis-server on PATH, and none could be fetched ({error}): install one.")
    print(find_redis_server())
