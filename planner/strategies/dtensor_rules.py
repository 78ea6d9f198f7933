"""What DTensor itself does with one op: the one file that touches its private rules.

A strategy is not taken from a table. The op is run, forward and backward, on DTensors whose local tensors live on the
meta device, over a mesh without process groups: no data, no communication, no GPU. A collective has nowhere to go on
such a mesh and raises, so whatever comes through is what DTensor runs without one, with the layouts that it really
gives the outputs and the gradients.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._ops import utils as dtensor_op_utils
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from cost_model.layout import Layout, divides, local_shape
from planner.errors import UnsupportedTorchError
from planner.graph import Op, Value
from planner.regions import fill, op_signature

SUPPORTED_TORCH = ((2, 13), (2, 14))
"""From the first, up to and without the second: DTensor's rules are private and change between releases."""

Layouts = tuple[Layout | None, ...]
"""One layout per tensor of an op; None for plain tensors, and for gradients that do not exist."""


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch outside the supported range.

    Raises:
        UnsupportedTorchError: naming the version found and the range.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED_TORCH
    if not low <= found < high:
        raise UnsupportedTorchError(
            f"shardplan needs torch>={low[0]}.{low[1]},<{high[0]}.{high[1]} and found {version}.",
            what_to_do=f'Install it with: pip install "torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}".',
        )


def mesh_without_groups(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of ``shape``, seen from rank 0, on which no collective can run."""
    names = tuple(f"axis{i}" for i in range(len(shape)))
    ranks = torch.arange(math.prod(shape)).view(*shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what DTensor logs of the layouts that it refuses. (For many attempts at once: it takes a millisecond.)"""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _free_or_not(current: Any, target: Any) -> float:
    """Return 0 where DTensor's own `redistribute_cost` is 0 (nothing to communicate), else more than 0.

    DTensor picks the first of the cheapest strategies. Which of them are free is all that matters here, and its own
    formula spends most of its time on pricing the others. Strided shards, of which it has its own idea, are left to it.
    """
    if any(isinstance(placement, _StridedShard) for placement in (*current.placements, *target.placements)):
        return redistribute_cost(current, target)
    if current.is_replicated() or (
        current.placements == target.placements and current.shard_order == target.shard_order
    ):
        return 0.0
    for axis, (before, after) in enumerate(zip(current.placements, target.placements, strict=True)):
        splits_inside = after.is_shard() and any(placement == after for placement in target.placements[axis + 1 :])
        if before != after and (not before.is_replicate() or splits_inside):
            return 1.0
    return 0.0


def functional_target(target: Any) -> Any:
    """Return the out-of-place variant of an in-place aten op (``add_`` -> ``add``), other targets as they are."""
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return target
    packet = target._overloadpacket
    name = packet.__name__
    if not name.endswith("_") or name.endswith("__"):
        return target
    functional = getattr(torch.ops.aten, name[:-1], None)
    return getattr(functional, target._overloadname, target) if functional is not None else target


class DTensorRules:
    """DTensor's behaviour on one mesh shape, op by op; every answer is remembered."""

    def __init__(self, mesh_shape: Sequence[int]) -> None:
        check_torch_version()
        self.mesh_shape = tuple(mesh_shape)
        self._mesh = mesh_without_groups(mesh_shape)
        self._forward: dict[Hashable, Layouts | None] = {}
        self._backward: dict[Hashable, Layouts | None] = {}

    def forward(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> Layouts | None:
        """Return the layouts of the op's outputs, or None where DTensor would communicate or refuses.

        Args:
            op: the op.
            inputs: its input values, global shapes.
            layouts: one per input; None for a plain tensor.
        """
        key = (op_signature(op, tuple(inputs)), layouts)
        if key not in self._forward:
            self._forward[key] = self._attempt(op, inputs, layouts, None)
        return self._forward[key]

    def backward(self, op: Op, inputs: Sequence[Value], layouts: Layouts, output_gradients: Layouts) -> Layouts | None:
        """Return the layouts of the gradients of the op's inputs, or None where DTensor would communicate or refuses.

        Args:
            output_gradients: one per output; None where no gradient arrives.
        """
        key = (op_signature(op, tuple(inputs)), layouts, output_gradients)
        if key not in self._backward:
            self._backward[key] = self._attempt(op, inputs, layouts, output_gradients)
        return self._backward[key]

    def _attempt(self, op: Op, inputs: Sequence[Value], layouts: Layouts, gradients: Layouts | None) -> Layouts | None:
        for value, layout in zip(inputs, layouts, strict=True):
            if layout is not None and not divides(value.shape, layout, self.mesh_shape):
                return None
        try:
            with implicit_replication(), mock.patch.object(dtensor_op_utils, "redistribute_cost", _free_or_not):
                return self._run(op, inputs, layouts, gradients)
        except (
            RuntimeError,
            AttributeError,
            ValueError,
            NotImplementedError,
            IndexError,
            AssertionError,
            TypeError,
            KeyError,
        ):
            # DTensor has no one error for "I cannot": whatever it raises means that this layout is not a strategy.
            return None

    def _run(self, op: Op, inputs: Sequence[Value], layouts: Layouts, gradients: Layouts | None) -> Layouts | None:
        tensors = [
            self._tensor(value, layout, gradients is not None) for value, layout in zip(inputs, layouts, strict=True)
        ]
        results = [
            result
            for result in pytree.tree_leaves(run_op(op, tensors, functional=True))
            if isinstance(result, torch.Tensor)
        ]
        outputs = [result for result in results if isinstance(result, DTensor)]
        if len(outputs) < len(results):
            return None
        if gradients is None:
            return tuple(tuple(result.placements) for result in outputs)
        pairs = [
            (result, layout)
            for result, layout in zip(outputs, gradients, strict=True)
            if layout is not None and result.requires_grad
        ]
        wanted = [tensor for tensor, value in zip(tensors, inputs, strict=True) if value.requires_grad]
        arriving = [self._like(result, layout) for result, layout in pairs]
        found = iter(torch.autograd.grad([result for result, _ in pairs], wanted, arriving, allow_unused=True))
        return tuple(self._layout_of(next(found)) if value.requires_grad else None for value in inputs)

    @staticmethod
    def _layout_of(gradient: torch.Tensor | None) -> Layout | None:
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise RuntimeError("the gradient of a DTensor came out as a plain tensor")
        return tuple(gradient.placements)

    def _tensor(self, value: Value, layout: Layout | None, differentiable: bool) -> torch.Tensor:
        if layout is None:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        local = torch.empty(local_shape(value.shape, layout, self.mesh_shape), dtype=value.dtype, device="meta")
        tensor = DTensor.from_local(local, self._mesh, layout, run_check=False)
        return tensor.requires_grad_() if differentiable and value.requires_grad else tensor

    def _like(self, result: DTensor, layout: Layout) -> DTensor:
        local = torch.empty(
            local_shape(tuple(result.shape), layout, self.mesh_shape), dtype=result.dtype, device="meta"
        )
        return DTensor.from_local(local, self._mesh, layout, run_check=False)


def run_op(op: Op, tensors: list[torch.Tensor], *, functional: bool = False) -> Any:
    """Run ``op`` on ``tensors``, which stand for its inputs in order."""
    args, kwargs = fill((op.args, dict(op.kwargs)), list(tensors))
    kwargs = _on_meta(kwargs)
    target = functional_target(op.target) if functional else op.target
    with torch.set_grad_enabled(op.grad_enabled and torch.is_grad_enabled()):
        return target(*args, **kwargs)


def _on_meta(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return {key: torch.device("meta") if isinstance(value, torch.device) else value for key, value in kwargs.items()}
