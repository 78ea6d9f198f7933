"""Cases that run on every rank of one process group, each reported by its name."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping

import pytest
import torch

Case = Callable[..., None]


def run_cases(cases: Mapping[str, Case], *arguments: object) -> dict[str, str]:
    """Return case -> its traceback, an empty text where it passes. Each case starts from the same seed.

    A case that fails on one rank before a collective makes the other ranks wait: its error then says so.
    """
    failures = {}
    for name, case in cases.items():
        torch.manual_seed(0)
        try:
            case(*arguments)
            failures[name] = ""
        except (Exception, pytest.fail.Exception):  # noqa: BLE001 - reported by the name of the case
            failures[name] = traceback.format_exc()
    return failures


def named(module_cases: Mapping[str, object]) -> dict[str, Case]:
    """Return the functions of a module whose names start with ``case_``, without that start."""
    return {name[5:]: value for name, value in module_cases.items() if name.startswith("case_") and callable(value)}
