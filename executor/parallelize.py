"""``parallelize_module``: torch's call, with torch's styles, run by ``shard_module``."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.parallel import parallelize_module as torch_parallelize_module

from executor.launch.auto_parallelize import auto_parallelize
from executor.resolve.imported_plan import plan_mesh
from executor.resolve.sharder import Sharder
from executor.shard import shard_module
from executor.torch_internals.parallel import current_mesh
from planner.errors import MeshError, PlanTypeError
from planner.imported.parallel_styles import STYLES, plan_from_styles
from planner.plan.sharding_plan import ShardingPlan


def parallelize_module(
    module: nn.Module,
    device_mesh: DeviceMesh | None = None,
    parallelize_plan: ParallelStyle | Mapping[str, ParallelStyle] | None = None,
    *,
    src_data_rank: int | None = 0,
    example_inputs: Any = None,
    **options: Any,
) -> nn.Module:
    """Return ``module``, changed in place as torch's styles say; calls of torch's function run unchanged.

    The styles become a `ShardingPlan` (`planner.imported.parallel_styles`), so that gradients come out reduced, and
    what is wrong is an error before anything changes. Without styles, where torch does nothing, the module is planned
    for the mesh by `auto_parallelize`.

    Args:
        module: a module, plain where the styles name parameters. Other parts of it may be sharded already.
        device_mesh: a mesh of one axis; None: the mesh of the context (``with mesh:``).
        parallelize_plan: FQN pattern -> style, or the style of ``module`` itself. A key that matches nothing is skipped
            with a warning, as in torch. None: the fastest plan on the mesh.
        src_data_rank: as for ``shard_module``.
        example_inputs: without styles: as for `build_plan`.
        options: without styles: the fields of `JobSpec`.

    Raises:
        MeshError: no mesh, or one of several axes.
        PlanError: styles that do not fit the module; the message names style and key.
        PlannerError: without styles: there is no plan.
    """
    mesh = device_mesh or current_mesh()
    if mesh is None:
        raise MeshError(
            "parallelize_module got no device mesh, and is in the context of none.",
            what_to_do="Pass device_mesh, or call it inside `with mesh:`.",
        )
    if parallelize_plan is None and src_data_rank == 0:
        return auto_parallelize(module, example_inputs, mesh=mesh, **options)
    if options or example_inputs is not None:
        given = [*options, *([] if example_inputs is None else ["example_inputs"])]
        raise TypeError(f"parallelize_module takes {', '.join(given)} without a parallelize_plan only")
    if not isinstance(parallelize_plan, (ParallelStyle, Mapping)):
        raise PlanTypeError(
            f"parallelize_module got {type(parallelize_plan).__name__} as its parallelize_plan.",
            field="parallelize_plan",
            what_to_do="Give a ParallelStyle, or a dict from FQN to one; or none and no src_data_rank, to plan.",
        )
    if isinstance(parallelize_plan, ParallelStyle) and type(parallelize_plan) not in STYLES:
        # A style of the user's own for the root needs nothing of ours.
        return torch_parallelize_module(module, mesh, parallelize_plan, src_data_rank=src_data_rank)
    imported = plan_from_styles(module, plan_mesh(mesh), parallelize_plan)
    plan = _without_tied(module, mesh, imported.plan)
    for key in imported.unmatched:
        warnings.warn(f"parallelize_plan has the key {key!r}, which matches no module: skipped.", stacklevel=2)
    sharders = {
        name: _StyleSharder(style, mesh, src_data_rank=src_data_rank) for name, style in imported.sharders.items()
    }
    return shard_module(module, mesh, plan, sharders=sharders, src_data_rank=src_data_rank)


def _without_tied(module: nn.Module, mesh: DeviceMesh, plan: ShardingPlan) -> ShardingPlan:
    """Return ``plan`` without the parameters that have their layout already, from a call for the module they tie to."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    entries = {
        key: layout
        for key, layout in plan.plan.items()
        if not isinstance(parameter := parameters.get(key), DTensor)
        or parameter.device_mesh != mesh
        or parameter.placements != layout
    }
    return dataclasses.replace(plan, plan=entries)


class _StyleSharder(Sharder):
    """Applies a style of the user's own, as torch does."""

    def __init__(self, style: ParallelStyle, mesh: DeviceMesh, *, src_data_rank: int | None) -> None:
        self._style, self._mesh, self._src_data_rank = style, mesh, src_data_rank

    def shard(self, module: nn.Module) -> nn.Module:
        """Return ``module`` with the style applied."""
        return torch_parallelize_module(module, self._mesh, self._style, src_data_rank=self._src_data_rank)
