"""Counts of the collectives that really run, including those that DTensor adds, by kind, mesh axis, phase and bytes."""

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
from executor.torch_internals.dtensor import collective_of, flattened_groups, is_communication
from planner.model_rewrites.assumed_values import AssumedNumbers
from planner.plan.estimate import Phase

UNKNOWN_AXIS = "?"
"""Axis name of collectives whose process group belongs to no axis of the mesh."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class CollectiveKey:
    """Collectives with equal keys are counted together. ``bytes`` is the full buffer of one call, as in nccl-tests."""

    phase: Phase
    kind: CollectiveKind
    axis: str
    bytes: int


Counts = Counter[CollectiveKey]


def axes_by_group(device_mesh: DeviceMesh) -> dict[str, str]:
    """Return {process-group name: mesh axis name} for this rank's groups. The axes of the mesh must have names.

    A group of several axes that torch has flattened into one maps to their names joined by commas ("dp,tp"), as in
    estimates.
    """
    names = device_mesh.mesh_dim_names
    assert names is not None, "a planned mesh has names"
    flattened = {group: ",".join(axes) for axes, group in flattened_groups(device_mesh).items()}
    return flattened | {str(device_mesh.get_group(axis).group_name): name for axis, name in enumerate(names)}


class CollectiveCounter(TorchDispatchMode):
    """A dispatch mode that counts the collectives inside its ``with`` block in ``counts``.

    A number that Python reads there, on the meta device, is an assumed one.

    ``random_ops`` is the number of ops that draw random numbers.
    ``last_op`` is the op that was dispatched last, with its positional arguments; None before the first.
    """

    def __init__(self, axes: Mapping[str, str], phase: Callable[[], Phase]) -> None:
        """Start with no collectives.

        Args:
            axes: name of a process group -> name of its mesh axis.
            phase: returns the phase of the step that is running.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counts = Counter()
        self.random_ops = 0
        self.last_op: tuple[Any, tuple[Any, ...]] | None = None
        self._axes = axes
        self._phase = phase
        self._numbers = AssumedNumbers()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.last_op = (func, args)
        if any(issubclass(kind, DTensor) for kind in types):
            # DTensor dispatches again with local tensors, and only those calls are collectives.
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return self._numbers.next(args[0].dtype)
        self.random_ops += torch.Tag.nondeterministic_seeded in func.tags
        if is_communication(func):
            kind, nbytes, group = collective_of(func, args)
            axis = self._axes.get(group, UNKNOWN_AXIS)
            self.counts[CollectiveKey(phase=self._phase(), kind=kind, axis=axis, bytes=nbytes)] += 1
        return func(*args, **(kwargs or {}))
