"""The device mesh of a plan: one for equal meshes, as long as the default process group lives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from executor.resolve.mesh import device_mesh_for


def plan_on(shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    return SimpleNamespace(mesh=SimpleNamespace(device="cpu", shape=shape, names=names))


def test_plans_of_equal_meshes_share_one_device_mesh_in_one_process_group() -> None:
    meshes = []
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        try:
            mesh = device_mesh_for(plan_on((2, 2), ("dp", "tp")))
            assert device_mesh_for(plan_on((2, 2), ("dp", "tp"))) is mesh
            for other in (plan_on((4,), ("dp",)), plan_on((2, 2), ("dp", "cp"))):
                assert device_mesh_for(other) is not mesh
            assert mesh.mesh_dim_names == ("dp", "tp")
            meshes.append(mesh)
        finally:
            dist.destroy_process_group()
    assert meshes[0] is not meshes[1]
