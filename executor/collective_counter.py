"""Counting the collectives that really run, whoever runs them: by kind, mesh axis, phase and bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from cost_model.hardware.collective_kinds import CollectiveKind
from executor.torch_internals import collective_of, flattened_groups, is_communication
from planner.plan.estimate import Phase

UNKNOWN_AXIS = "?"
"""Stands for process groups that are no axis of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Row:
    """All collectives that agree in these: ``bytes`` is of one call, the full buffer as nccl-tests counts it."""

    phase: Phase
    kind: CollectiveKind
    axis: str
    bytes: int


Counts = Counter[Row]


def axes_by_group(device_mesh: DeviceMesh) -> dict[str, str]:
    """Return name of the process group -> axis, for this rank's groups; the axes must be named.

    Axes that are taken as one are joined by commas, as estimates name them.
    """
    names = device_mesh.mesh_dim_names
    assert names is not None, "a planned mesh has names"
    found = {group: ",".join(axes) for axes, group in flattened_groups(device_mesh).items()}
    return found | {str(device_mesh.get_group(axis).group_name): name for axis, name in enumerate(names)}


class CollectiveCounter(TorchDispatchMode):
    """While entered, counts collectives; those that DTensor runs by itself too."""

    def __init__(self, axes: Mapping[str, str], phase: Callable[[], Phase]) -> None:
        """Count by the axes that process groups belong to, and by what ``phase`` says at the time of a call."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counter()
        self._axes = axes
        self._phase = phase

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor takes the call apart, and calls again with local tensors: only those show what it communicates.
            return NotImplemented
        if is_communication(func):
            kind, nbytes, group = collective_of(func, args)
            axis = self._axes.get(group, UNKNOWN_AXIS)
            self.counts[Row(phase=self._phase(), kind=kind, axis=axis, bytes=nbytes)] += 1
        return func(*args, **(kwargs or {}))
