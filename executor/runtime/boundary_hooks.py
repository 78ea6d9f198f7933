"""Hooks at module boundaries: arguments and results are redistributed to the layouts of the plan's ports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, counted_from_first, sharded_dim
from executor.resolve.boundaries import Boundaries
from executor.resolve.fqns import modules_at, positional_names
from executor.resolve.tensor_paths import change_arguments, change_results
from executor.runtime.saved_tensor_recompute import recompute_copies
from executor.runtime.shared_redistributions import SharedRedistributions
from executor.runtime.whole_batches import BatchForm
from planner.errors import PlanLayoutError, PlanTypeError, UnmatchedKeyError
from planner.model_rewrites.selected_rows.selection import keep_selection
from planner.plan.ports import Port


def attach_ports(module: nn.Module, boundaries: Boundaries, shared: SharedRedistributions, form: BatchForm) -> None:
    """Register hooks on the modules that have ports.

    Args:
        module: the root module, after Sharders have replaced their modules.
        boundaries: the plan's boundaries, resolved against ``module``.
        shared: runs the redistributions.
        form: whether plain tensors at the root are whole batches.
    """
    for submodule, fqn, ports in modules_at(module, boundaries.inputs):
        hook = _InputHook(fqn=fqn, ports=ports, positional=positional_names(submodule), shared=shared, form=form)
        submodule.register_forward_pre_hook(hook, with_kwargs=True)
        if any(port.reallgather for port in ports.values()):
            submodule.forward = ReallgatherForward(submodule, shared)
    for submodule, fqn, ports in modules_at(module, boundaries.outputs):
        submodule.register_forward_hook(_OutputHook(fqn=fqn, ports=ports, shared=shared, form=form))


def through_port(
    tensor: torch.Tensor, port: Port, shared: SharedRedistributions, form: BatchForm, *, is_local: bool
) -> torch.Tensor:
    """Return ``tensor`` redistributed to the layout of ``port``: a DTensor, or its local tensor with ``port.to_local``.

    An axis that does not divide a dim leaves it whole.

    Args:
        tensor: a DTensor in any layout, or plain.
        port: layouts of the tensor and of its gradient.
        shared: runs the redistributions, and returns the same copy to all modules that need the same layout.
        is_local: whether a plain tensor is this rank's shard under ``port.from_local``, or under ``port.layout`` where
            that is None. If not, it is the whole tensor.
    """
    redistributor, given = shared.redistributor, tensor
    if not isinstance(tensor, DTensor) and (is_local or port.from_local is not None):
        placements = port.layout if port.from_local is None else port.from_local
        tensor = DTensor.from_local(tensor, redistributor.device_mesh, placements, run_check=False)
    layout = form.layout(port.layout, tensor.shape, redistributor)
    source_grad = None if port.source_grad is None else form.layout(port.source_grad, tensor.shape, redistributor)
    result = shared.redistribute(tensor, layout, port.grad, source_grad, reallgather=port.reallgather)
    keep_selection(given, result)
    return result.to_local() if port.to_local else result


def _counted_from_first(port: Port, tensor: torch.Tensor, field: str, fqn: str) -> Port:
    """Return ``port`` with layouts that count from the first dim of ``tensor``.

    Raises:
        PlanLayoutError: the tensor has fewer dims.
    """
    ndim = tensor.dim()
    lowest = min((sharded_dim(place) or 0 for layout in port.layouts() for place in layout), default=0)
    if lowest >= 0:
        return port
    if lowest < -ndim:
        raise PlanLayoutError(
            f"{field} shards dim {lowest} at {_text(fqn)}, but the tensor has {ndim} dims.",
            field=field,
            key=fqn,
            what_to_do="Call the module with a tensor of more dims, or shard another dim.",
        )

    def counted(layout: Layout | None) -> Layout | None:
        return None if layout is None else counted_from_first(layout, ndim)

    return dataclasses.replace(
        port,
        layout=counted_from_first(port.layout, ndim),
        grad=counted(port.grad),
        source=counted(port.source),
        source_grad=counted(port.source_grad),
        from_local=counted(port.from_local),
    )


class ReallgatherForward:
    """A module's forward for which autograd saves arguments as they were before redistribution (``Port.reallgather``).

    The backward redistributes these arguments again, as Megatron's sequence-parallel linear does.
    """

    def __init__(self, module: nn.Module, shared: SharedRedistributions) -> None:
        self._forward: Callable[..., Any] = module.forward
        self._shared = shared
        # Signatures are looked up on forward, by the executor and by transformers.
        functools.update_wrapper(self, self._forward, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        leaves = pytree.tree_leaves((args, kwargs))
        with recompute_copies(self._shared.recomputed(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))):
            return self._forward(*args, **kwargs)


@dataclass(frozen=True, slots=True, kw_only=True)
class _InputHook:
    """A forward pre-hook that redistributes arguments; ``positional`` are the names that can be passed by position."""

    fqn: str
    ports: Mapping[str, Port]
    positional: tuple[str, ...]
    shared: SharedRedistributions
    form: BatchForm

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return change_arguments(self.ports, self.positional, self._redistribute, args, kwargs)

    def _redistribute(self, leaf: Any, port: Port, name: str) -> Any:
        if leaf is None:
            # An optional argument that was not given.
            return None
        if not isinstance(leaf, torch.Tensor):
            raise _not_a_tensor("input_plan", self.fqn, name, leaf)
        # A port with a source is planned: a plain tensor at such a port inside the model is replicated. A plain tensor
        # that the user passes to the root, or that reaches a hand-written port, is this rank's shard.
        port = _counted_from_first(port, leaf, "input_plan", self.fqn)
        is_local = not self.form.is_whole if self.fqn == "" else port.source is None
        return through_port(leaf, port, self.shared, self.form, is_local=is_local)


@dataclass(frozen=True, slots=True, kw_only=True)
class _OutputHook:
    """A forward hook that redistributes results."""

    fqn: str
    ports: Mapping[str, Port]
    shared: SharedRedistributions
    form: BatchForm

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        changed, occurring = change_results(self.ports, self._redistribute, output)
        self._check_names(occurring)
        return changed

    def _redistribute(self, leaf: Any, port: Port, name: str) -> Any:
        if leaf is None:
            return None
        if not isinstance(leaf, torch.Tensor):
            raise _not_a_tensor("output_plan", self.fqn, name, leaf)
        port = _counted_from_first(port, leaf, "output_plan", self.fqn)
        return through_port(leaf, port, self.shared, self.form, is_local=port.source is None)

    def _check_names(self, occurring: Collection[str]) -> None:
        # The result of a planned port, which has a source, may be absent from this call: there is no loss without
        # labels. If the result of a hand-written port is absent, its name is mistyped.
        missing = sorted(name for name, port in self.ports.items() if name not in occurring and port.source is None)
        if missing:
            raise UnmatchedKeyError(
                f"output_plan names the results {missing} of {_text(self.fqn)}, which returned none of them.",
                field="output_plan",
                key=self.fqn,
                what_to_do="Name results by position (0, 1, ...) or by their key.",
            )


def _not_a_tensor(field: str, fqn: str, name: str, value: object) -> PlanTypeError:
    return PlanTypeError(
        f"{field} gives {name!r} of {_text(fqn)} a layout, but it is {type(value).__name__}, not a tensor.",
        field=field,
        key=fqn,
        what_to_do="Remove that layout, or write None in its place in a list.",
    )


def _text(fqn: str) -> str:
    return repr(fqn) if fqn else "the root"
