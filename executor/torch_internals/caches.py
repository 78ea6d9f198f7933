"""Torch's own caches that grow with each new shape and are never emptied. Checked with torch 2.13."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache


def empty_caches_of_shapes() -> None:
    """Empty what torch remembers of the shapes and layouts of ops that have run: a process that plans all day grows."""
    FakeTensorMode.cache_clear()
    _clear_sharding_prop_cache()
    _gen_transform_infos.cache_clear()
    clear_redistribute_planner_cache()
