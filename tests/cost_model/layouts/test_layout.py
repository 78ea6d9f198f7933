"""Meshes and layouts as text and as shapes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Partial, Replicate, Shard

from cost_model.layouts.layout import (
    LayoutError,
    MeshSpec,
    divides,
    format_layout,
    local_shape,
    parse_layout,
    parse_placement,
    replicated,
    shard_counts,
    split_factor,
)

R, P, S0, S1 = Replicate(), Partial(), Shard(0), Shard(1)


def test_a_mesh_reads_as_it_is_written() -> None:
    mesh = MeshSpec.parse(" dp = 2, tp=8")
    assert (mesh.names, mesh.shape, mesh.size, str(mesh)) == (("dp", "tp"), (2, 8), 16, "dp=2,tp=8")
    assert mesh.axis_size("tp") == 8


@pytest.mark.parametrize("text", ["", "dp", "dp=", "dp=x", "dp=0", "dp=2,dp=2", "2dp=2", "dp=-1", "dp=2;tp=2"])
def test_invalid_meshes_are_rejected(text: str) -> None:
    with pytest.raises(LayoutError):
        MeshSpec.parse(text)


PLACEMENTS = st.one_of(
    st.just(R),
    st.sampled_from([Partial("sum"), Partial("avg")]),
    st.integers(0, 12).map(Shard),
    st.tuples(st.integers(0, 3), st.integers(2, 16)).map(lambda pair: parse_placement(f"SS({pair[0]},{pair[1]})")),
)


@given(layout=st.lists(PLACEMENTS, max_size=3).map(tuple))
def test_layouts_survive_their_text(layout: tuple[object, ...]) -> None:
    assert parse_layout(format_layout(layout)) == layout  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["", "S", "S(-1)", "s(0)", "P", "P(max)", "SS(0)", "R ", "S(0)x"])
def test_invalid_placements_are_rejected(text: str) -> None:
    with pytest.raises(LayoutError, match="cannot read placement"):
        parse_placement(text)


def test_shapes_of_pieces() -> None:
    assert shard_counts((S0, S0), (2, 4), 2) == (8, 1)
    assert local_shape((16, 6), (S0, S1), (4, 3)) == (4, 2)
    assert local_shape((16, 6), (S0, S0), (2, 4)) == (2, 6)
    assert local_shape((16, 6), (P, R), (2, 4)) == (16, 6)
    assert split_factor((S0, P), (2, 4)) == 2
    assert replicated(2) == (R, R)
    assert divides((16, 6), (S1, R), (2, 4))
    assert not divides((16, 6), (S1, S1), (2, 4))
    assert not divides((16,), (S1, R), (1, 1))
    with pytest.raises(LayoutError, match="does not divide evenly"):
        local_shape((16, 6), (S1, R), (4, 1))
