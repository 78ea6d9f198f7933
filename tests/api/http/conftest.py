"""What several tests of the service share: a service in this process, and hostile requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.hostile import Document, baited, traced_document

from api.http.app import create_app
from api.jobs.settings import ServerSettings


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    """Starts the service with the settings that are given, and nobody at work."""
    clients: list[TestClient] = []

    def start_app(**settings: Any) -> TestClient:
        app = create_app(ServerSettings(data_dir=tmp_path, workers=0, **settings))
        clients.append(TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False))
        return clients[-1].__enter__()

    yield start_app
    for client in clients:
        client.__exit__(None, None, None)


@pytest.fixture(scope="module")
def document() -> Document:
    return traced_document()


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with baited(tmp_path_factory.mktemp("bait")) as path:
        yield path
