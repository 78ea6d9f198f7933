"""``shardplan serve``: the service in a server of its own."""

from __future__ import annotations

import fcntl
import ipaddress
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from api.http.app import create_app
from api.jobs.database import Database
from api.jobs.logs import configure_logs
from api.jobs.settings import ServerSettings, read_settings
from api.jobs.tokens import TokenStore
from planner.errors import PlannerError

_GRACE_S = 10
_KEEP_ALIVE_S = 75
"""Longer than clients keep idle connections, so that none is closed while a client that waits is about to reuse it."""


class ServeError(PlannerError):
    """The server cannot start: its address or its data directory is taken, or anybody could use it."""

    title = "The server cannot start"


def serve(options: dict[str, Any]) -> None:
    """Serve until stopped. ``options`` that are None come from the environment, or have their defaults.

    Raises:
        JobError: an option or an environment variable cannot be.
        ServeError: the address or the data directory is in use, or is open to others while there are no tokens.
    """
    settings = read_settings(options)
    configure_logs()
    alone = nullcontext() if settings.database_url is not None else _only_server(settings.data_dir)
    with alone, _listening(settings.host, settings.port) as listener:
        _check_open(settings)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        structlog.get_logger().info("listening", url=url, docs=f"{url}/docs", data_dir=str(settings.data_dir))
        # uvicorn stops in good order, then raises the signal that stopped it again: that is no failure.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        _Server(config, app).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Tells the open event streams that the server stops, so that it need not wait for them."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.stopping.set()
        super().handle_exit(sig, frame)


def _check_open(settings: ServerSettings) -> None:
    """Refuse an address that others reach while nobody needs a token."""
    if settings.host == "localhost" or _is_loopback(settings.host):
        return
    database = Database(settings.url)
    try:
        database.migrate()
        if TokenStore(database).any():
            return
    finally:
        database.close()
    detail = f"{settings.host} can be reached by others, and there are no API tokens."
    advice = "Make one with `shardplan token create NAME --scope plan`, or listen on 127.0.0.1."
    raise ServeError(detail, what_to_do=advice)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        advice = "Give another --host or --port; --port 0 takes a free one."
        raise ServeError(f"cannot listen on {host}, port {port}: {error.strerror}.", what_to_do=advice) from error
    with listener:
        yield listener


@contextmanager
def _only_server(data_dir: Path) -> Iterator[None]:
    """Hold the data directory: a second server would take this one's running jobs for interrupted ones."""
    data_dir.mkdir(parents=True, exist_ok=True)
    with (data_dir / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            detail = f"another server works on {data_dir}."
            raise ServeError(detail, what_to_do="Stop it, or give another --data-dir.") from error
        yield
