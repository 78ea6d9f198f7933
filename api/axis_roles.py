"""What each mesh axis does in a plan, in the field's words (FSDP, TP, SP, DP), read off its layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cost_model.layout import Layout, sharded_dim
from planner.patterns import match_keys
from planner.plan import ShardingPlan
from planner.ports import ports_of

_BATCH_DIM, _SEQUENCE_DIM = 0, 1
_ROOT_INPUT = ("", "input")


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisRole:
    """One axis: ``role`` is short ("FSDP", "TP+SP"), ``details`` say what was seen, one clause each."""

    axis: str
    size: int
    role: str
    details: tuple[str, ...]


def axis_roles(plan: ShardingPlan) -> tuple[AxisRole, ...]:
    """Return the role of each axis of the plan's mesh, outermost first."""
    return tuple(_role(plan, index, axis, size) for index, (axis, size) in enumerate(plan.mesh.axes))


def _role(plan: ShardingPlan, index: int, axis: str, size: int) -> AxisRole:
    gathered, split, whole = _parameters(plan, index)
    inputs = set(_boundary_dims(plan, index, root=True))
    inner = set(_boundary_dims(plan, index, root=False))
    splits_batch = _BATCH_DIM in inputs or (not inputs and _BATCH_DIM in inner)
    splits_sequence = _SEQUENCE_DIM in inner | inputs

    words, details = [], []
    if gathered:
        words.append("FSDP" if splits_batch or splits_sequence else "sharded storage")
        details.append(f"{_count(gathered)} stored in pieces and gathered for use")
    elif splits_batch and whole:
        words.append("DP")
    if split:
        words.append("TP")
        details.append(f"{_count(split)} stored and used in pieces")
    if splits_sequence:
        words.append("SP" if split else "CP")
        details.append("sequences split")
    if splits_batch:
        details.append("batch split")
    if whole:
        details.append(f"{_count(whole)} whole on each rank")
    return AxisRole(axis=axis, size=size, role="+".join(words) or "replicated", details=tuple(details))


def _parameters(plan: ShardingPlan, index: int) -> tuple[int, int, int]:
    """Return how many entries are stored split but used whole, stored and used split, and stored whole on this axis."""
    gathered = split = whole = 0
    for key, stored in plan.plan.items():
        if isinstance(stored, str):
            continue
        wider = [pattern for pattern, names in match_keys(plan.compute_plan, [key]).items() if names]
        used: Layout = plan.compute_plan[wider[0]] if wider else stored
        if sharded_dim(stored[index]) is None:
            whole += 1
        elif sharded_dim(used[index]) is None:
            gathered += 1
        else:
            split += 1
    return gathered, split, whole


def _boundary_dims(plan: ShardingPlan, index: int, *, root: bool) -> Iterator[int]:
    """Yield the dims that tensors at module boundaries (the root's inputs, or all others) are split by on this axis."""
    for entries in (plan.input_plan, plan.output_plan):
        for key, spec in entries.items():
            if (entries is plan.input_plan and key in _ROOT_INPUT) == root:
                for _, port in ports_of(spec):
                    dim = sharded_dim(port.layout[index])
                    if dim is not None:
                        yield dim


def _count(entries: int) -> str:
    return "1 parameter entry" if entries == 1 else f"{entries} parameter entries"
