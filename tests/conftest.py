"""What all tests run under: no deadline of hypothesis, and less repeated work of Python and of DTensor.

The tests that ``slow_tests.txt`` lists are marked slow: they take more than 4 s, and others like them are in every run.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings
from support.fast_process import make_fast

# How long one example takes on a shared machine proves nothing.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")

_SLOW = frozenset((Path(__file__).parent / "slow_tests.txt").read_text().splitlines())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid in _SLOW:
            item.add_marker(pytest.mark.slow)
    unknown = _SLOW - {item.nodeid for item in items}
    if unknown and config.args == config.getini("testpaths"):
        raise pytest.UsageError(f"slow_tests.txt lists tests that do not exist: {', '.join(sorted(unknown))}")


def pytest_collection_finish() -> None:
    make_fast()
    gc.freeze()  # what was imported stays
