"""A real PostgreSQL in a folder of its own, for as long as a test needs it."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

_USUAL = "/usr/lib/postgresql/*/bin"
_FAST = ["fsync=off", "full_page_writes=off", "max_connections=200", "listen_addresses=127.0.0.1"]


@dataclass(frozen=True)
class PostgreSQL:
    """A running server; ``url`` is that of a database of nobody else's."""

    process: subprocess.Popen[bytes]
    folder: Path
    port: int

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    def create(self, database: str) -> str:
        """Make an empty database; return its URL."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{database}"')  # type: ignore[call-overload]
        return self.url(database)

    def cut_connections(self, database: str) -> int:
        """End every connection to a database but this one; return how many those were."""
        with psycopg.connect(self.url(), autocommit=True) as connection:
            cut = connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s", (database,)
            )
            return len(cut.fetchall())

    def stop(self) -> None:
        self.process.send_signal(signal.SIGINT)
        self.process.wait(timeout=60)
        shutil.rmtree(self.folder, ignore_errors=True)


def find_binaries() -> Path | None:
    """Return the folder with initdb and postgres, or None."""
    found = shutil.which("initdb")
    folders = sorted(Path("/").glob(_USUAL[1:]))
    return Path(found).parent if found else (folders[-1] if folders else None)


def start_postgresql() -> PostgreSQL:
    """Return a server that answers; skips the test where PostgreSQL is not on this machine."""
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is not installed here (Debian: apt-get install postgresql)")
    folder = Path(tempfile.mkdtemp(prefix="shardplan-pg-"))
    account = {}
    if os.geteuid() == 0:  # the server refuses to be root
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        account = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}
    data = folder / "data"
    subprocess.run(
        [binaries / "initdb", "-D", data, "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8"],
        check=True,
        capture_output=True,
        cwd=folder,
        **account,  # type: ignore[arg-type]
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = [part for option in _FAST for part in ("-c", option)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [binaries / "postgres", "-D", data, "-p", str(port), "-k", folder, *options],
            stderr=log,
            cwd=folder,
            **account,  # type: ignore[arg-type]
        )
    server = PostgreSQL(process, folder, port)
    pause = threading.Event()
    for _ in range(300):
        try:
            psycopg.connect(server.url()).close()
        except psycopg.OperationalError:
            pause.wait(0.1)
        else:
            return server
    server.stop()
    raise AssertionError("PostgreSQL did not start")
