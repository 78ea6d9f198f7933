import pytest

from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.rank_groups import strided_group


def test_ranks_and_batch_multiply_their_degrees():
    spec = ParallelSpec(
        micro_batch=2, micro_batches=3, seq=8, replicate=2, shard=4, zero=3, tensor=2, pipeline=5, context=2
    )
    assert (spec.data, spec.ranks, spec.global_batch, spec.tokens) == (8, 160, 48, 8)


@pytest.mark.parametrize("wrong", [{"tensor": 0}, {"micro_batch": 0}, {"zero": 4}])
def test_degrees_below_one_are_rejected(wrong):
    with pytest.raises(ValueError, match=r"below 1|zero is"):
        ParallelSpec(**{"micro_batch": 1, "seq": 8, **wrong})


@pytest.mark.parametrize(
    ("size", "stride", "expected"),
    [(8, 1, (1, 8, 1)), (16, 1, (2, 8, 1)), (4, 8, (4, 1, 8)), (8, 2, (2, 4, 2)), (4, 2, (1, 4, 1))],
)
def test_groups_lie_on_nodes_of_eight(size, stride, expected):
    group = strided_group(size, stride, 8)
    assert (group.nodes, group.ranks_per_node, group.groups_per_node) == expected
