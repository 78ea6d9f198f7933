"""The names of the collectives that the cost model prices."""

from __future__ import annotations

from typing import Literal, get_args

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"]

COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)
