"""Images whose sizes a table says (`planner.model_rewrites.image_sizes`), in the arguments of the root.

The table becomes that of the whole micro-batch, a plain tensor: its values are sizes in Python. Position ids that the
model would make of a whole batch's values are made before the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, shard_counts
from executor.resolve.batch import position_ids_of
from executor.resolve.fqns import positional_names
from executor.resolve.tensor_paths import change_arguments
from executor.runtime.whole_batches import BatchForm
from planner.errors import JobError, PlanLayoutError
from planner.model_rewrites.image_sizes.positions import POSITION_IDS, with_position_ids
from planner.model_rewrites.image_sizes.tables import check_alike, may_be_table, samples_of, size_tables, whole_table
from planner.model_rewrites.image_sizes.values import as_numbers, is_numbers
from planner.model_rewrites.replaced_calls.split_and_cat import parts_together
from planner.model_rewrites.tree_paths import tensors_in
from planner.plan.ports import Port


def attach_packed_images(
    module: nn.Module, ports: Mapping[str, Port], device_mesh: DeviceMesh, form: BatchForm
) -> None:
    """Hook the root ``module``. Call this before ``attach_root_arguments``, whose arguments these are."""
    if ports:
        hooks = _PackedImages(ports, positional_names(module), device_mesh, form)
        module.register_forward_pre_hook(hooks.enter, with_kwargs=True)
        module.register_forward_hook(hooks.leave, always_call=True)


class _PackedImages:
    """The hooks of one root."""

    def __init__(
        self, ports: Mapping[str, Port], positional: tuple[str, ...], device_mesh: DeviceMesh, form: BatchForm
    ) -> None:
        self._ports, self._positional, self._mesh, self._form = ports, positional, device_mesh, form
        self._contexts = ExitStack()

    def enter(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with whole tables and position ids, and keep the features of all images together."""
        self._contexts.close()
        layouts: dict[int, Layout] = {}

        def note(leaf: Any, port: Port, name: str) -> Any:
            layouts[id(leaf)] = port.layout
            return leaf

        change_arguments(self._ports, self._positional, note, args, kwargs)
        tensors = [tensor for tensor in tensors_in((args, kwargs)) if not isinstance(tensor, DTensor)]
        whole = self._whole_tables(tensors, layouts)
        if not whole:
            return args, kwargs
        self._contexts.enter_context(parts_together(lambda tensor: isinstance(tensor, DTensor)))
        kwargs = self._with_position_ids(module, args, kwargs, [t for t in tensors if id(t) in whole])
        changed: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
            lambda leaf: whole.get(id(leaf), leaf), (args, kwargs)
        )
        return changed

    def _whole_tables(self, tensors: Sequence[torch.Tensor], layouts: Mapping[int, Layout]) -> dict[int, torch.Tensor]:
        """Return ``id`` of a table among ``tensors`` -> the table of all images of the micro-batch.

        It may be whole already, as ``local_batch`` returns it, or the part of this rank's samples. No plan names it.

        Args:
            tensors: the plain ones of the call.
            layouts: ``id`` of a tensor that the plan names -> its layout.
        """
        known = {id(tensor): tensor for tensor in tensors if is_numbers(tensor)}
        if known:
            return known
        unnamed = [tensor for tensor in tensors if id(tensor) not in layouts and may_be_table(tensor)]
        if not unnamed:
            return {}
        named = [tensor for tensor in tensors if id(tensor) in layouts]
        parts = [table for table in size_tables(tensors) if id(table.tensor) not in layouts]
        if parts:
            check_alike(parts, samples_of(tensors, parts), {})
            return {
                id(table.tensor): as_numbers(whole_table(table, self._ranks(table.packed, layouts))) for table in parts
            }
        of_all = [
            torch.empty(
                (len(tensor) * self._ranks(tensor, layouts), *tensor.shape[1:]), dtype=tensor.dtype, device="meta"
            )
            for tensor in named
            if tensor.dim()
        ]
        return {id(table.tensor): as_numbers(whole_table(table, 1)) for table in size_tables([*unnamed, *of_all])}

    def _with_position_ids(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], tables: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        """Return the keyword arguments with position ids, if the plan has them and they are not given.

        Raises:
            PlanLayoutError: they cannot be made of this rank's slices.
        """
        if POSITION_IDS not in self._ports or kwargs.get(POSITION_IDS) is not None:
            return kwargs
        made = next((ids for table in tables if (ids := position_ids_of(table, module)) is not None), None)
        if made is not None:
            return {**kwargs, POSITION_IDS: made.to(tables[0].device)}
        try:
            kwargs = with_position_ids(module, args, kwargs)
        except JobError as error:
            raise PlanLayoutError(
                f"position_ids are not given, and cannot be made of this rank's slices: {error.detail}",
                field="input_plan",
                key=POSITION_IDS,
                what_to_do="Pass what local_batch returns, or position_ids among the arguments of the plan.",
            ) from error
        return kwargs

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Leave the contexts of the forward."""
        self._contexts.close()

    def _ranks(self, tensor: torch.Tensor, layouts: Mapping[int, Layout]) -> int:
        """Return the number of parts into which the rows of a tensor are split between ranks."""
        layout = layouts.get(id(tensor))
        if self._form.is_whole or layout is None:
            return 1
        return shard_counts(layout, tuple(self._mesh.shape), tensor.dim())[0]
