"""A pause of Python's garbage collector while a plan is made.

A full collection visits every object of torch and transformers, which takes a tenth of a second. Planning allocates
fast enough to trigger several, and leaves hardly any cycles to collect.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pause the garbage collector inside the ``with`` block; afterwards it is on only if it was on before."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
