"""``shardplan serve``: the HTTP application in a uvicorn server."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import structlog
import uvicorn
from fastapi import FastAPI

from api.http.app import create_app
from api.http.connection import Connection
from api.http.work.pool import FUNCTION
from api.jobs.housekeeping import share_memory
from api.jobs.logs import configure_logs
from api.jobs.settings import ServerSettings, read_settings
from api.jobs.solver_process import preload
from api.jobs.startup import make_folder, open_database
from api.jobs.tokens import TokenStore
from planner.errors import PlannerError

_GRACE_S = 8
_STOP_S = 13.0
"""Seconds after a stop signal at which the process ends, whatever hangs: a database that answers nothing, a job."""
_KEEP_ALIVE_S = 75
"""Seconds that idle connections stay open: longer than clients keep them, so that no client reuses a closed one."""


class ServeError(PlannerError):
    """The server cannot start: its address or data directory is in use, or anybody could use it without a token."""

    title = "The server cannot start"


def serve(options: dict[str, Any]) -> None:
    """Serve until SIGTERM or SIGINT. ``options`` that are None are read as `read_settings` does.

    Raises:
        JobError: an option, an environment variable or the settings file is invalid, or the database cannot be used.
        ServeError: the address or the data directory is in use, or other machines reach the address and no token
            exists.
    """
    settings = read_settings(options)
    configure_logs()
    share_memory()
    preload(FUNCTION.partition(":")[0])
    alone = nullcontext() if settings.database_url is not None else _only_server(settings.data_dir)
    with alone, _listening(settings.host, settings.port) as listener:
        _check_database(settings)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        structlog.get_logger().info("listening", url=url, docs=f"{url}/docs", data_dir=str(settings.data_dir))
        # After a graceful shutdown uvicorn raises the stop signal again. Then exit with 0, since nothing failed.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: sys.exit(0))
        app = create_app(settings)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            http=Connection,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        _Server(config, app).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A uvicorn server that ends the open event streams when it stops, and the process where that takes too long."""

    def __init__(self, config: uvicorn.Config, app: FastAPI) -> None:
        super().__init__(config)
        self._app = app
        self._last_resort = threading.Thread(target=_end_process, name="shardplan-last-resort", daemon=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        service = getattr(self._app.state, "service", None)
        if service is not None:
            service.stopping.set()
        if self._last_resort.ident is None:
            self._last_resort.start()
        super().handle_exit(sig, frame)


def _end_process() -> None:
    time.sleep(_STOP_S)
    structlog.get_logger().error("not stopped in time", seconds=_STOP_S)
    os._exit(1)


def _check_database(settings: ServerSettings) -> None:
    """Raise a `JobError` if the database cannot be used, a `ServeError` if others can reach a server without tokens."""
    database = open_database(settings)
    try:
        if settings.host == "localhost" or _is_loopback(settings.host) or TokenStore(database).any():
            return
    finally:
        database.close()
    detail = f"{settings.host} can be reached by others, and there are no API tokens."
    advice = "Make one with `shardplan token create NAME --scope plan`, or set SHARDPLAN_FIRST_TOKEN_FILE."
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
    """Lock the data directory during the block: a second server would requeue this server's running jobs."""
    make_folder(data_dir)
    file = data_dir / "lock"
    try:
        lock = os.fdopen(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600), "w")
    except OSError as error:
        advice = "Give another --data-dir, or the right to write there."
        raise ServeError(f"{file} cannot be written: {error.strerror}.", what_to_do=advice) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            detail = f"another server works on {data_dir}."
            raise ServeError(detail, what_to_do="Stop it, or give another --data-dir.") from error
        yield
