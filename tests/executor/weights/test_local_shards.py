"""The indices that a rank stores are those that ``distribute_tensor`` gives it."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from executor.torch_internals.dtensor import fake_process_group, local_of
from executor.weights.local_shards import local_indices, stored_indices

PLACEMENTS = (Replicate(), Shard(0), Shard(1), _StridedShard(0, split_factor=2), _StridedShard(1, split_factor=3))


@pytest.mark.parametrize("shape", [(12, 12), (7, 5), (1, 3)])
def test_a_rank_stores_what_distribute_tensor_gives_it(shape: tuple[int, int]) -> None:
    whole = torch.arange(float(shape[0] * shape[1])).reshape(shape)
    with fake_process_group(6):
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))
        for layout in itertools.product(PLACEMENTS, repeat=2):
            if any(isinstance(place, _StridedShard) for place in layout) and shape != (12, 12):
                continue  # torch needs strided shards to be even
            tensor = distribute_tensor(whole, mesh, layout, src_data_rank=None)
            rows, columns = local_indices(tensor)
            assert torch.equal(local_of(tensor), whole[rows][:, columns]), layout


@pytest.mark.parametrize(
    "layout", [(Shard(0), Shard(0)), (Shard(1), Shard(0)), (_StridedShard(0, split_factor=3), Shard(0))]
)
def test_all_ranks_store_each_index_once(layout: tuple[Shard, Shard]) -> None:
    seen = torch.zeros(12, 5)
    for coordinate in itertools.product(range(2), range(3)):
        rows, columns = stored_indices(seen.shape, layout, (2, 3), coordinate)
        seen[rows.unsqueeze(1), columns] += 1
    assert torch.equal(seen, torch.ones_like(seen))
