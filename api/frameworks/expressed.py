"""`Row`: what the configuration or script of a framework says of one aspect of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Outcome = Literal["expressed", "approximated", "lost"]

FSDP_GROUPS = "fsdp groups"
"""The field of rows on what is gathered together, and when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Whether one aspect of a plan is expressed, approximated or lost, and how."""

    field: str
    outcome: Outcome
    detail: str
