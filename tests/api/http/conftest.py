"""What the tests of hostile requests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.hostile import Document, baited, traced_document


@pytest.fixture(scope="module")
def document() -> Document:
    return traced_document()


@pytest.fixture(scope="module")
def bait(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with baited(tmp_path_factory.mktemp("bait")) as path:
        yield path
