"""`selected`: the cases of a file's tests that this run has selected, for a fixture that runs all of them at once."""

from __future__ import annotations

import pytest


def selected(request: pytest.FixtureRequest, argument: str) -> list[str]:
    """Return the values of ``argument`` in the selected tests of the fixture's file, each once, in order."""
    values = [
        item.callspec.params[argument]
        for item in request.session.items
        if item.path == request.path and isinstance(item, pytest.Function) and hasattr(item, "callspec")
        if argument in item.callspec.params
    ]
    return list(dict.fromkeys(values))
