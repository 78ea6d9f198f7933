"""Assignments to parts of DTensors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.gloo import run_on_gloo
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from executor.ops.dispatch import OwnOps
from executor.redistribute import Redistributor
from executor.runtime.implicit_replication import implicit_replication
from planner.errors import RunError

CASES: dict[str, tuple[Any, Any]] = {
    "the first column": ((..., 0), 5),
    "a slice, from a tensor": ((slice(None), slice(1, None)), torch.full((4, 2), 9)),
    "a row of a whole dim": (1, 7),
    "a mask of rows, from a vector": (torch.tensor([True, False, False, True]), torch.tensor([7, 8, 9])),
    "a mask of columns": ((slice(None), torch.tensor([True, False, True])), 5),
}


def assign(rank: int) -> dict[str, bool | str]:
    mesh = init_device_mesh("cpu", (2,))
    redistributor = Redistributor(mesh, ClusterSpec.parse("1x2xtoy"), MeshSpec.parse("dp=2"))
    results: dict[str, bool | str] = {}
    for name, (index, value) in CASES.items():
        expected = torch.arange(12).reshape(4, 3)
        placement = Replicate() if name == "a row of a whole dim" else Shard(0)
        tensor = distribute_tensor(expected.clone(), mesh, [placement])
        expected[index] = value
        with implicit_replication(), OwnOps(redistributor):
            tensor[index] = DTensor.from_local(value, mesh, [Replicate()]) if isinstance(value, torch.Tensor) else value
        results[name] = torch.equal(tensor.full_tensor(), expected)
    try:
        with OwnOps(redistributor):
            distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)])[1] = 1.0
    except RunError as error:
        results["sharded"] = str(error)
    return results


def test_assignments_reach_the_tensor_or_raise() -> None:
    for results in run_on_gloo(assign, 2):
        assert "along a dim that is sharded (S(0))" in str(results.pop("sharded"))
        assert results == dict.fromkeys(CASES, True)


@pytest.mark.parametrize("index", [torch.tensor([0, 1]), [0, 1], (torch.tensor([True]), np.array([0]))])
def test_other_indices_are_left_to_dtensor(index: Any) -> None:
    from executor.ops.set_item import set_item

    assert set_item(None, torch.zeros(2), index, 1.0) is NotImplemented  # type: ignore[arg-type]
