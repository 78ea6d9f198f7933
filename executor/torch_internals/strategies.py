"""DTensor's choice of an op's strategy, without the strategies that it cannot choose. Checked with torch 2.13."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement
from torch.distributed.tensor._collective_utils import redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OpSpec, OpStrategy
from torch.distributed.tensor._ops import utils

Strategies = Sequence[Sequence[Placement | None]]


@contextmanager
def matching_strategies_first() -> Iterator[None]:
    """Return a context in which DTensor makes the same choices in less time, on meshes of several axes.

    For most ops, DTensor takes the product of an op's strategies on one axis over all axes (nine strategies on three
    axes: 729) and prices each; of those that need no redistribution, it chooses the last. Here it looks first at the
    products of strategies that match the inputs on some axis, which hold all that need none, and at every product only
    where none does without.
    """
    expand = utils.expand_to_full_mesh_op_strategy
    users = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("torch.distributed.tensor") and vars(module).get(expand.__name__) is expand
    ]
    with ExitStack() as stack:
        for module in users:
            stack.enter_context(mock.patch.object(module, expand.__name__, _matching_first(expand)))
        yield


def _matching_first(expand: Callable[..., OpStrategy]) -> Callable[..., OpStrategy]:
    @wraps(expand)
    def expanded(
        mesh: DeviceMesh, op_schema: OpSchema, single_mesh_dim_strategies: Strategies, **options: Any
    ) -> OpStrategy:
        special = op_schema.kwargs_strategy or options.get("inplace_op") or options.get("different_mesh_args")
        given = [strategy.strategies[0].output_spec for strategy in op_schema.args_strategy]
        if not special and all(spec.mesh == mesh for spec in given):
            matching = _matching(given, single_mesh_dim_strategies, options.get("input_index", 1))
            if len(matching) < len(single_mesh_dim_strategies):
                with mock.patch.object(utils, utils.generate_redistribute_costs.__name__, _costs_where_free):
                    strategy = expand(mesh, op_schema, matching, **options)
                if any(_needs_no_redistribution(choice, given) for choice in strategy.strategies):
                    return strategy
        return expand(mesh, op_schema, single_mesh_dim_strategies, **options)

    return expanded


def _matching(given: Sequence[DTensorSpec], strategies: Strategies, number_of_outputs: int) -> Strategies:
    """Return the strategies of one axis, in their order, whose inputs lie as the ``given`` ones do on some axis."""
    on_axes = set(zip(*(spec.placements for spec in given), strict=True))
    return [
        strategy
        for strategy in strategies
        if tuple(placement for placement in strategy[number_of_outputs:] if placement is not None) in on_axes
    ]


def _costs_where_free(given: OpStrategy, wanted: DTensorSpec) -> list[float]:
    """Return the cost of a redistribution that is none; others cost more than any, and are not priced."""
    if given.strategies[0].output_spec.placements != wanted.placements:
        return [math.inf]
    return [redistribute_cost(given.strategies[0].output_spec, wanted)]


def _needs_no_redistribution(choice: OpSpec, given: Sequence[DTensorSpec]) -> bool:
    """Return what DTensor asks of a strategy that it prefers to all others."""
    wanted = [spec.placements for spec in choice.input_specs or ()]
    is_free = sum(itertools.chain.from_iterable(choice.redistribute_cost or ())) == 0
    return is_free and wanted == [spec.placements for spec in given]
