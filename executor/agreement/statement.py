"""``Statement``: what a rank holds of a plan and a module, as text, and the verdict on the statements of all ranks."""

from __future__ import annotations

import hashlib
import importlib.metadata
import itertools
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from planner.imported.torch_shard import Sharder
from planner.plan.fingerprint import model_fingerprint
from planner.plan.sharding_plan import ShardingPlan

_REPORTS = frozenset(
    {"estimate", "solver", "baselines", "verification", "techniques", "model", "cluster", "timings", "notes"}
)
"""Fields of a plan that change nothing about how it runs."""

MOST_SHOWN = 5
"""Most differences of one subject that an error shows."""

Rows = Mapping[str, Mapping[str, str]]
"""Subject ("plan", "module", "call") -> name -> value, as text."""


def rows_of(
    module: nn.Module,
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    *,
    sharders: Mapping[str, Sharder],
    src_data_rank: int | None,
) -> Rows:
    """Return all that must be equal on all ranks; not whether tensors are on meta (`meta_names`)."""
    call = {
        "version of torch": torch.__version__,
        "version of shardplan": _own_version(),
        "device mesh": f"{device_mesh.mesh.tolist()} {device_mesh.mesh_dim_names} {device_mesh.device_type}",
        "src_data_rank": str(src_data_rank),
        "sharders": ", ".join(f"{name}: {type(sharders[name]).__qualname__}" for name in sorted(sharders)) or "none",
    }
    return {"call": call, "plan": _plan_rows(plan), "module": _module_rows(module)}


def meta_names(module: nn.Module) -> list[str]:
    """Return the names of the parameters and buffers that are on meta, and have no values."""
    tensors = itertools.chain(module.named_parameters(), module.named_buffers())
    return [name for name, tensor in tensors if tensor.is_meta]


def digest(value: Any) -> str:
    """Return a hash of JSON values, 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _own_version() -> str:
    try:
        return importlib.metadata.version("shardplan")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _plan_rows(plan: ShardingPlan) -> dict[str, str]:
    rows = {}
    for field, value in plan.to_dict().items():
        if field in _REPORTS:
            continue
        if isinstance(value, dict):
            rows.update({f"{field}[{key!r}]": json.dumps(item, default=str) for key, item in value.items()})
        else:
            rows[field] = json.dumps(value, default=str)
    return rows


def _module_rows(module: nn.Module) -> dict[str, str]:
    rows = {"structure": model_fingerprint(module)}
    for fqn, part in module.named_modules(remove_duplicate=False):
        rows[f"module {fqn!r}"] = type(part).__qualname__
    for fqn, parameter in module.named_parameters(remove_duplicate=False):
        frozen = "" if parameter.requires_grad else ", frozen"
        rows[f"parameter {fqn!r}"] = f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"
    for fqn, buffer in module.named_buffers(remove_duplicate=False):
        rows[f"buffer {fqn!r}"] = f"{tuple(buffer.shape)} {buffer.dtype}"
    return rows


def difference_text(subject: str, rows_by_rank: Mapping[int, Mapping[str, str]]) -> str:
    """Return a phrase with the rows of one subject that differ between ranks, the first few of them."""
    names = list(dict.fromkeys(name for rows in rows_by_rank.values() for name in rows))
    differing = [name for name in names if len({rows.get(name) for rows in rows_by_rank.values()}) > 1]
    if differing[0] == "structure" and len(differing) > 1:
        # The rows behind it say more.
        differing = differing[1:]
    shown = [
        f"{name} is {values_by_rank({rank: rows.get(name, 'absent') for rank, rows in rows_by_rank.items()})}"
        for name in differing[:MOST_SHOWN]
    ]
    more = f"; and {len(differing) - MOST_SHOWN} more" if len(differing) > MOST_SHOWN else ""
    return f"{subject}: {'; '.join(shown)}{more}"


def values_by_rank(values: Mapping[int, str]) -> str:
    """Return "a on rank 0, b on ranks 1, 2"."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in values.items():
        ranks_of.setdefault(value, []).append(rank)
    return ", ".join(f"{value} on {rank_list(ranks)}" for value, ranks in ranks_of.items())


def rank_list(ranks: list[int]) -> str:
    """Return "rank 3", or "ranks 0, 1, 2"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def minority(values: Mapping[int, str]) -> list[int]:
    """Return the ranks whose value is not the most frequent one; of equally frequent ones the first rank's counts."""
    counts: dict[str, int] = {}
    for value in values.values():
        counts[value] = counts.get(value, 0) + 1
    usual = max(counts, key=lambda value: counts[value])
    return [rank for rank, value in values.items() if value != usual]
