"""Sequences in an even order (`token_order`): brought in order where the plan says, and back where a user wants.

Ids and tables of positions are whole along their sequences on every rank, so that this is a copy and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import sharded_dim
from executor.resolve.fqns import module_fqns, parameter_names
from executor.resolve.tensor_paths import changed_arguments, changed_results
from executor.torch_internals import local_of, make_dtensor
from planner.errors import PlanKeyError, PlanLayoutError
from planner.plan.ports import resolve_input_ports, resolve_output_ports
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.token_order import ZigzagOrder, zigzag_indices

TensorT = TypeVar("TensorT", bound=torch.Tensor)


class SequenceOrder:
    """The order of a plan's sequences on its mesh."""

    def __init__(self, order: ZigzagOrder, plan: ShardingPlan) -> None:
        """Take the order of ``plan``, whose axis the mesh has."""
        self.axis = plan.mesh.names.index(order.axis)
        self.length = order.length
        self._axis_name = order.axis
        indices = torch.tensor(zigzag_indices(order.length, plan.mesh.shape[self.axis]), device="cpu")
        self._indices = {indices.device: indices}

    @classmethod
    def of_plan(cls, plan: ShardingPlan) -> SequenceOrder | None:
        """Return the order of ``plan``, None where its sequences have their own."""
        return None if plan.even_order is None else cls(plan.even_order, plan)

    def along(self, tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Return ``tensor`` with the tokens along ``dim``, all of a sequence, in order.

        Args:
            what: for messages.

        Raises:
            PlanLayoutError: this rank has not all of them.
        """
        self._check_whole(tensor, dim, what, "an even")
        return _on_pieces(tensor, lambda local: local.index_select(dim, self._on(local)))

    def back(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return a tensor whose tokens along ``dim`` are in order, whole, with them in their own order.

        Raises:
            PlanLayoutError: this rank has not all of them.
        """
        self._check_whole(tensor, dim, "the tensor", "its own")
        return _on_pieces(tensor, lambda local: local.index_select(dim, self._on(local).argsort()))

    def labels(self, labels: DTensor) -> DTensor:
        """Return labels [rows], sequence after sequence, with those of each sequence in order.

        Raises:
            PlanLayoutError: sequences are split.
        """
        if local_of(labels).shape[0] % self.length:
            raise PlanLayoutError(
                f"a loss got {tuple(labels.shape)} labels in the layout {labels.placements}, in which sequences of "
                f"{self.length} are split.",
                field="even_order",
                what_to_do="Split labels by samples alone.",
            )
        return _on_pieces(labels, lambda local: local.view(-1, self.length).index_select(1, self._on(local)).flatten())

    def check_attention(self, split: list[int]) -> None:
        """Check that attention's sequence is split on the axis that the order is for.

        Raises:
            PlanLayoutError: it is not.
        """
        if split != [self.axis]:
            raise PlanLayoutError(
                f"sequences are in an even order over {self._axis_name}, and attention gets them split otherwise.",
                field="even_order",
                what_to_do=f"Split all attention along the sequence on {self._axis_name}, without a mask; or plan "
                "without even_order.",
            )

    def _check_whole(self, tensor: torch.Tensor, dim: int, what: str, order: str) -> None:
        whole = tensor.dim() > dim and tensor.shape[dim] == self.length
        if isinstance(tensor, DTensor):
            sizes = tensor.device_mesh.shape
            whole = whole and not any(
                sharded_dim(placement) == dim and size > 1
                for placement, size in zip(tensor.placements, sizes, strict=True)
            )
        if not whole:
            raise PlanLayoutError(
                f"{what}, of shape {tuple(tensor.shape)}, is to be brought into {order} order along dim {dim}, which "
                f"is no whole sequence of {self.length} tokens.",
                field="even_order",
                what_to_do="Feed sequences of the length that the plan was made for, whole on each rank.",
            )

    def _on(self, local: torch.Tensor) -> torch.Tensor:
        """Return which token is at each place, on the device of ``local``."""
        if local.device not in self._indices:
            self._indices[local.device] = self._indices[torch.device("cpu")].to(local.device)
        return self._indices[local.device]


def _on_pieces(tensor: TensorT, change: Callable[[torch.Tensor], torch.Tensor]) -> TensorT:
    if not isinstance(tensor, DTensor):
        return cast(TensorT, change(tensor))
    layout = tuple(tensor.placements)
    made = make_dtensor(change(local_of(tensor)), tensor.device_mesh, layout, tensor.shape, tensor.stride())
    return cast(TensorT, made)


def attach_order(module: nn.Module, plan: ShardingPlan, order: SequenceOrder | None) -> None:
    """Hook every module at which ``plan`` brings sequences in order. Call it before other boundaries are hooked."""
    if order is None:
        return
    inputs, outputs = order_places(module, plan)
    for fqn, dims in inputs.items():
        submodule = module.get_submodule(fqn)
        names = tuple(parameter_names(submodule))
        submodule.register_forward_pre_hook(_entering(fqn, dims, names, order), with_kwargs=True)
    for fqn, dims in outputs.items():
        module.get_submodule(fqn).register_forward_hook(_leaving(fqn, dims, order))


def order_places(
    module: nn.Module, plan: ShardingPlan
) -> tuple[dict[str, Mapping[str, int]], dict[str, Mapping[str, int]]]:
    """Return the modules at whose inputs, and at whose outputs, sequences are brought in order: tensor -> dim.

    Raises:
        PlanKeyError: a key that names no module.
    """
    order = plan.even_order
    if order is None:
        return {}, {}
    names = module_fqns(module)
    inputs: dict[str, Any] = resolve_input_ports(order.inputs, names, field="even_order")  # type: ignore[arg-type]
    outputs: dict[str, Any] = resolve_output_ports(order.outputs, names, field="even_order")  # type: ignore[arg-type]
    return inputs, outputs


def natural_order(tensor: torch.Tensor, plan: ShardingPlan, dim: int = 1) -> torch.Tensor:
    """Return what a model returned under ``plan``, such as its logits, with tokens in their own order.

    Args:
        tensor: whole along ``dim``, as ``DTensor.full_tensor()`` is; as it is where the plan has no even order.
        dim: that the tokens of a sequence lie on.

    Raises:
        PlanLayoutError: it is not of the plan's length there.
    """
    order = SequenceOrder.of_plan(plan)
    return tensor if order is None else order.back(tensor, dim)


def _entering(
    fqn: str, dims: Mapping[str, int], names: tuple[str, ...], order: SequenceOrder
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        change = _Changing(f"the input of {fqn or 'the root'}", order)
        changed = changed_arguments(dims, names, change, args, kwargs)
        change.check(dims)
        return changed

    return hook


def _leaving(fqn: str, dims: Mapping[str, int], order: SequenceOrder) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        change = _Changing(f"the output of {fqn}", order)
        changed, _ = changed_results(dims, change, output)
        change.check(dims)
        return changed

    return hook


class _Changing:
    """Brings tensors of one boundary in order, and notes how many."""

    def __init__(self, where: str, order: SequenceOrder) -> None:
        self._where, self._order, self._changed = where, order, 0

    def __call__(self, leaf: Any, dim: int, name: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._changed += 1
        return self._order.along(leaf, dim, f"{name!r}, {self._where}")

    def check(self, dims: Mapping[str, int]) -> None:
        """Check that all tensors were there that are to be brought in order."""
        if self._changed != len(dims):
            raise PlanKeyError(
                f"even_order names {', '.join(map(repr, dims))} of {self._where}, where {self._changed} of them were "
                "found.",
                field="even_order",
                key=next(iter(dims), ""),
                what_to_do="Name tensors by position (0, 1, ...) or by their key; call the model as it was planned.",
            )
