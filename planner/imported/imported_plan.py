"""``ImportedPlan``: a converted plan, with the user's objects that a plan cannot hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from planner.plan.job import Job
from planner.plan.sharding_plan import ShardingPlan

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedPlan:
    """A plan that was written for another library, converted.

    Attributes:
        plan: what runs; it can be saved.
        sharders: name in the plan -> the object that shards the modules with that name itself. A file holds the name
            only, so the objects are passed again with a plan that was loaded.
        unmatched: keys that match no module, where the other library skips them.
    """

    plan: ShardingPlan
    sharders: Mapping[str, Any] = field(default_factory=dict)
    unmatched: tuple[str, ...] = ()


def job_of(module: nn.Module) -> Job:
    """Return the job of a plan whose library casts nothing: it computes in the dtype of the module's parameters."""
    dtypes = {parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()}
    dtype = _DTYPES.get(next(iter(dtypes)), "fp32") if len(dtypes) == 1 else "fp32"
    return Job(dtype=dtype)


def unused_name(name: str, taken: Mapping[str, Any]) -> str:
    """Return ``name``, with a number behind it if it is taken."""
    if name not in taken:
        return name
    return next(text for index in range(2, len(taken) + 3) if (text := f"{name}_{index}") not in taken)
