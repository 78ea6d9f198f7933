"""Zigzag token order: hooks permute tokens where the plan says so, and ``natural_order`` permutes results back.

Every rank has token ids and position tables for whole sequences, so the permutation is a local copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from cost_model.layouts.layout import sharded_dim
from executor.resolve.boundaries import Boundaries
from executor.resolve.fqns import modules_at, positional_names
from executor.resolve.tensor_paths import change_arguments, change_results
from executor.torch_internals.dtensor import local_of, make_dtensor
from planner.errors import PlanKeyError, PlanLayoutError
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.token_order import ZigzagOrder, zigzag_indices

TensorT = TypeVar("TensorT", bound=torch.Tensor)


class ZigzagPermutation:
    """The permutation of a sequence's tokens between their natural order and zigzag order."""

    def __init__(self, order: ZigzagOrder, plan: ShardingPlan) -> None:
        """Create the permutation of ``order``, the zigzag order of ``plan``; its axis is one of the plan's mesh."""
        self.axis = plan.mesh.names.index(order.axis)
        self.length = order.length
        self._axis_name = order.axis
        indices = torch.tensor(zigzag_indices(order.length, plan.mesh.shape[self.axis]), device="cpu")
        self._indices = {indices.device: indices}

    @classmethod
    def from_plan(cls, plan: ShardingPlan) -> ZigzagPermutation | None:
        """Return the permutation of ``plan``; None where sequences stay in their natural order."""
        return None if plan.zigzag is None else cls(plan.zigzag, plan)

    def to_zigzag(self, tensor: torch.Tensor, dim: int, what: str) -> torch.Tensor:
        """Return ``tensor`` with the tokens along ``dim`` in zigzag order.

        Args:
            tensor: a tensor in natural order; every rank has whole sequences.
            dim: the dim of tokens.
            what: name of the tensor in messages.

        Raises:
            PlanLayoutError: ``dim`` is sharded, or its length is not the plan's sequence length.
        """
        self._check_whole(tensor, dim, what, "zigzag")
        return _on_local(tensor, lambda local: local.index_select(dim, self._indices_on(local)))

    def to_natural(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Return ``tensor`` with its tokens along ``dim``, which are in zigzag order, in natural order.

        Raises:
            PlanLayoutError: ``dim`` is sharded, or its length is not the plan's sequence length.
        """
        self._check_whole(tensor, dim, "the tensor", "natural")
        return _on_local(tensor, lambda local: local.index_select(dim, self._indices_on(local).argsort()))

    def labels_to_zigzag(self, labels: DTensor) -> DTensor:
        """Return ``labels`` [samples * seq] with the labels of each sequence in zigzag order.

        Raises:
            PlanLayoutError: the layout shards sequences.
        """
        if local_of(labels).shape[0] % self.length:
            raise PlanLayoutError(
                f"a loss got {tuple(labels.shape)} labels in the layout {labels.placements}, which shards sequences of "
                f"{self.length} tokens.",
                field="zigzag",
                what_to_do="Shard labels by samples alone.",
            )
        return _on_local(
            labels, lambda local: local.view(-1, self.length).index_select(1, self._indices_on(local)).flatten()
        )

    def check_attention(self, sequence_axes: list[int]) -> None:
        """Check that attention's sequence is sharded on the zigzag axis and on no other axis.

        Args:
            sequence_axes: axes of the mesh that shard attention's sequence.

        Raises:
            PlanLayoutError: the sequence is sharded on another axis, or on none.
        """
        if sequence_axes != [self.axis]:
            raise PlanLayoutError(
                f"sequences are in zigzag order over {self._axis_name}, but attention gets them in another layout.",
                field="zigzag",
                what_to_do=f"Shard all attention along the sequence on {self._axis_name}, without a mask; or plan "
                "without zigzag.",
            )

    def _check_whole(self, tensor: torch.Tensor, dim: int, what: str, order: str) -> None:
        is_whole = tensor.dim() > dim and tensor.shape[dim] == self.length
        if isinstance(tensor, DTensor):
            axis_sizes = tensor.device_mesh.shape
            is_whole = is_whole and not any(
                sharded_dim(placement) == dim and size > 1
                for placement, size in zip(tensor.placements, axis_sizes, strict=True)
            )
        if not is_whole:
            raise PlanLayoutError(
                f"{what}, of shape {tuple(tensor.shape)}, cannot be brought into {order} order: its dim {dim} is no "
                f"whole sequence of {self.length} tokens.",
                field="zigzag",
                what_to_do="Feed sequences of the length that the plan was made for, whole on each rank.",
            )

    def _indices_on(self, local: torch.Tensor) -> torch.Tensor:
        """Return the index of the token at each place in zigzag order, on the device of ``local``."""
        if local.device not in self._indices:
            self._indices[local.device] = self._indices[torch.device("cpu")].to(local.device)
        return self._indices[local.device]


def _on_local(tensor: TensorT, permute: Callable[[torch.Tensor], torch.Tensor]) -> TensorT:
    """Return ``tensor`` with ``permute`` applied to its local tensor."""
    if not isinstance(tensor, DTensor):
        return cast(TensorT, permute(tensor))
    local = permute(local_of(tensor))
    layout = tuple(tensor.placements)
    return cast(TensorT, make_dtensor(local, tensor.device_mesh, layout, tensor.shape, tensor.stride()))


def natural_order(tensor: torch.Tensor, plan: ShardingPlan, dim: int = 1) -> torch.Tensor:
    """Return ``tensor``, a result of the sharded model such as its logits, with tokens in natural order.

    Args:
        tensor: a tensor that is not sharded along ``dim``, such as ``DTensor.full_tensor()``.
        plan: the model's plan; if it has no zigzag order, ``tensor`` is returned unchanged.
        dim: the dim of tokens.

    Raises:
        PlanLayoutError: ``dim`` is sharded, or its length is not the plan's sequence length.
    """
    permutation = ZigzagPermutation.from_plan(plan)
    return tensor if permutation is None else permutation.to_natural(tensor, dim)


def attach_token_order(module: nn.Module, boundaries: Boundaries, permutation: ZigzagPermutation | None) -> None:
    """Hook the modules at which tokens are brought into zigzag order. Call this before ``attach_ports``.

    Args:
        module: the root module.
        boundaries: the plan's boundaries, resolved against ``module``.
        permutation: the permutation into zigzag order; None: sequences stay in natural order.
    """
    if permutation is None:
        return
    for submodule, fqn, dims in modules_at(module, boundaries.zigzag_inputs):
        hook = _input_hook(fqn, dims, positional_names(submodule), permutation)
        submodule.register_forward_pre_hook(hook, with_kwargs=True)
    for submodule, fqn, dims in modules_at(module, boundaries.zigzag_outputs):
        submodule.register_forward_hook(_output_hook(fqn, dims, permutation))


def _input_hook(
    fqn: str, dims: Mapping[str, int], positional: tuple[str, ...], permutation: ZigzagPermutation
) -> Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]:
    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        permute = _Permute(f"the input of {fqn or 'the root'}", permutation)
        changed = change_arguments(dims, positional, permute, args, kwargs)
        permute.check_count(dims)
        return changed

    return hook


def _output_hook(fqn: str, dims: Mapping[str, int], permutation: ZigzagPermutation) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        permute = _Permute(f"the output of {fqn}", permutation)
        changed, _ = change_results(dims, permute, output)
        permute.check_count(dims)
        return changed

    return hook


class _Permute:
    """Brings the named tensors of one boundary into zigzag order, and counts them."""

    def __init__(self, boundary: str, permutation: ZigzagPermutation) -> None:
        self._boundary, self._permutation, self._count = boundary, permutation, 0

    def __call__(self, leaf: Any, dim: int, name: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        self._count += 1
        return self._permutation.to_zigzag(leaf, dim, f"{name!r}, {self._boundary}")

    def check_count(self, dims: Mapping[str, int]) -> None:
        """Raise ``PlanKeyError`` if not every name in ``dims`` had a tensor."""
        if self._count != len(dims):
            raise PlanKeyError(
                f"zigzag names {', '.join(map(repr, dims))} of {self._boundary}, which has {self._count} of them.",
                field="zigzag",
                key=next(iter(dims), ""),
                what_to_do="Name tensors by position (0, 1, ...) or by their key; call the model as it was planned.",
            )
