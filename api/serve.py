"""``shardplan serve``: the service in a server of its own."""

from __future__ import annotations

import fcntl
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import structlog
import uvicorn
from pydantic import ValidationError

from api.app import create_app
from api.logs import configure_logs
from api.settings import ServerSettings
from planner.errors import JobError, PlannerError


class ServeError(PlannerError):
    """The server cannot start: its address or its data directory is taken."""

    title = "The server cannot start"


def serve(options: dict[str, Any]) -> None:
    """Serve until stopped. ``options`` that are None come from the environment, or have their defaults.

    Raises:
        JobError: an option or an environment variable cannot be.
        ServeError: the address or the data directory is in use.
    """
    try:
        settings = ServerSettings(**{name: value for name, value in options.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise JobError(f"{where}: {first['msg']}.", what_to_do="See `shardplan serve --help`.") from error
    configure_logs()
    with _only_server(settings.data_dir), _listening(settings.host, settings.port) as listener:
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        structlog.get_logger().info("listening", url=url, docs=f"{url}/docs", data_dir=str(settings.data_dir))
        config = uvicorn.Config(create_app(settings), log_config=None, access_log=False)
        uvicorn.Server(config).run(sockets=[listener])


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family)
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
