"""`DTensorRules`: the layouts in which DTensor runs an op without communication. Only this file uses its private rules.

The rules are not a table. The op runs, forward and backward, on DTensors whose local tensors are on the meta device,
over a mesh without process groups: no data, no communication, no GPU. A collective raises an error on such a mesh. An
op that completes therefore needs no collective, and its outputs and gradients have the layouts that DTensor really
gives them.
"""

from __future__ import annotations

import functools
import logging
import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import utils as dtensor_op_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, divides, local_shape
from cost_model.layouts.mended_torch import mend_torch
from cost_model.layouts.quicker_dtensor import OutputMeta, global_outputs, quicker_dtensor
from planner.errors import UnsupportedTorchError
from planner.graph.op_graph import Op, Value, written_input
from planner.graph.run_op import run_op
from planner.regions.regions import op_signature
from planner.strategies.small_shapes import with_small_shapes

mend_torch()

SUPPORTED_TORCH = ((2, 13), (2, 14))
"""First supported release, and first one after it that is not: DTensor's private rules change between releases."""

T = TypeVar("T")

Layouts = tuple[Layout | None, ...]
"""One layout per tensor of an op; None for a plain tensor, and for a gradient that does not exist."""


def check_torch_version(version: str = torch.__version__) -> None:
    """Check that torch is a supported release.

    Raises:
        UnsupportedTorchError: it is not; the message names its version and the supported range.
    """
    release = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED_TORCH
    if not low <= release < high:
        raise UnsupportedTorchError(
            f"shardplan needs torch>={low[0]}.{low[1]},<{high[0]}.{high[1]} and found {version}.",
            what_to_do=f'Install it with: pip install "torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}".',
        )


def mesh_without_groups(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of ``shape`` without process groups, on which no collective can run, as rank 0 sees it."""
    names = tuple(f"axis{i}" for i in range(len(shape)))
    ranks = torch.arange(math.prod(shape)).view(*shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def is_unruled_in_place_view(target: Any) -> bool:
    """Return whether ``target`` changes its tensor to a view, such as ``unsqueeze_``, and DTensor has no rule for it.

    Rules are tried on the variant that returns a new tensor.
    """
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.inplace_view not in target.tags:
        return False
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    return target not in propagator.op_strategy_funcs and target not in propagator.op_single_dim_strategy_funcs


@contextmanager
def quiet_dtensor() -> Iterator[None]:
    """Silence DTensor's log of layouts that it refuses, and its warning that random ops differ on CPUs.

    The executor runs random ops itself (`executor.runtime.random_state`). Entering takes a millisecond: enter once for
    many ops.
    """
    logger = logging.getLogger("torch.distributed.tensor")
    shapes = logging.getLogger("torch._subclasses.fake_tensor")
    level, shapes_level = logger.level, shapes.level
    if level == logging.ERROR:
        yield
        return
    logger.setLevel(logging.ERROR)
    shapes.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), quicker_dtensor():
            warnings.filterwarnings("ignore", "DTensor random operators", UserWarning)
            yield
    finally:
        logger.setLevel(level)
        shapes.setLevel(shapes_level)


def _free_or_not(current: Any, target: Any) -> float:
    """Return 0 where DTensor's `redistribute_cost` is 0 (nothing to communicate), and more than 0 elsewhere.

    This function replaces `redistribute_cost` for speed. DTensor picks the first of its cheapest strategies. Only
    strategies without communication matter here, but DTensor's formula spends its time on pricing all others. Like
    that formula, this function returns 0 for a change from a strided shard, and more than 0 for a change that has to
    undo a split of the same dim on an inner axis.
    """
    if current.is_replicated():
        return 0.0
    if current.shard_order is None or target.shard_order is None:
        return 0.0 if current.placements == target.placements else math.inf
    pairs = list(zip(current.placements, target.placements, strict=True))
    for axis, (before, after) in enumerate(pairs):
        if before == after:
            continue
        if not (before.is_replicate() or isinstance(before, _StridedShard)):
            return 1.0
        dims = {placement.dim for placement in (before, after) if isinstance(placement, (Shard, _StridedShard))}
        if any(inner == stays and type(inner) is Shard and inner.dim in dims for inner, stays in pairs[axis + 1 :]):
            return 1.0
    return 0.0 if current.placements != target.placements or current.shard_order == target.shard_order else 1.0


@dataclass(slots=True)
class _OpRun:
    """A run of an op on DTensors.

    Attributes:
        tensors, outputs: inputs and outputs of the op.
        layouts: layouts of the outputs; None if DTensor would communicate, or refuses.
        backward: layouts of the outputs' gradients -> layouts of the inputs' gradients; None as for ``layouts``.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[DTensor] = field(default_factory=list)
    layouts: Layouts | None = None
    backward: dict[Layouts, Layouts | None] = field(default_factory=dict)


_default_order = functools.cache(DTensorSpec.compute_default_shard_order)
_verify_order = DTensorSpec._verify_shard_order


def _verified(spec: DTensorSpec, order: ShardOrder) -> None:
    """Check a shard order as DTensor does, but skip the default order, which needs no check."""
    if order is not _default_order(spec.placements):
        _verify_order(spec, order)


class GlobalOutputs:
    """Cache of the global shapes, strides and dtypes of ops' outputs; DTensor itself computes them for every layout."""

    def __init__(self) -> None:
        self._metas: dict[Hashable, OutputMeta] = {}
        self._compute = global_outputs

    def of(self, propagator: ShardingPropagator, schema: OpSchema) -> OutputMeta:
        """Return the global shape, strides and dtype of the outputs of the op of ``schema``."""
        key = schema.op, _without_layouts(schema.args_schema), _without_layouts(schema.kwargs_schema)
        if key not in self._metas:
            self._metas[key] = self._compute(propagator, schema)
        return self._metas[key]


def _without_layouts(tree: Any) -> Hashable:
    """Return a key of an op's arguments that does not depend on their layouts."""
    if isinstance(tree, DTensorSpec):
        return tree.tensor_meta
    if isinstance(tree, (tuple, list)):
        return tuple([_without_layouts(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, _without_layouts(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)


def _try(run: Callable[[], T], outputs: GlobalOutputs) -> T | None:
    """Return what ``run`` returns; None where DTensor raises an error.

    DTensor has no common error class for layouts that it does not support. Any of the errors below means that the
    layouts are no strategy.
    """
    try:
        with (
            implicit_replication(),
            mock.patch.object(dtensor_op_utils, "redistribute_cost", _free_or_not),
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", lambda *args: outputs.of(*args)),
            mock.patch.object(DTensorSpec, "compute_default_shard_order", staticmethod(_default_order)),
            mock.patch.object(DTensorSpec, "_verify_shard_order", _verified),
        ):
            return run()
    except (
        RuntimeError,
        AttributeError,
        ValueError,
        NotImplementedError,
        IndexError,
        AssertionError,
        TypeError,
        KeyError,
    ):
        return None


def _keeps_written(op: Op, inputs: Layouts, outputs: Layouts) -> bool:
    """Return whether an op in place leaves the tensor that it writes in its layout.

    Here it runs out of place. In place, DTensor would redistribute the other tensors to that layout.
    """
    written = written_input(op.target, len(inputs))
    return written is None or inputs[written] is None or not outputs or outputs[0] == inputs[written]


class DTensorRules:
    """DTensor's behaviour on one mesh shape, op by op; each op runs once per combination of layouts.

    Args:
        outputs: cache of the ops' global outputs, which mesh shapes can share.
        real_shapes: whether ops run at the shapes of their inputs. If not, small shapes stand for them. That is faster,
            but a rank may then hold several rows where it really has one, which DTensor may treat differently.
    """

    def __init__(
        self, mesh_shape: Sequence[int], outputs: GlobalOutputs | None = None, *, real_shapes: bool = False
    ) -> None:
        check_torch_version()
        self._real_shapes = real_shapes
        self.mesh_shape = tuple(mesh_shape)
        self._size = math.prod(mesh_shape)
        self._mesh = mesh_without_groups(mesh_shape)
        self._outputs = outputs or GlobalOutputs()
        self._runs: dict[Hashable, _OpRun] = {}
        self._signatures: dict[Hashable, tuple[Op, Hashable]] = {}  # with the op, so that its id stays its own

    def forward(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> Layouts | None:
        """Return the layouts of the op's outputs; None where DTensor would communicate, or refuses.

        Args:
            inputs: the op's inputs, with global shapes.
            layouts: layout of each input; None for a plain tensor.
        """
        inputs = self._shaped(op, inputs)
        return self._run_once(op, inputs, layouts).layouts

    def backward(self, op: Op, inputs: Sequence[Value], layouts: Layouts, output_gradients: Layouts) -> Layouts | None:
        """Return the layouts of the gradients of the op's inputs; None where DTensor would communicate, or refuses.

        Args:
            output_gradients: layout of the gradient of each output; None where none arrives.
        """
        inputs = self._shaped(op, inputs)
        op_run = self._run_once(op, inputs, layouts)
        if output_gradients not in op_run.backward:
            gradients = None
            if op_run.layouts is not None:
                gradients = _try(lambda: self._differentiate(op_run, inputs, output_gradients), self._outputs)
            op_run.backward[output_gradients] = gradients
        return op_run.backward[output_gradients]

    def _shaped(self, op: Op, inputs: Sequence[Value]) -> Sequence[Value]:
        return inputs if self._real_shapes else with_small_shapes(op, inputs, self._size)

    def _run_once(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> _OpRun:
        key = (self._signature(op, inputs), layouts)
        if key not in self._runs:
            self._runs[key] = self._run(op, inputs, layouts)
        return self._runs[key]

    def _signature(self, op: Op, inputs: Sequence[Value]) -> Hashable:
        """Return `op_signature`, computed once for an op at one set of shapes."""
        key = id(op), tuple([value.shape for value in inputs])
        if key not in self._signatures:
            self._signatures[key] = op, op_signature(op, tuple(inputs))
        return self._signatures[key][1]

    def _run(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> _OpRun:
        op_run = _OpRun()
        for value, layout in zip(inputs, layouts, strict=True):
            if layout is not None and not divides(value.shape, layout, self.mesh_shape):
                return op_run
        op_run.tensors = [self._tensor(value, layout) for value, layout in zip(inputs, layouts, strict=True)]
        results = _try(lambda: pytree.tree_leaves(run_op(op, op_run.tensors, functional=True)), self._outputs)
        if results is None:
            return op_run
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        outputs = [result for result in tensors if isinstance(result, DTensor)]
        found = tuple(tuple(output.placements) for output in outputs)
        if len(outputs) == len(tensors) and _keeps_written(op, layouts, found):
            op_run.outputs, op_run.layouts = outputs, found
        return op_run

    def _differentiate(self, op_run: _OpRun, inputs: Sequence[Value], gradients: Layouts) -> Layouts:
        pairs = [
            (result, layout)
            for result, layout in zip(op_run.outputs, gradients, strict=True)
            if layout is not None and result.requires_grad
        ]
        differentiable = [tensor for tensor, value in zip(op_run.tensors, inputs, strict=True) if value.requires_grad]
        arriving = [self._like(result, layout) for result, layout in pairs]
        outputs = [result for result, _ in pairs]
        input_gradients = iter(
            torch.autograd.grad(outputs, differentiable, arriving, allow_unused=True, retain_graph=True)
        )
        return tuple(self._layout_of(next(input_gradients)) if value.requires_grad else None for value in inputs)

    @staticmethod
    def _layout_of(gradient: torch.Tensor | None) -> Layout | None:
        if gradient is None:
            return None
        if not isinstance(gradient, DTensor):
            raise RuntimeError("the gradient of a DTensor came out as a plain tensor")
        return tuple(gradient.placements)

    def _tensor(self, value: Value, layout: Layout | None) -> torch.Tensor:
        if layout is None:
            return torch.empty(value.shape, dtype=value.dtype, device="meta")
        local = torch.empty(local_shape(value.shape, layout, self.mesh_shape), dtype=value.dtype, device="meta")
        tensor = DTensor.from_local(local, self._mesh, layout, run_check=False)
        return tensor.requires_grad_() if value.requires_grad else tensor

    def _like(self, result: DTensor, layout: Layout) -> DTensor:
        local = torch.empty(
            local_shape(tuple(result.shape), layout, self.mesh_shape), dtype=result.dtype, device="meta"
        )
        return DTensor.from_local(local, self._mesh, layout, run_check=False)
