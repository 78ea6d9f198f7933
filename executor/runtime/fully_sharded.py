"""Parameters that are gathered together, by torch's ``fully_shard``: one flat all-gather before a module's forward.

One more before its backward, unless they are kept until then, and one reduce-scatter of the gradients after it; torch
issues the next module's gather ahead, and lets all of them overlap with compute. What is kept for the step is gathered
and reduced once (``fsdp_keep_for_step``). The parameters are DTensors on the whole mesh throughout: in their stored
layout at rest, and in their compute layout while the module runs. Gradients are summed, not averaged, because the loss
is the mean over the global batch already.

torch passes a module's inputs that need gradients through a node of its own, so that redistributions of them are shared
inside the module, but not with the rest of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, format_layout
from executor import torch_internals
from executor.resolve.fsdp_groups import GatherGroup, Member
from executor.resolve.parameter_uses import compute_dtype, reduce_dtype
from executor.runtime.fsdp_keep_for_step import StepGathers
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.run_context import PhaseClock
from executor.runtime.shared_redistributions import SharedRedistributions
from executor.torch_internals import make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.plan.reshard import ReshardAfter
from planner.plan.sharding_plan import ShardingPlan


def gather_together(
    module: nn.Module,
    groups: Collection[GatherGroup],
    device_mesh: DeviceMesh,
    plan: ShardingPlan,
    shared: SharedRedistributions,
    reduction: GradientReduction,
    clock: PhaseClock,
    *,
    without_memory: bool = False,
) -> None:
    """Have every module of ``groups`` gather its group. Call it after all other wrappers of forwards.

    Args:
        module: the root, with its parameters placed.
        groups: innermost modules first, as ``gather_groups`` returns them.
        device_mesh: that the parameters are on.
        plan: says in which dtypes parameters are gathered and gradients reduced.
        shared: is told of the copies that torch hands to a module in place of its arguments.
        reduction: knows which backward of a step is the last.
        clock: told of what runs once a step, where it is without memory.
        without_memory: the parameters are on meta, and stay there while the module runs.
    """
    if not groups:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=compute_dtype(plan), reduce_dtype=reduce_dtype(plan), cast_forward_inputs=False
    )
    for_step = StepGathers(reduction)
    for group in groups:
        gathering = _apply(module, group, device_mesh, policy)
        _Arguments(shared).attach(module.get_submodule(group.fqn))
        if group.keeping is ReshardAfter.STEP:
            for_step.add(gathering)
        if without_memory:
            torch_internals.gather_on_meta(gathering, _phases(group, clock))
    if not isinstance(module, FSDPModule):
        # Without parameters of its own: the modules that gather share streams and prefetch under one root.
        module.register_forward_hook(_without_bases)
        axes = _axes_of(device_mesh, next(iter(groups)))
        fully_shard(module, mesh=device_mesh, dp_mesh_dims=axes, ignored_params=set(module.parameters()))
    until_backward = [group.fqn for group in groups if group.keeping is ReshardAfter.BACKWARD]
    keeping = [cast(FSDPModule, module.get_submodule(fqn)) for fqn in until_backward]
    _Passes(cast(FSDPModule, module), keeping, for_step).attach(module)
    for_step.attach(module)


def _phases(group: GatherGroup, clock: PhaseClock) -> torch_internals.Within:
    """Return the contexts in which a group gathers and reduces, to be counted so."""
    if group.keeping is not ReshardAfter.STEP:
        return torch_internals.Within()
    return torch_internals.Within(
        all_gather=lambda: clock.of("param_gather"), reduce_scatter=lambda: clock.of("grad_reduce")
    )


def _apply(module: nn.Module, group: GatherGroup, device_mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> FSDPModule:
    owner = module.get_submodule(group.fqn)
    resting = {member.fqn: _register(member, _whole_on_meta(member, device_mesh)) for member in group.members}
    gathered = {_registered(member): member for member in group.members}
    owner.register_forward_hook(_without_bases)
    fully_shard(
        owner,
        mesh=device_mesh,
        # The root too: torch would keep its parameters gathered, whether or not the plan has paid for that.
        reshard_after_forward=group.keeping is ReshardAfter.FORWARD,
        shard_placement_fn=lambda parameter: Shard(gathered[parameter].dim),
        mp_policy=policy,
        ignored_params=set(module.parameters()) - set(gathered),
        dp_mesh_dims=_axes_of(device_mesh, group),
    )
    for member in group.members:
        split = tuple(cast(DTensor, _registered(member)).placements)
        # Where it splits on several axes, torch has one in their place.
        wanted = tuple(place for axis, place in enumerate(member.stored) if axis not in group.axes[1:])
        assert split == wanted, f"{member.fqn} is stored in {member.stored}, fully_shard has {split}"
        _register(member, resting[member.fqn])
    sharded = cast(FSDPModule, owner)
    torch_internals.adopt_parameters(sharded)
    sharded.set_gradient_divide_factor(1.0)
    # Otherwise the factor goes into a reduction that gloo does not have.
    sharded.set_force_sum_reduction_for_comms(True)
    owner.register_forward_pre_hook(_GradientCheck(group, device_mesh))
    return sharded


def _axes_of(device_mesh: DeviceMesh, group: GatherGroup) -> DataParallelMeshDims:
    names = device_mesh.mesh_dim_names
    assert names is not None, "check_plan refuses meshes without names"
    return DataParallelMeshDims(shard=tuple(names[axis] for axis in group.axes))


def _registered(member: Member) -> nn.Parameter:
    owner, name = member.slots[0]
    parameter = owner._parameters[name]
    assert parameter is not None
    return parameter


def _register(member: Member, parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter whose place ``parameter`` takes."""
    before = _registered(member)
    for owner, name in member.slots:
        owner._parameters[name] = parameter
    return before


def _whole_on_meta(member: Member, device_mesh: DeviceMesh) -> nn.Parameter:
    """Return a stand-in for the parameter in its compute layout: ``fully_shard`` splits it, and nothing is copied."""
    resting = cast(DTensor, _registered(member))
    size = list(torch_internals.local_of(resting).shape)
    differing = (axis for axis, (a, b) in enumerate(zip(member.stored, member.compute, strict=True)) if a != b)
    size[member.dim] *= math.prod(device_mesh.size(axis) for axis in differing)
    local = torch.empty(size, dtype=resting.dtype, device="meta")
    whole = make_dtensor(local, device_mesh, member.compute, resting.shape, resting.stride())
    return torch_internals.parameter_on(device_mesh, whole)


def _without_bases(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """A forward hook, to run before torch's own: that one's hooks on results are lost where a view is changed in place.

    Such a change is legal, so a result that is a view becomes a tensor in its own right, of the same memory.
    """

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._base is not None

    if not torch.is_grad_enabled() or not any(map(is_view, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: run_function(_WithoutBase, leaf) if is_view(leaf) else leaf, output)


class _WithoutBase(torch.autograd.Function):
    """The identity; what comes out is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # It counts changes in place together with the tensor, so that autograd notices them.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _GradientCheck:
    """A forward pre-hook that has every gradient of a group checked before it is reduced.

    ``fully_shard`` sums what arrives over its axes, whatever it is: a gradient that is whole already would come out
    too large, and one that is partial on another axis as well would be reduced there too, in every backward.
    """

    def __init__(self, group: GatherGroup, device_mesh: DeviceMesh) -> None:
        self._group = group
        self._mesh = device_mesh
        self._watched: set[nn.Parameter] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        for member in self._group.members:
            gathered = _registered(member)
            # torch gathers into one and the same parameter each time.
            if gathered not in self._watched:
                self._watched.add(gathered)
                gathered.register_hook(self._checked(member))

    def _checked(self, member: Member) -> Callable[[torch.Tensor], torch.Tensor | None]:
        wanted, shown = list(member.accumulated), list(member.stored)
        for axis in self._group.axes:
            wanted[axis] = shown[axis] = Partial("sum")

        def check(gradient: torch.Tensor) -> torch.Tensor | None:
            layout = tuple(gradient.placements) if isinstance(gradient, DTensor) else ()
            if len(layout) != len(wanted) or any(
                found != place and size > 1 for found, place, size in zip(layout, wanted, self._mesh.shape, strict=True)
            ):
                raise _wrong_gradient(member, layout, tuple(wanted))
            if member.accumulated == member.stored:
                return None
            # torch would take the sums over other axes in every backward; here they are taken once a step.
            local = torch_internals.local_of(cast(DTensor, gradient))
            return make_dtensor(local, self._mesh, tuple(shown), gradient.shape, gradient.stride())

        return check


def _wrong_gradient(member: Member, layout: Layout, wanted: Layout) -> PlanLayoutError:
    found = f"({', '.join(format_layout(layout))})" if layout else "a plain tensor"
    reduced = ", ".join(format_layout(wanted))
    return PlanLayoutError(
        f"The gradient of {member.fqn!r} comes as {found}, but fully_shard reduces ({reduced}).",
        field="fully_shard",
        key=member.fqn,
        what_to_do="Leave that parameter out of fully_shard.",
    )


class _Arguments:
    """Hooks around torch's own, which hands a module views of its arguments to learn when its backward is over.

    Two blocks that want one tensor (an encoder's output, say) in the same layout would otherwise each redistribute it.
    """

    def __init__(self, shared: SharedRedistributions) -> None:
        self._shared = shared
        self._given: list[torch.Tensor] = []

    def attach(self, module: nn.Module) -> None:
        """Hook ``module``, to which ``fully_shard`` has been applied."""
        module.register_forward_pre_hook(self._before, with_kwargs=True, prepend=True)
        module.register_forward_pre_hook(self._after, with_kwargs=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._given = _tensors(args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given, self._given = self._given, []
        for original, alias in zip(given, _tensors(args, kwargs), strict=True):
            if alias is not original:
                self._shared.same(alias, original)


def _tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]


class _Passes:
    """Hooks on the root that bring torch's bookkeeping back in order around each forward."""

    def __init__(self, root: FSDPModule, keeping: Sequence[FSDPModule], for_step: StepGathers) -> None:
        self._root = root
        self._keeping = keeping
        self._for_step = for_step
        self._recorded = 0

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``, so that the one hook runs before torch's own and the other after."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch_internals.broke_off(self._root):
            # An exception left a forward or a backward unfinished.
            if torch_internals.broke_off_backward(self._root):
                self._for_step.give_up()
            self._root.reset_iter_state()
        self._for_step.before_forward()
        # Kept from a forward that had no backward: what it was gathered from may have changed since.
        self._drop()
        self._recorded = torch_internals.recorded_forwards(self._root)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            # No backward will follow. Kept, the record would grow, and send the next prefetch after wrong modules.
            torch_internals.forget_forwards(self._root, self._recorded)
            self._drop()
            self._for_step.after_forward_alone()

    def _drop(self) -> None:
        for module in self._keeping:
            module.reshard()
