"""Former names of public fields, which documents, requests, keywords and command lines may still use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

FORMER_NAMES: Mapping[str, str] = {
    "even_order": "zigzag",
    "fused": "fused_ops",
    "packed": "fused_projections",
    "regather": "reallgather",
    "tensor_overlap": "async_tp",
    "vary_blocks": "heterogeneous_blocks",
}
"""Former name -> current name: of job fields, plan fields, port fields, HTTP fields and keywords."""

P = ParamSpec("P")
R = TypeVar("R")


def with_current_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with each former name replaced by the current one.

    Raises:
        ValueError: a value is given under both names.
    """
    current: dict[str, Any] = {}
    for name, value in values.items():
        key = FORMER_NAMES.get(name, name)
        if key in current:
            raise ValueError(f"{key} is given twice, once under its former name. Give {key} alone.")
        current[key] = value
    return current


def accepts_former_names(function: Callable[P, R]) -> Callable[P, R]:
    """Return ``function`` such that callers may use former names of its keywords."""

    @functools.wraps(function)
    def with_current_keywords(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **with_current_names(kwargs))

    return with_current_keywords
