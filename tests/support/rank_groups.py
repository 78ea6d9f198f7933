"""Groups of ranks, and a size that is large for any of them, for the tests of collectives."""

from cost_model.collectives.axis_groups import AxisGroup

GIB = 1 << 30


def one_node(ranks: int) -> AxisGroup:
    return AxisGroup(nodes=1, ranks_per_node=ranks, groups_per_node=1)
