"""Redistribution as it is run: the steps of ``cost_model.redistribute`` on this rank's piece, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from cost_model.collectives.price import axis_group, moving_time_s
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout, MeshSpec, sharded_dim
from cost_model.redistribute import NoPathError, RedistributionPlanner, RedistributionStep
from executor import torch_internals
from executor.resolve.token_order import SequenceOrder
from executor.torch_internals import local_of, make_dtensor, run_function, waited
from planner.plan.sharding_plan import ShardingPlan


def conjugate(layout: Layout) -> Layout:
    """Return the layout that a gradient has where nothing else is said: S -> S, R -> R, P -> R."""
    return tuple(Replicate() if placement.is_partial() else placement for placement in layout)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    strides: list[int] = []
    step = 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def stride_as(local: torch.Tensor, shape: Sequence[int], like: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a whole tensor of ``shape`` whose dims lie in memory as those of its piece ``local``.

    Fused attention leaves heads next to each other, as the module around it wants them: to make its piece contiguous
    would be a copy, and the module would copy it back. Where the piece does not tell, as with one head on a rank, dims
    lie as those of ``like``.
    """
    order = sorted(range(local.dim()), key=lambda dim: (local.stride(dim), like.stride(dim)), reverse=True)
    lying = contiguous_stride([shape[dim] for dim in order])
    return tuple(lying[order.index(dim)] for dim in range(local.dim()))


def _in_own_memory(piece: torch.Tensor) -> torch.Tensor:
    """Return ``piece``, contiguous; a slice is copied, as the view of it would keep all that it was cut from."""
    piece = piece.contiguous()
    return piece.clone() if piece.untyped_storage().nbytes() > piece.nbytes else piece


class Redistributor:
    """Takes tensors from one layout to another on one device mesh, along the paths that the planner prices."""

    def __init__(
        self,
        device_mesh: DeviceMesh,
        cluster: ClusterSpec,
        mesh_spec: MeshSpec,
        order: SequenceOrder | None = None,
    ) -> None:
        """Choose paths by what they cost on ``mesh_spec`` of ``cluster``, and run them on ``device_mesh``.

        Args:
            order: that sequences are in; None: their own.
        """
        groups = [axis_group(mesh_spec, name, cluster) for name in mesh_spec.names]

        def price_step(kind: CollectiveKind, axis: int, nbytes: int) -> float:
            return moving_time_s(kind, nbytes, groups[axis], cluster)

        self.device_mesh = device_mesh
        self.order = order
        self._mesh_shape = mesh_spec.shape
        self._coordinate = device_mesh.get_coordinate() or [0] * len(mesh_spec.shape)
        self._paths = RedistributionPlanner(mesh_spec.shape, price_step)

    @classmethod
    def of_plan(cls, device_mesh: DeviceMesh, plan: ShardingPlan) -> Redistributor:
        """Return the redistributor for ``plan``; one written by hand, without a cluster, is priced on toy devices."""
        described = dict(plan.cluster)
        cluster = ClusterSpec.from_dict(described) if described else ClusterSpec.parse(f"{plan.mesh.size}xtoy")
        return cls(device_mesh, cluster, plan.mesh.spec, SequenceOrder.of_plan(plan))

    @property
    def replicated(self) -> Layout:
        """The layout that replicates on every axis."""
        return (Replicate(),) * len(self._mesh_shape)

    def coordinate(self, axis: int) -> int:
        """Return this rank's index along a mesh axis."""
        return self._coordinate[axis]

    def axis_size(self, axis: int) -> int:
        """Return the number of ranks along a mesh axis."""
        return self._mesh_shape[axis]

    def all_reduce(self, local: torch.Tensor, reduce_op: str, axis: int) -> torch.Tensor:
        """Return ``local`` reduced over a mesh axis; nothing runs on an axis of size 1."""
        if self._mesh_shape[axis] == 1:
            return local
        return waited(torch_internals.all_reduce(local, reduce_op, self.device_mesh.get_group(axis)))

    def as_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Return ``tensor`` itself, or a plain one as replicated."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.device_mesh, self.replicated, run_check=False)

    def labels(self, labels: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return this rank's piece of labels [rows] in ``layout``, in the order that sequences are in."""
        given = self.as_dtensor(labels)
        return local_of(self.to_layout(given if self.order is None else self.order.labels(given), layout))

    def to_layout(self, tensor: DTensor, target: Layout) -> DTensor:
        """Return ``tensor`` in ``target``, outside autograd.

        Raises:
            NoPathError: a split would be uneven.
        """
        return tensor if tuple(tensor.placements) == target else self.start(tensor, target)()

    def again(self, tensor: DTensor, target: Layout) -> Callable[[], torch.Tensor]:
        """Return what brings ``tensor``, as it is now, to ``target`` whenever it is called: the local piece."""
        kept = cast(DTensor, tensor.detach())
        return lambda: local_of(self.to_layout(kept, target))

    def start(self, tensor: DTensor, target: Layout) -> Callable[[], DTensor]:
        """Start to bring ``tensor`` to ``target``, outside autograd; the result is waited for when it is called for."""
        shape = tuple(tensor.shape)
        local = self._walk(local_of(tensor), shape, tuple(tensor.placements), target)

        def finish() -> DTensor:
            piece = _in_own_memory(waited(local))
            return make_dtensor(piece, self.device_mesh, target, shape, contiguous_stride(shape))

        return finish

    def _walk(self, local: torch.Tensor, shape: tuple[int, ...], source: Layout, target: Layout) -> torch.Tensor:
        """Return the piece after all steps; what the last one brings may be still on its way."""
        start, reached = self._without_axes_of_one(source), self._without_axes_of_one(target)
        # A gradient that the plan has as partial may arrive reduced, for instance as zeros: there is no step R -> P.
        reduced = tuple(
            Replicate() if b.is_partial() and not a.is_partial() else b for a, b in zip(start, reached, strict=True)
        )
        for step in self._paths.path(shape, local.element_size(), start, reduced).steps:
            local = self._step(waited(local), step)
        for axis, (a, b) in enumerate(zip(reduced, reached, strict=True)):
            if a != b and self._coordinate[axis] != 0:
                local = torch.zeros_like(local)
        return local

    def _without_axes_of_one(self, layout: Layout) -> Layout:
        # On an axis of one rank all placements are the same.
        return tuple(Replicate() if n == 1 else place for place, n in zip(layout, self._mesh_shape, strict=True))

    def _step(self, local: torch.Tensor, step: RedistributionStep) -> torch.Tensor:
        before, after = step.before[step.axis], step.after[step.axis]
        size, index = self._mesh_shape[step.axis], self._coordinate[step.axis]
        origin, target = sharded_dim(before), sharded_dim(after)
        if step.kind == "slice":
            assert target is not None
            length = local.shape[target] // size
            return local.narrow(target, index * length, length)
        group = self.device_mesh.get_group(step.axis)
        if step.kind == "all_gather":
            assert origin is not None
            return torch_internals.all_gather(local, origin, group)
        if step.kind == "all_to_all":
            assert origin is not None
            assert target is not None
            # No name for what is sent: it would be there until what has arrived is put together.
            arrived = torch_internals.all_to_all(torch.stack(local.chunk(size, target)), group)
            return torch.cat(arrived.unbind(), origin)
        reduce_op = getattr(before, "reduce_op", "sum")
        average = reduce_op == "avg"
        reduce_op = "sum" if average else reduce_op
        if step.kind == "reduce_scatter":
            assert target is not None
            local = torch_internals.reduce_scatter(local, target, reduce_op, group)
        else:
            local = torch_internals.all_reduce(local, reduce_op, group)
        return waited(local) / size if average else local

    def redistribute(self, tensor: torch.Tensor, layout: Layout, source_grad: Layout | None = None) -> DTensor:
        """Return ``tensor`` in ``layout``, and take its gradient back to ``source_grad``, whatever layout it comes in.

        Args:
            tensor: a plain one counts as replicated.
            layout: may be the tensor's own: then only the gradient is redistributed.
            source_grad: layout in which the gradient is handed on; None is the conjugate of the tensor's layout.

        Raises:
            NoPathError: a split would be uneven.
        """
        source = self.as_dtensor(tensor)
        back = conjugate(tuple(source.placements)) if source_grad is None else source_grad
        if not (source.requires_grad and torch.is_grad_enabled()):
            return self.to_layout(source, layout)
        result: DTensor = run_function(_Redistribute, source, self, layout, back)
        return result


class _Redistribute(torch.autograd.Function):
    """Keeps layouts, and no tensor, for the backward pass."""

    @staticmethod
    def forward(ctx: Any, tensor: DTensor, redistributor: Redistributor, layout: Layout, back: Layout) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.redistributor, ctx.back = redistributor, back
        changed = redistributor.to_layout(tensor, layout)
        if changed is not tensor:
            return changed
        mesh, shape, stride = redistributor.device_mesh, tensor.shape, tensor.stride()
        return make_dtensor(local_of(tensor), mesh, layout, shape, stride)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[DTensor | None, None, None, None]:
        if gradient is None:
            return None, None, None, None
        redistributor: Redistributor = ctx.redistributor
        return redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.back), None, None, None


__all__ = ["NoPathError", "Redistributor", "conjugate", "contiguous_stride", "stride_as"]
