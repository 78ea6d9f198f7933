"""A process that runs tests faster, with the same results: rarer garbage collection, and DTensor's searches remembered.

For an op on a tensor that is sharded in strides (a view of [batch, seq, hidden] as [batch * seq, hidden] with seq
sharded), DTensor prices redistributions by a search for the cheapest path, and prices every step of it anew in every
search: up to three quarters of the time of a test on a mesh. The steps from a state, and their costs, depend on nothing
but what is the key here, so that every search finds what it would find otherwise.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

from torch.distributed.tensor._redistribute import DTensorRedistributePlanner

_COLLECT_AFTER = 200_000
"""Objects after which Python collects garbage; 700 by default, of which torch and transformers make many a second."""

_next_states = DTensorRedistributePlanner.get_next_state


def make_fast() -> None:
    """Speed up this process; may be called again."""
    gc.set_threshold(_COLLECT_AFTER, 20, 100)
    DTensorRedistributePlanner.get_next_state = _remembered_states


def _remembered_states(self: Any, placements: Any, shard_order: Any) -> Any:
    remembered = self.__dict__.setdefault("_remembered_states", {})
    if not remembered:
        self.cost_function = functools.cache(self.cost_function)
    targets = frozenset(self.strided_shard_placements_in_target), frozenset(self.partial_reduce_ops_in_target)
    key = tuple(placements), shard_order, targets
    if key not in remembered:
        remembered[key] = _next_states(self, placements, shard_order)
    return remembered[key]
