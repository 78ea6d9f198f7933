"""What all tests run under: no deadline of hypothesis, and less repeated work of Python and of DTensor."""

from __future__ import annotations

import gc

from hypothesis import settings
from support.fast_process import make_fast

# How long one example takes on a shared machine proves nothing.
settings.register_profile("shared-machine", deadline=None)
settings.load_profile("shared-machine")


def pytest_collection_finish() -> None:
    make_fast()
    gc.freeze()  # what was imported stays
