"""Python's collector of cyclic garbage, put off while a plan is made.

A full collection walks every object of torch and transformers, a tenth of a second each, and planning makes objects
fast enough to set off several; hardly any are in cycles, so that there is next to nothing to collect.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no cyclic garbage for as long as this lasts, unless nobody collects any as it is."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
