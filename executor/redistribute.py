"""Redistribution of tensors on a device mesh, forward and backward, along the paths of ``cost_model.redistribute``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from cost_model.collectives.price import axis_group, dispatched_collective_time_s
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout, MeshSpec, divides, sharded_dim
from cost_model.layouts.uneven import rounded_length
from cost_model.redistribute import NoPathError, RedistributionPlanner, RedistributionStep
from executor.resolve.token_order import ZigzagPermutation
from executor.torch_internals import dtensor as torch_internals
from executor.torch_internals.dtensor import local_of, make_dtensor, run_function, waited
from planner.plan.sharding_plan import ShardingPlan


def conjugate(layout: Layout) -> Layout:
    """Return the default layout of the gradient of a tensor in ``layout``: S -> S, R -> R, P -> R."""
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
    """Return the strides of a dense global tensor of ``shape`` whose dims have the memory order of those of ``local``.

    Fused attention returns a tensor in which the heads of one token are adjacent in memory, as the surrounding module
    needs them. Making the local tensor contiguous would copy it, and the module would copy it back.

    Args:
        local: the local tensor of the global tensor.
        shape: shape of the global tensor.
        like: its strides order the dims that have equal strides in ``local``, as with one head on a rank.
    """
    order = sorted(range(local.dim()), key=lambda dim: (local.stride(dim), like.stride(dim)), reverse=True)
    strides = contiguous_stride([shape[dim] for dim in order])
    return tuple(strides[order.index(dim)] for dim in range(local.dim()))


def _in_own_storage(local: torch.Tensor) -> torch.Tensor:
    """Return ``local``, contiguous, in a storage of its size: a slice would keep its whole base tensor alive."""
    local = local.contiguous()
    return local.clone() if local.untyped_storage().nbytes() > local.nbytes else local


class Redistributor:
    """Redistributes tensors on one device mesh, along the paths that the planner prices."""

    def __init__(
        self,
        device_mesh: DeviceMesh,
        cluster: ClusterSpec,
        mesh_spec: MeshSpec,
        zigzag: ZigzagPermutation | None = None,
        *,
        uneven_lengths: Sequence[int] | None = (),
    ) -> None:
        """Create the redistributor of one mesh.

        Args:
            device_mesh: the mesh on which redistributions run.
            cluster: its prices decide which path of collectives is the cheapest.
            mesh_spec: names and sizes of the axes of ``device_mesh``, for the prices.
            zigzag: the permutation of tokens into zigzag order; None: sequences stay in natural order.
            uneven_lengths: lengths of dims that one axis may shard unevenly. None: any axes may shard any dim so, and
                DTensor redistributes such tensors, which have no price here. Other uneven shards raise ``NoPathError``.
        """
        groups = [axis_group(mesh_spec, name, cluster) for name in mesh_spec.names]

        def price_step(kind: CollectiveKind, axis: int, nbytes: int) -> float:
            return dispatched_collective_time_s(kind, nbytes, groups[axis], cluster)

        self.device_mesh = device_mesh
        self.zigzag = zigzag
        per_node, devices = cluster.devices_per_node, cluster.size
        self._longer = {length: rounded_length(length, per_node, devices) for length in uneven_lengths or ()}
        self._runs_any = uneven_lengths is None
        self._mesh_shape = mesh_spec.shape
        self._coordinate = device_mesh.get_coordinate() or [0] * len(mesh_spec.shape)
        rounded = {longer: length for length, longer in self._longer.items()}
        self._paths = RedistributionPlanner(mesh_spec.shape, price_step, rounded)

    @classmethod
    def from_plan(cls, device_mesh: DeviceMesh, plan: ShardingPlan) -> Redistributor:
        """Return the redistributor of ``plan``; a hand-written plan without a cluster is priced on toy devices."""
        fields = dict(plan.cluster)
        cluster = ClusterSpec.from_dict(fields) if fields else ClusterSpec.parse(f"{plan.mesh.size}xtoy")
        zigzag = ZigzagPermutation.from_plan(plan)
        lengths = None if plan.solver is None else plan.uneven_lengths
        return cls(device_mesh, cluster, plan.mesh.spec, zigzag, uneven_lengths=lengths)

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

    def even(self, layout: Layout, shape: Sequence[int]) -> Layout:
        """Return ``layout`` with `Replicate` on each axis that does not divide its dim of ``shape``."""
        shape = self._rounded(shape)
        if divides(shape, layout, self._mesh_shape):
            return layout
        result = list(self.replicated)
        for axis, placement in enumerate(layout):
            result[axis] = placement
            if not divides(shape, tuple(result), self._mesh_shape):
                result[axis] = Replicate()
        return tuple(result)

    def all_reduce(self, local: torch.Tensor, reduce_op: str, axis: int) -> torch.Tensor:
        """Return ``local`` reduced over a mesh axis; nothing runs on an axis of size 1."""
        if self._mesh_shape[axis] == 1:
            return local
        return waited(torch_internals.all_reduce(local, reduce_op, self.device_mesh.get_group(axis)))

    def as_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Return ``tensor`` if it is a DTensor, otherwise the replicated DTensor whose local tensor is ``tensor``."""
        if isinstance(tensor, DTensor):
            return tensor
        return DTensor.from_local(tensor, self.device_mesh, self.replicated, run_check=False)

    def of_pieces(self, local: torch.Tensor, layout: Layout) -> DTensor:
        """Return the DTensor in ``layout`` whose even piece on this rank is ``local``, in autograd where that records.

        Its gradient arrives in ``layout``, replicated where that is partial.
        """
        shape = list(local.shape)
        for axis, place in enumerate(layout):
            dim = sharded_dim(place)
            if dim is not None:
                shape[dim] *= self._mesh_shape[axis]
        if not torch.is_grad_enabled():
            return make_dtensor(local.contiguous(), self.device_mesh, layout, shape, contiguous_stride(shape))
        return DTensor.from_local(
            local.contiguous(),
            self.device_mesh,
            layout,
            run_check=False,
            shape=torch.Size(shape),
            stride=contiguous_stride(shape),
            grad_placements=conjugate(layout),
        )

    def is_uneven(self, tensor: DTensor, layout: Layout | None = None) -> bool:
        """Return whether ``tensor`` has uneven shards, in its own layout or in ``layout``, and this mesh may run it."""
        if not self._runs_any and self._longer.keys().isdisjoint(tensor.shape):
            return False
        layouts = (tuple(tensor.placements), *(() if layout is None else (layout,)))
        return not all(divides(tensor.shape, each, self._mesh_shape) for each in layouts)

    def labels(self, labels: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return this rank's local tensor of ``labels`` [rows] in ``layout``, in the token order of the plan."""
        dtensor = self.as_dtensor(labels)
        ordered = dtensor if self.zigzag is None else self.zigzag.labels_to_zigzag(dtensor)
        return local_of(self.to_layout(ordered, layout))

    def to_layout(self, tensor: DTensor, target: Layout) -> DTensor:
        """Return ``tensor`` redistributed to the layout ``target``, outside autograd.

        Raises:
            NoPathError: a dim would be sharded unevenly.
        """
        return tensor if tuple(tensor.placements) == target else self.start(tensor, target)()

    def deferred(self, tensor: DTensor, target: Layout) -> Callable[[], torch.Tensor]:
        """Return a function that redistributes ``tensor`` to ``target`` and returns the local tensor."""
        detached = cast(DTensor, tensor.detach())
        return lambda: local_of(self.to_layout(detached, target))

    def start(self, tensor: DTensor, target: Layout) -> Callable[[], DTensor]:
        """Start to redistribute ``tensor`` to ``target``, outside autograd; return a function that returns the result.

        The function waits for the last collective.
        """
        shape = tuple(tensor.shape)
        if self._runs_any and self.is_uneven(tensor, target):
            uneven = self._redistributed_by_dtensor(tensor, target)
            return lambda: uneven
        local = self._run_steps(local_of(tensor), shape, tuple(tensor.placements), target)

        def finish() -> DTensor:
            arrived = _in_own_storage(waited(local))
            return make_dtensor(arrived, self.device_mesh, target, shape, contiguous_stride(shape))

        return finish

    def _redistributed_by_dtensor(self, tensor: DTensor, target: Layout) -> DTensor:
        """Return ``tensor`` in the layout ``target``, whose shards, or those of its own layout, are uneven chunks."""
        source = tuple(tensor.placements)
        to_partial = [axis for axis, (a, b) in enumerate(zip(source, target, strict=True)) if b.is_partial() and a != b]
        # DTensor makes no tensor partial: rank 0 of the axis keeps the values, and all other ranks get zeros.
        whole = tuple(Replicate() if axis in to_partial else place for axis, place in enumerate(target))
        with torch.no_grad():
            local = waited(local_of(cast(DTensor, tensor.detach()).redistribute(placements=whole)))
        if any(self._coordinate[axis] != 0 for axis in to_partial):
            local = torch.zeros_like(local)
        shape = tuple(tensor.shape)
        return make_dtensor(_in_own_storage(local), self.device_mesh, target, shape, contiguous_stride(shape))

    def _run_steps(self, local: torch.Tensor, shape: tuple[int, ...], source: Layout, target: Layout) -> torch.Tensor:
        """Return the local tensor after all steps; the collective of the last step may still be running."""
        start, end = self._replicated_on_single_ranks(source), self._replicated_on_single_ranks(target)
        # Autograd may give a reduced gradient (for instance zeros) where the plan expects a partial one. No step R -> P
        # exists, so rank 0 of the axis keeps the values, and all other ranks get zeros.
        reduced = tuple(
            Replicate() if b.is_partial() and not a.is_partial() else b for a, b in zip(start, end, strict=True)
        )
        for step in self._paths.path(self._rounded(shape), local.element_size(), start, reduced).steps:
            local = self._run_step(waited(local), step, shape)
        for axis, (a, b) in enumerate(zip(reduced, end, strict=True)):
            if a != b and self._coordinate[axis] != 0:
                local = torch.zeros_like(local)
        return local

    def _replicated_on_single_ranks(self, layout: Layout) -> Layout:
        # On an axis of one rank all placements are the same.
        return tuple(Replicate() if n == 1 else place for place, n in zip(layout, self._mesh_shape, strict=True))

    def _rounded(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return ``shape`` with the lengths that may be sharded unevenly rounded up to what the axes divide."""
        return tuple([self._longer.get(length, length) for length in shape])

    def _run_step(self, local: torch.Tensor, step: RedistributionStep, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the local tensor of a tensor of ``shape`` after one step; a collective pads pieces to the largest."""
        before, after = step.before[step.axis], step.after[step.axis]
        size, index = self._mesh_shape[step.axis], self._coordinate[step.axis]
        origin, target = sharded_dim(before), sharded_dim(after)
        if step.kind == "slice":
            assert target is not None
            return _chunk(local, target, size, index)
        group = self.device_mesh.get_group(step.axis)
        if step.kind == "all_gather":
            assert origin is not None
            if shape[origin] not in self._longer:
                return torch_internals.all_gather(local, origin, group)
            gathered = torch_internals.all_gather(_padded(local, origin, -(-shape[origin] // size)), origin, group)
            return waited(gathered).narrow(origin, 0, shape[origin])
        if step.kind == "all_to_all":
            assert origin is not None
            assert target is not None
            # The sent tensor gets no name, so that it is freed before the received pieces are concatenated.
            arrived = torch_internals.all_to_all(torch.stack(local.chunk(size, target)), group)
            return torch.cat(arrived.unbind(), origin)
        reduce_op = getattr(before, "reduce_op", "sum")
        average = reduce_op == "avg"
        reduce_op = "sum" if average else reduce_op
        if step.kind == "reduce_scatter":
            assert target is not None
            length = shape[target]
            if length not in self._longer:
                local = torch_internals.reduce_scatter(local, target, reduce_op, group)
            else:
                piece = -(-length // size)
                longest = torch_internals.reduce_scatter(_padded(local, target, piece * size), target, reduce_op, group)
                local = waited(longest).narrow(target, 0, min(piece, max(length - index * piece, 0)))
        else:
            local = torch_internals.all_reduce(local, reduce_op, group)
        return waited(local) / size if average else local

    def redistribute(self, tensor: torch.Tensor, layout: Layout, source_grad: Layout | None = None) -> DTensor:
        """Return ``tensor`` redistributed to ``layout``; the backward redistributes its gradient to ``source_grad``.

        Args:
            tensor: a DTensor, or a plain tensor, which counts as replicated.
            layout: layout of the result. If the tensor has this layout already, only the gradient is redistributed.
            source_grad: layout of the gradient that ``tensor`` gets, whatever layout the gradient arrives in. None: the
                tensor's own layout, with `Replicate` in place of `Partial`.

        Raises:
            NoPathError: a dim would be sharded unevenly.
        """
        source = self.as_dtensor(tensor)
        grad_layout = conjugate(tuple(source.placements)) if source_grad is None else source_grad
        if not (source.requires_grad and torch.is_grad_enabled()):
            return self.to_layout(source, layout)
        result: DTensor = run_function(_Redistribute, source, self, layout, grad_layout)
        return result


def _chunk(local: torch.Tensor, dim: int, pieces: int, index: int) -> torch.Tensor:
    """Return one of ``pieces`` pieces of a tensor, equal ones but for the last ones, as `torch.chunk` makes them."""
    length = local.shape[dim]
    piece = -(-length // pieces)
    start = min(index * piece, length)
    return local.narrow(dim, start, min(piece, length - start))


def _padded(local: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Return ``local`` with zeros behind its elements along ``dim``, up to ``length``."""
    missing = length - local.shape[dim]
    return F.pad(local, [0, 0] * (local.dim() - 1 - dim) + [0, missing]) if missing else local


class _Redistribute(torch.autograd.Function):
    """A redistribution in autograd. It saves layouts for the backward pass, and no tensor."""

    @staticmethod
    def forward(
        ctx: Any, tensor: DTensor, redistributor: Redistributor, layout: Layout, grad_layout: Layout
    ) -> DTensor:
        ctx.set_materialize_grads(False)
        ctx.redistributor, ctx.grad_layout = redistributor, grad_layout
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
        return redistributor.to_layout(redistributor.as_dtensor(gradient), ctx.grad_layout), None, None, None


__all__ = ["NoPathError", "Redistributor", "conjugate", "contiguous_stride", "stride_as"]
