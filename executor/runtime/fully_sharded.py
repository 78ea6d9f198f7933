"""FSDP groups, run by torch's ``fully_shard``.

A group has one flat all-gather before its module's forward, one more before the module's backward unless the parameters
stay gathered until then, and one reduce-scatter of gradients after the backward. torch prefetches the next module's
all-gather, and overlaps all of these collectives with compute. A group that reshards after the step has one all-gather
and one reduce-scatter a step (``fsdp_reshard_after_step``). Parameters are DTensors on the whole mesh throughout: in
their stored layout between steps, and in their compute layout while the module runs. Gradients are summed, not
averaged, because the loss is the mean over the global batch already.

torch replaces the arguments of an FSDP module that need gradients by views. ``_ArgumentAliases`` registers the views,
so that a redistribution of an argument is shared with the rest of the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, format_layout
from executor.resolve.fsdp_groups import FsdpGroup, FsdpParameter
from executor.resolve.resolved_plan import ResolvedPlan
from executor.runtime.fsdp_reshard_after_step import ReshardAfterStep
from executor.runtime.grad_reduction import GradientReduction
from executor.runtime.run_context import PhaseTracker
from executor.runtime.shared_redistributions import SharedRedistributions
from executor.runtime.whole_batches import BatchForm
from executor.torch_internals import dtensor as torch_internals
from executor.torch_internals import fsdp as fsdp_internals
from executor.torch_internals.dtensor import make_dtensor, run_function
from planner.errors import PlanLayoutError
from planner.model_rewrites.tree_paths import tensors_in
from planner.plan.reshard import ReshardAfter


def apply_fsdp_groups(
    module: nn.Module,
    resolved: ResolvedPlan,
    shared: SharedRedistributions,
    reduction: GradientReduction,
    phases: PhaseTracker,
    form: BatchForm,
    *,
    on_meta: bool = False,
) -> None:
    """Apply ``fully_shard`` to the module of every FSDP group. Call it after all other wrappers of forwards.

    Args:
        module: the root module; its parameters are DTensors in their stored layouts.
        resolved: the resolved plan; its groups are sorted innermost modules first.
        shared: learns which views torch passes to a module in place of its arguments.
        reduction: knows which backward of a step is the last.
        phases: on meta, tracks the phase of the collectives that run once a step.
        form: whether a layout has not divided a tensor.
        on_meta: whether the parameters are on meta, and stay there while the module runs.
    """
    groups, device_mesh = resolved.fsdp_groups, resolved.device_mesh
    if not groups:
        return
    policy = MixedPrecisionPolicy(
        param_dtype=resolved.compute_dtype, reduce_dtype=resolved.reduce_dtype, cast_forward_inputs=False
    )
    after_step = ReshardAfterStep(module, reduction)
    for group in groups:
        with _argument_aliases(module.get_submodule(group.fqn), shared):
            fsdp_module = _fully_shard(module, group, device_mesh, policy, form)
        after_step.add(fsdp_module, after_step=group.reshard_after is ReshardAfter.STEP)
        if on_meta:
            fsdp_internals.gather_on_meta(fsdp_module, _collective_contexts(group, phases))
    if not isinstance(module, FSDPModule):
        # The root has no group. As an FSDP module it makes all FSDP modules share streams and prefetch in one order.
        module.register_forward_hook(_replace_views)
        axes = _fsdp_axes(device_mesh, next(iter(groups)))
        fully_shard(module, mesh=device_mesh, dp_mesh_dims=axes, ignored_params=set(module.parameters()))
    fqns_after_backward = [group.fqn for group in groups if group.reshard_after is ReshardAfter.BACKWARD]
    after_backward = [cast(FSDPModule, module.get_submodule(fqn)) for fqn in fqns_after_backward]
    _PassHooks(cast(FSDPModule, module), after_backward, after_step).attach(module)
    reduction.attach_fully_shard(after_step)


def _collective_contexts(group: FsdpGroup, phases: PhaseTracker) -> fsdp_internals.CollectiveContexts:
    """Return the contexts in which the collectives of a group run: they set the phase in which collectives count."""
    if group.reshard_after is not ReshardAfter.STEP:
        return fsdp_internals.CollectiveContexts()
    return fsdp_internals.CollectiveContexts(
        all_gather=lambda: phases.entered("param_gather"), reduce_scatter=lambda: phases.entered("grad_reduce")
    )


def _fully_shard(
    module: nn.Module, group: FsdpGroup, device_mesh: DeviceMesh, policy: MixedPrecisionPolicy, form: BatchForm
) -> FSDPModule:
    """Apply ``fully_shard`` to the module of ``group``, and return the module."""
    owner = module.get_submodule(group.fqn)
    stored = {item.fqn: _register(item, _compute_layout_on_meta(item, device_mesh)) for item in group.parameters}
    by_parameter = {item.parameter: item for item in group.parameters}
    owner.register_forward_hook(_replace_views)
    fully_shard(
        owner,
        mesh=device_mesh,
        # Set for the root too: torch's default would leave the root's parameters gathered.
        reshard_after_forward=group.reshard_after is ReshardAfter.FORWARD,
        shard_placement_fn=lambda parameter: Shard(by_parameter[parameter].dim),
        mp_policy=policy,
        ignored_params=set(module.parameters()) - set(by_parameter),
        dp_mesh_dims=_fsdp_axes(device_mesh, group),
    )
    for item in group.parameters:
        sharded = tuple(cast(DTensor, item.parameter).placements)
        # Where a group has several axes, torch has one flattened axis in their place.
        expected = tuple(place for axis, place in enumerate(item.stored) if axis not in group.axes[1:])
        assert sharded == expected, f"{item.fqn} is stored in {item.stored}, fully_shard has {sharded}"
        _register(item, stored[item.fqn])
    fsdp_module = cast(FSDPModule, owner)
    fsdp_internals.adopt_parameters(fsdp_module)
    fsdp_module.set_gradient_divide_factor(1.0)
    # Otherwise torch puts the divide factor into a reduce op that gloo does not have.
    fsdp_module.set_force_sum_reduction_for_comms(True)
    owner.register_forward_pre_hook(_GradientCheck(group, device_mesh, form))
    return fsdp_module


def _fsdp_axes(device_mesh: DeviceMesh, group: FsdpGroup) -> DataParallelMeshDims:
    names = device_mesh.mesh_dim_names
    assert names is not None, "resolve_plan rejects meshes without names"
    return DataParallelMeshDims(shard=tuple(names[axis] for axis in group.axes))


def _register(item: FsdpParameter, parameter: nn.Parameter) -> nn.Parameter:
    """Register ``parameter`` in the slots of ``item``, and return the parameter that it replaces."""
    before = item.parameter
    for owner, name in item.slots:
        owner._parameters[name] = parameter
    return before


def _compute_layout_on_meta(item: FsdpParameter, device_mesh: DeviceMesh) -> nn.Parameter:
    """Return a meta stand-in for the parameter in its compute layout, which ``fully_shard`` shards without a copy."""
    stored = cast(DTensor, item.parameter)
    size = list(torch_internals.local_of(stored).shape)
    fsdp_axes = (axis for axis, (a, b) in enumerate(zip(item.stored, item.compute, strict=True)) if a != b)
    size[item.dim] *= math.prod(device_mesh.size(axis) for axis in fsdp_axes)
    local = torch.empty(size, dtype=stored.dtype, device="meta")
    whole = make_dtensor(local, device_mesh, item.compute, stored.shape, stored.stride())
    return torch_internals.parameter_on(device_mesh, whole, requires_grad=stored.requires_grad)


def _replace_views(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Return ``output`` with every view in it replaced by a tensor that has the same memory but is no view.

    This forward hook runs before torch's own FSDP hook, which registers hooks on the gradients of results. If the
    result is a view, a later op may change it in place, and the hooks would be lost.
    """

    def is_view(leaf: Any) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.requires_grad and leaf._base is not None

    if not torch.is_grad_enabled() or not any(map(is_view, pytree.tree_leaves(output))):
        return output
    return pytree.tree_map(lambda leaf: run_function(_WithoutBase, leaf) if is_view(leaf) else leaf, output)


class _WithoutBase(torch.autograd.Function):
    """The identity; its result is no view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        # The result shares the version counter of the tensor, so autograd notices changes in place.
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class _GradientCheck:
    """A forward pre-hook that registers a check of every gradient's layout, to run before the gradient is reduced.

    ``fully_shard`` sums a gradient over the group's axes, whatever its layout is. A replicated gradient would come out
    too large. A gradient that is also partial on another axis would be reduced on that axis too, in every backward.
    """

    def __init__(self, group: FsdpGroup, device_mesh: DeviceMesh, form: BatchForm) -> None:
        self._group = group
        self._mesh = device_mesh
        self._form = form
        self._hooked: set[nn.Parameter] = set()

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        for item in self._group.parameters:
            gathered = item.parameter
            # torch all-gathers into the same parameter object each time.
            if gathered.requires_grad and gathered not in self._hooked:
                self._hooked.add(gathered)
                gathered.register_hook(self._check_of(item))

    def _check_of(self, item: FsdpParameter) -> Callable[[torch.Tensor], torch.Tensor | None]:
        """Return the hook on the gradient of ``item``."""
        expected, shown = list(item.accumulated), list(item.stored)
        for axis in self._group.axes:
            expected[axis] = shown[axis] = Partial("sum")

        def check(gradient: torch.Tensor) -> torch.Tensor | None:
            if self._form.was_uneven:
                gradient = self._counted_once(gradient, tuple(expected))
            layout = tuple(gradient.placements) if isinstance(gradient, DTensor) else ()
            if len(layout) != len(expected) or any(
                actual != place and size > 1
                for actual, place, size in zip(layout, expected, self._mesh.shape, strict=True)
            ):
                raise _wrong_gradient(item, layout, tuple(expected))
            if item.accumulated == item.stored:
                return gradient
            # The new layout hides partial sums on other axes from torch, which would reduce them in every backward.
            # Gradient reduction reduces them once a step.
            local = torch_internals.local_of(cast(DTensor, gradient))
            return make_dtensor(local, self._mesh, tuple(shown), gradient.shape, gradient.stride())

        return check

    def _counted_once(self, gradient: torch.Tensor, expected: Layout) -> torch.Tensor:
        """Return ``gradient`` partial where ``expected`` is, if it is replicated there: one rank keeps its values.

        A tensor that an axis did not divide stayed whole, and so all ranks of the axis have its whole gradient.
        """
        if not isinstance(gradient, DTensor):
            return gradient
        coordinate = self._mesh.get_coordinate()
        assert coordinate is not None
        layout, local = list(gradient.placements), torch_internals.local_of(gradient)
        for axis, (actual, place) in enumerate(zip(layout, expected, strict=True)):
            if actual.is_replicate() and place.is_partial():
                layout[axis] = place
                local = local if coordinate[axis] == 0 else torch.zeros_like(local)
        return make_dtensor(local, self._mesh, tuple(layout), gradient.shape, gradient.stride())


def _wrong_gradient(item: FsdpParameter, layout: Layout, expected: Layout) -> PlanLayoutError:
    actual = f"({', '.join(format_layout(layout))})" if layout else "a plain tensor"
    return PlanLayoutError(
        f"The gradient of {item.fqn!r} comes as {actual}, but fully_shard reduces "
        f"({', '.join(format_layout(expected))}).",
        field="fully_shard",
        key=item.fqn,
        what_to_do="Leave that parameter out of fully_shard.",
    )


@contextmanager
def _argument_aliases(module: nn.Module, shared: SharedRedistributions) -> Iterator[None]:
    """Within this context, ``fully_shard`` is applied to ``module``; views of its arguments become their aliases.

    torch's hook passes a module views of its arguments, to learn when the module's backward is over. Without aliases,
    two blocks that need one tensor (an encoder's output, say) in the same layout would each redistribute it. The hooks
    here run right before and right after torch's, and before those that redistribute arguments.
    """
    originals: list[torch.Tensor] = []

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        originals[:] = tensors_in((args, kwargs))

    def after(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for original, alias in zip(originals, tensors_in((args, kwargs)), strict=True):
            if alias is not original:
                shared.add_alias(alias, original)
        originals.clear()

    # Each goes before all hooks that the module has by then.
    module.register_forward_pre_hook(after, with_kwargs=True, prepend=True)
    yield
    module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)


class _PassHooks:
    """Hooks on the root that restore torch's FSDP state around each forward."""

    def __init__(self, root: FSDPModule, after_backward: Sequence[FSDPModule], after_step: ReshardAfterStep) -> None:
        """Take the modules that reshard after their backward, and those that reshard after the step."""
        self._root = root
        self._after_backward = after_backward
        self._after_step = after_step
        self._recorded = 0

    def attach(self, root: nn.Module) -> None:
        """Hook ``root``: one hook runs before torch's own, the other after it."""
        root.register_forward_pre_hook(self._enter, prepend=True)
        root.register_forward_hook(self._leave)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if fsdp_internals.was_interrupted(self._root):
            if fsdp_internals.backward_was_interrupted(self._root):
                self._after_step.abandon_step()
            self._root.reset_iter_state()
        # After a forward without a backward these modules are still gathered, but their parameters may have changed.
        self._reshard()
        self._after_step.before_forward()
        self._recorded = fsdp_internals.recorded_forwards(self._root)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if not torch.is_grad_enabled():
            # No backward follows. torch's record of forwards would grow, and the next backward would prefetch wrong
            # modules.
            fsdp_internals.forget_forwards(self._root, self._recorded)
            self._reshard()
        self._after_step.after_forward()

    def _reshard(self) -> None:
        for module in self._after_backward:
            module.reshard()
