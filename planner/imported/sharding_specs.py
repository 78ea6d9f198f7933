"""Plans of ``torch.distributed._shard``: their `ChunkShardingSpec`s become layouts, their Sharders names.

torch's lookups in sharded embeddings take the indices of each rank's own batch, and return the results of that batch.
Their converted plans do the same: indices are gathered, and results scattered again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from cost_model.layouts.layout import Layout
from planner.errors import PlanLayoutError, PlanTypeError
from planner.imported.imported_plan import ImportedPlan, job_of, unused_name
from planner.imported.torch_shard import ChunkShardingSpec, Sharder
from planner.imported.torch_shard import ShardingPlan as TorchShardingPlan
from planner.plan.mesh import UNSTATED, PlanMesh
from planner.plan.ports import Port, as_layout, input_key, is_layout
from planner.plan.sharding_plan import ShardingPlan

_PLAN_TYPES = "Give a ChunkShardingSpec, a layout or a Sharder."
_OUTPUT_TYPES = "Give a ChunkShardingSpec or a layout."


def is_foreign(plan: object) -> bool:
    """Return whether ``plan`` is torch's, or one of ours that names no mesh or holds values of torch."""
    if isinstance(plan, TorchShardingPlan):
        return True
    return isinstance(plan, ShardingPlan) and (plan.mesh == UNSTATED or any(True for _ in _foreign_values(plan)))


def _foreign_values(plan: Any) -> Iterator[Any]:
    for entries in (plan.plan, plan.output_plan):
        if isinstance(entries, Mapping):
            yield from (value for value in entries.values() if isinstance(value, (ChunkShardingSpec, Sharder)))


def check_ranks(plan: Any) -> None:
    """Check that the specs of ``plan`` agree on their ranks.

    Raises:
        PlanLayoutError: two specs name different ranks, or one rank has several chunks.
    """
    first: tuple[int, ...] | None = None
    for field in ("plan", "output_plan"):
        for key, spec in (getattr(plan, field) or {}).items():
            if not isinstance(spec, ChunkShardingSpec):
                continue
            ranks = _ranks(spec)
            if first is not None and ranks != first:
                raise _wrong_ranks(field, key, f"{list(ranks)}, but other entries name {list(first)}")
            if len(set(ranks)) < len(ranks):
                raise _wrong_ranks(field, key, f"{list(ranks)}, one of them twice")
            first = ranks


def spec_device(plan: Any) -> str | None:
    """Return the device type of the first chunk of the first spec in ``plan``; None where it has no spec."""
    specs = (spec for spec in _foreign_values(plan) if isinstance(spec, ChunkShardingSpec))
    return next((spec.placements[0].device().type for spec in specs), None)  # type: ignore[union-attr]


def _ranks(spec: ChunkShardingSpec) -> tuple[int, ...]:
    return tuple(placement.rank() for placement in spec.placements)  # type: ignore[union-attr]


def _wrong_ranks(field: str, key: str, detail: str) -> PlanLayoutError:
    return PlanLayoutError(
        f"{field} places {key!r} on the ranks {detail}.",
        field=field,
        key=key,
        what_to_do="In every spec, name each rank of the process group once, in the order of the group.",
    )


def plan_from_specs(module: nn.Module, plan: Any, *, mesh: PlanMesh, ranks: Sequence[int] | None) -> ImportedPlan:
    """Return ``plan`` converted for ``module``, which is only read.

    Args:
        module: the module that the plan is for.
        plan: torch's ``ShardingPlan``, or one of ours with torch's values.
        mesh: the mesh to run on.
        ranks: the global ranks along the only axis of ``mesh``; None: it has several axes.

    Raises:
        PlanTypeError: a value that is neither torch's nor ours.
        PlanLayoutError: a spec for other ranks, or a layout for another number of axes.
    """
    if not isinstance(plan, ShardingPlan):
        plan = ShardingPlan(plan.plan, plan.output_plan, plan.return_local_tensor)
    convert = _Conversion(mesh, ranks)
    entries, sharders = convert.plan(plan.plan)
    inputs, outputs = convert.lookups(module, plan)
    given = {key: convert.output(key, spec) for key, spec in plan.output_plan.items()}
    fields: dict[str, Any] = {
        "plan": entries,
        "mesh": mesh,
        "input_plan": {**inputs, **plan.input_plan},
        "output_plan": {**outputs, **given},
    }
    if plan.mesh == UNSTATED:
        fields["job"] = job_of(module)
    return ImportedPlan(plan=dataclasses.replace(plan, **fields), sharders=sharders)


class _Conversion:
    """Converts the values of a plan for one mesh."""

    def __init__(self, mesh: PlanMesh, ranks: Sequence[int] | None) -> None:
        self._mesh = mesh
        self._ranks = None if ranks is None else tuple(ranks)

    def plan(self, entries: Mapping[str, Any]) -> tuple[dict[str, Layout | str], dict[str, Sharder]]:
        """Return the plan's entries, and name -> Sharder."""
        converted: dict[str, Layout | str] = {}
        sharders: dict[str, Sharder] = {}
        names: dict[int, str] = {}
        for key, value in entries.items():
            if isinstance(value, Sharder):
                name = names.setdefault(id(value), unused_name(type(value).__name__, sharders))
                sharders[name] = value
                converted[key] = name
            elif isinstance(value, str) or is_layout(value):
                converted[key] = value
            else:
                converted[key] = self._layout("plan", key, value, _PLAN_TYPES)
        return converted, sharders

    def output(self, key: str, value: Any) -> Any:
        """Return the port, or ports, of ``value`` in the output plan."""
        if isinstance(value, (Port, Mapping, tuple)):
            return value
        return Port(layout=self._layout("output_plan", key, value, _OUTPUT_TYPES))

    def _layout(self, field: str, key: str, value: Any, advice: str) -> Layout:
        if not isinstance(value, ChunkShardingSpec):
            raise PlanTypeError(
                f"{field} has {type(value).__name__} for {key!r}, which is neither a sharding nor a Sharder.",
                field=field,
                key=key,
                what_to_do=advice,
            )
        if self._ranks is None:
            raise PlanLayoutError(
                f"{field} has a ChunkShardingSpec for {key!r}, but the mesh {self._mesh} has several axes.",
                field=field,
                key=key,
                what_to_do="Give a layout, one placement per mesh axis.",
            )
        if _ranks(value) != self._ranks:
            detail = f"{list(_ranks(value))}, but the mesh or the process group has the ranks {list(self._ranks)}"
            raise _wrong_ranks(field, key, detail)
        dim = int(value.dim)
        return as_layout(Shard(dim))  # type: ignore[return-value]

    def lookups(self, module: nn.Module, plan: ShardingPlan) -> tuple[dict[str, Port], dict[str, Port]]:
        """Return the ports of the inputs and outputs of embeddings whose table is sharded by a spec."""
        inputs: dict[str, Port] = {}
        outputs: dict[str, Port] = {}
        for key, value in plan.plan.items():
            fqn, _, attribute = key.rpartition(".")
            owner = dict(module.named_modules()).get(fqn)
            if not isinstance(value, ChunkShardingSpec) or attribute != "weight":
                continue
            if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
                # A bag's indices have two dims: [batch, bag]. One dim, which needs offsets, is refused here.
                batch = Shard(0) if isinstance(owner, nn.Embedding) else Shard(-2)
                inputs[input_key(fqn)] = Port(layout=(Replicate(),), from_local=(batch,))
                outputs[fqn] = Port(layout=(Shard(0),), to_local=True)
        return inputs, outputs
