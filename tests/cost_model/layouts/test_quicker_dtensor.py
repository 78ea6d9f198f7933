"""DTensor's answers, from fewer strategies and without fake tensors, are those that it gives elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.debug import CommDebugMode

from cost_model.layouts.quicker_dtensor import global_outputs, quicker_dtensor
from executor.torch_internals.caches import empty_caches_of_shapes
from executor.torch_internals.dtensor import fake_process_group, make_dtensor

OPS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "mm": ([(16, 16), (16, 16)], torch.mm),
    "bmm": ([(8, 16, 16), (8, 16, 16)], torch.bmm),
    "addmm": ([(16,), (16, 16), (16, 16)], torch.addmm),
    "add": ([(8, 16, 16), (16,)], torch.add),
    "silu": ([(8, 16, 16)], torch.nn.functional.silu),
    "softmax": ([(8, 16, 16)], lambda x: x.softmax(-1)),
    "sum": ([(8, 16, 16)], lambda x: x.sum(1)),
    "cat": ([(8, 16), (8, 16)], lambda *x: torch.cat(x, 1)),
    "layer_norm": ([(8, 16, 16), (16,), (16,)], lambda x, w, b: torch.nn.functional.layer_norm(x, (16,), w, b)),
    "attention": ([(8, 8, 16, 16)] * 3, torch.nn.functional.scaled_dot_product_attention),
    "topk": ([(8, 16, 16)], lambda x: x.topk(2, -1)),
    "transpose": ([(8, 16, 16)], lambda x: x.transpose(0, 2).contiguous().view(64, 32)),
    "split": ([(16, 16)], lambda x: x.split([4, 12], 1)),
    "convolution": ([(8, 4, 16, 16), (4, 4, 3, 3)], lambda x, w: torch.nn.functional.conv2d(x, w, padding=1)),
    "index": ([(8, 16, 16)], lambda x: x[:, [1, 2]]),
}


def placements_of(shape: tuple[int, ...]) -> st.SearchStrategy[Placement]:
    shards = [Shard(dim) for dim in range(len(shape))]
    return st.sampled_from([Replicate(), Partial(), *shards])


def laid_out(shape: tuple[int, ...], mesh: DeviceMesh, layout: tuple[Placement, ...]) -> DTensor:
    local = list(shape)
    for placement, size in zip(layout, mesh.shape, strict=True):
        if isinstance(placement, Shard):
            local[placement.dim] //= size
    stride = torch.empty(shape, device="meta").stride()
    return make_dtensor(torch.empty(local, device="meta"), mesh, layout, torch.Size(shape), stride)


def run(name: str, inputs: list[tuple[Placement, ...]], mesh: DeviceMesh) -> Any:
    """Return layout, shape and strides of an op's results, and the collectives; or the kind of its error."""
    shapes, op = OPS[name]
    empty_caches_of_shapes()
    tensors = [laid_out(shape, mesh, layout) for shape, layout in zip(shapes, inputs, strict=True)]
    with CommDebugMode() as collectives:
        try:
            results = op(*tensors)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return type(error)
    found = [(each.placements, each.shape, each.stride()) for each in torch.utils._pytree.tree_leaves(results)]
    return found, collectives.get_comm_counts()


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (2, 2, 2)], ids=str)
@settings(deadline=None, max_examples=10, phases=(Phase.generate,))
@given(data=st.data())
def test_that_choices_are_the_same(sizes: tuple[int, ...], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(OPS)))
    inputs = [data.draw(st.tuples(*[placements_of(shape)] * len(sizes))) for shape in OPS[name][0]]
    with fake_process_group(math.prod(sizes)):
        mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()).reshape(sizes))
        elsewhere = run(name, inputs, mesh)
        with quicker_dtensor():
            assert run(name, inputs, mesh) == elsewhere


def test_results_on_a_named_device_are_not_allocated() -> None:
    elements = 1 << 50
    with fake_process_group(2):
        x = laid_out((8, 16), DeviceMesh("cpu", torch.arange(2)), (Shard(0),))
    schema = OpSchema(torch.ops.aten.new_zeros.default, (x._spec, [elements]), {"device": torch.device("cpu")})
    made = global_outputs(DTensor._op_dispatcher.sharding_propagator, schema)
    assert isinstance(made, TensorMeta)
    assert made.shape == (elements,)
