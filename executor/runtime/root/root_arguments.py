"""Arguments of the root: those of floating point get the compute dtype, as under torch's mixed precision.

Those that the plan does not name, such as an attention mask, get layouts from named ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, shard_counts
from executor.resolve.batch import layout_like
from executor.resolve.fqns import positional_names
from executor.resolve.tensor_paths import change_arguments
from executor.runtime.whole_batches import BatchForm
from planner.model_rewrites.image_sizes.values import is_numbers
from planner.model_rewrites.tree_paths import path_text
from planner.plan.ports import Port


def attach_root_arguments(
    module: nn.Module, ports: Mapping[str, Port], device_mesh: DeviceMesh, form: BatchForm, dtype: torch.dtype | None
) -> None:
    """Hook the root ``module``. Call this before ``attach_ports``.

    Args:
        module: the root.
        ports: argument of the root -> its port.
        device_mesh: mesh of the ranks that run the plan.
        form: whether batches are whole; then every plain tensor is whole, and none needs a layout.
        dtype: the compute dtype, for which the module was planned; None: arguments keep their dtypes.
    """

    def cast(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_only(
            torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs)
        )
        return changed

    if dtype is not None:
        module.register_forward_pre_hook(cast, with_kwargs=True)
    if ports:
        hook = _RootArguments(ports, positional_names(module), device_mesh, form)
        module.register_forward_pre_hook(hook, with_kwargs=True)


class _RootArguments:
    """A forward pre-hook on the root that makes DTensors of this rank's shards of arguments not in the plan."""

    def __init__(
        self, ports: Mapping[str, Port], positional: tuple[str, ...], device_mesh: DeviceMesh, form: BatchForm
    ) -> None:
        self._ports, self._positional, self._mesh, self._form = ports, positional, device_mesh, form

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        planned: list[tuple[Sequence[int], Layout]] = []
        seen: set[int] = set()

        def note(leaf: Any, port: Port, name: str) -> Any:
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                planned.append((leaf.shape, port.layout))
            seen.add(id(leaf))
            return leaf

        change_arguments(self._ports, self._positional, note, args, kwargs)
        self._form.samples = self._samples(planned)
        if self._form.is_whole:
            return args, kwargs

        def place(path: tuple[Any, ...], leaf: Any) -> Any:
            is_plain = isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor)
            if not is_plain or is_numbers(leaf) or id(leaf) in seen or not planned or leaf.dim() == 0:
                return leaf
            layout = layout_like(leaf.shape, planned, path_text(path[1:]), self._ports)
            return DTensor.from_local(leaf, self._mesh, layout, run_check=False)

        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map_with_path(place, (args, kwargs))
        return changed

    def _samples(self, planned: Sequence[tuple[Sequence[int], Layout]]) -> int | None:
        """Return the first dim of the first named tensor, of the global micro-batch; None without a named tensor."""
        if not planned or not planned[0][0]:
            return None
        shape, layout = planned[0]
        if self._form.is_whole:
            return shape[0]
        counts = shard_counts(layout, tuple(self._mesh.shape), len(shape))
        return shape[0] * counts[0]
