"""What DTensor itself does with one op: the one file that touches its private rules.

A strategy is not taken from a table. The op is run, forward and backward, on DTensors whose local tensors live on the
meta device, over a mesh without process groups: no data, no communication, no GPU. A collective has nowhere to go on
such a mesh and raises, so whatever comes through is what DTensor runs without one, with the layouts that it really
gives the outputs and the gradients.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from unittest import mock

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrder, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops import utils as dtensor_op_utils
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils import _pytree as pytree

from cost_model.layouts.layout import Layout, divides, local_shape
from planner.errors import UnsupportedTorchError
from planner.graph.op_graph import Op, Value
from planner.graph.run_op import run_op
from planner.regions.regions import op_signature
from planner.strategies.small_shapes import small

SUPPORTED_TORCH = ((2, 13), (2, 14))
"""From the first, up to and without the second: DTensor's rules are private and change between releases."""

T = TypeVar("T")

Layouts = tuple[Layout | None, ...]
"""One layout per tensor of an op; None for plain tensors, and for gradients that do not exist."""


def check_torch_version(version: str = torch.__version__) -> None:
    """Refuse a torch outside the supported range.

    Raises:
        UnsupportedTorchError: naming the version found and the range.
    """
    found = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    low, high = SUPPORTED_TORCH
    if not low <= found < high:
        raise UnsupportedTorchError(
            f"shardplan needs torch>={low[0]}.{low[1]},<{high[0]}.{high[1]} and found {version}.",
            what_to_do=f'Install it with: pip install "torch>={low[0]}.{low[1]},<{high[0]}.{high[1]}".',
        )


def mesh_without_groups(shape: Sequence[int]) -> DeviceMesh:
    """Return a mesh of ``shape``, seen from rank 0, on which no collective can run."""
    names = tuple(f"axis{i}" for i in range(len(shape)))
    ranks = torch.arange(math.prod(shape)).view(*shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


@contextmanager
def quiet_dtensor() -> Iterator[None]:
    """Silence what DTensor logs of the layouts that it refuses. (For many attempts at once: it takes a millisecond.)"""
    logger = logging.getLogger("torch.distributed.tensor")
    level = logger.level
    if level == logging.ERROR:
        yield
        return
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _free_or_not(current: Any, target: Any) -> float:
    """Return 0 where DTensor's own `redistribute_cost` is 0 (nothing to communicate), else more than 0.

    DTensor picks the first of the cheapest strategies. Which of them are free is all that matters here, and its own
    formula spends its time on pricing the others. It takes what leaves a strided shard for free (its prices know no
    such shard), and a change for dear that has to undo a split of the same dim further in.
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
class _Ran:
    """An op that was run on DTensors.

    Attributes:
        layouts: of its outputs; None where DTensor would communicate or refuses.
        backward: layouts of the outputs' gradients -> of the inputs', likewise.
    """

    tensors: list[torch.Tensor] = field(default_factory=list)
    outputs: list[DTensor] = field(default_factory=list)
    layouts: Layouts | None = None
    backward: dict[Layouts, Layouts | None] = field(default_factory=dict)


_default_order = functools.cache(DTensorSpec.compute_default_shard_order)
_verify_order = DTensorSpec._verify_shard_order


def _verified(spec: DTensorSpec, order: ShardOrder) -> None:
    """Refuse what DTensor does; the order that follows from the placements it need not look at."""
    if order is not _default_order(spec.placements):
        _verify_order(spec, order)


_OutputMeta = TensorMeta | Sequence[TensorMeta | None] | None


class WholeOutputs:
    """What ops make of whole tensors, which DTensor asks again for every layout of them; each is worked out once."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _OutputMeta] = {}
        self._asked = ShardingPropagator._propagate_tensor_meta_non_cached

    def of(self, propagator: ShardingPropagator, schema: OpSchema) -> _OutputMeta:
        """Return shape, strides and dtype of what the op of ``schema`` makes."""
        key = schema.op, _whole(schema.args_schema), _whole(schema.kwargs_schema)
        if key not in self._known:
            self._known[key] = self._asked(propagator, schema)
        return self._known[key]


def _whole(tree: Any) -> Hashable:
    """Return what an op sees of its arguments, whatever layouts they are in."""
    if isinstance(tree, DTensorSpec):
        return tree.tensor_meta
    if isinstance(tree, (tuple, list)):
        return tuple([_whole(part) for part in tree])
    if isinstance(tree, dict):
        return tuple([(key, _whole(part)) for key, part in tree.items()])
    return type(tree), tree if isinstance(tree, Hashable) else repr(tree)


def _tried(run: Callable[[], T], outputs: WholeOutputs) -> T | None:
    """Return what ``run`` does; None where DTensor cannot.

    It has no one error for "I cannot": whatever it raises means that this layout is not a strategy.
    """
    try:
        with (
            implicit_replication(),
            mock.patch.object(dtensor_op_utils, "redistribute_cost", _free_or_not),
            mock.patch.object(
                ShardingPropagator, "_propagate_tensor_meta_non_cached", lambda *asked: outputs.of(*asked)
            ),
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


class DTensorRules:
    """DTensor's behaviour on one mesh shape, op by op; every answer is remembered.

    Args:
        outputs: what ops make of whole tensors, known from other meshes.
    """

    def __init__(self, mesh_shape: Sequence[int], outputs: WholeOutputs | None = None) -> None:
        check_torch_version()
        self.mesh_shape = tuple(mesh_shape)
        self._size = math.prod(mesh_shape)
        self._mesh = mesh_without_groups(mesh_shape)
        self._whole = outputs or WholeOutputs()
        self._runs: dict[Hashable, _Ran] = {}

    def forward(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> Layouts | None:
        """Return the layouts of the op's outputs, or None where DTensor would communicate or refuses.

        Args:
            op: the op.
            inputs: its input values, global shapes.
            layouts: one per input; None for a plain tensor.
        """
        inputs = small(op, inputs, self._size)
        return self._ran(op, inputs, layouts).layouts

    def backward(self, op: Op, inputs: Sequence[Value], layouts: Layouts, output_gradients: Layouts) -> Layouts | None:
        """Return the layouts of the gradients of the op's inputs, or None where DTensor would communicate or refuses.

        Args:
            output_gradients: one per output; None where no gradient arrives.
        """
        inputs = small(op, inputs, self._size)
        ran = self._ran(op, inputs, layouts)
        if output_gradients not in ran.backward:
            found = None
            if ran.layouts is not None:
                found = _tried(lambda: self._differentiate(ran, inputs, output_gradients), self._whole)
            ran.backward[output_gradients] = found
        return ran.backward[output_gradients]

    def _ran(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> _Ran:
        key = (op_signature(op, tuple(inputs)), layouts)
        if key not in self._runs:
            self._runs[key] = self._run(op, inputs, layouts)
        return self._runs[key]

    def _run(self, op: Op, inputs: Sequence[Value], layouts: Layouts) -> _Ran:
        ran = _Ran()
        for value, layout in zip(inputs, layouts, strict=True):
            if layout is not None and not divides(value.shape, layout, self.mesh_shape):
                return ran
        ran.tensors = [self._tensor(value, layout) for value, layout in zip(inputs, layouts, strict=True)]
        results = _tried(lambda: pytree.tree_leaves(run_op(op, ran.tensors, functional=True)), self._whole)
        if results is None:
            return ran
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        outputs = [result for result in tensors if isinstance(result, DTensor)]
        if len(outputs) == len(tensors):
            ran.outputs = outputs
            ran.layouts = tuple(tuple(output.placements) for output in outputs)
        return ran

    def _differentiate(self, ran: _Ran, inputs: Sequence[Value], gradients: Layouts) -> Layouts:
        pairs = [
            (result, layout)
            for result, layout in zip(ran.outputs, gradients, strict=True)
            if layout is not None and result.requires_grad
        ]
        wanted = [tensor for tensor, value in zip(ran.tensors, inputs, strict=True) if value.requires_grad]
        arriving = [self._like(result, layout) for result, layout in pairs]
        outputs = [result for result, _ in pairs]
        found = iter(torch.autograd.grad(outputs, wanted, arriving, allow_unused=True, retain_graph=True))
        return tuple(self._layout_of(next(found)) if value.requires_grad else None for value in inputs)

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
