"""The correction of NCCL's lines: its formula by hand, its limits, and the shipped constants."""

import math
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cost_model
from cost_model.collectives.correction import architecture_class, corrected, read_correction, shipped_correction
from cost_model.collectives.nccl import CostLine
from cost_model.collectives.price import AxisGroup, collective_lines, collective_time_s, price_curves
from cost_model.hardware.cluster import ClusterSpec, find_device
from cost_model.hardware.devices import read_link

PLACE = {
    "ll_latency": 2.0,
    "ll128_latency": 2.0,
    "simple_latency": 2.0,
    "nvls_latency": 2.0,
    "pairs_latency": 2.0,
    "ramp": 3.0,
    "ramp_limit": 4.0,
    "pairs_ramp": 3.0,
    "pairs_ramp_limit": 4.0,
}
TABLES = {
    "one_node": PLACE,
    "several_nodes": PLACE | {"ll_latency": 5.0},
    "architectures": {"hopper_on": 1.0, "before_hopper": 1.5, "amd": 2.5},
    "pairs": {"link_share": 0.9, "card_share": 0.8, "few_channels_bytes_per_s": 80e9, "few_channels_bytes": 1000.0},
}
SHIPPED = tomllib.loads(
    (Path(cost_model.__file__).parent / "collectives" / "collectives.toml").read_text(encoding="utf-8")
)


def test_corrected_time_by_hand() -> None:
    # L = 10 us, T = 20 us: 2 L + T + 3 sqrt(L T / (1 + T / (4 L)))
    line = CostLine("ring LL", "LL", 10e-6, 1e-9)
    correction = read_correction(TABLES)
    curve = corrected(line, several_nodes=False, architecture="hopper_on", correction=correction)
    assert curve.time_s(20_000) == pytest.approx(40e-6 + 3e-6 * math.sqrt(10 * 20 / 1.5))
    # several nodes have their own factor, an architecture's is on L, in the root as well
    curve = corrected(line, several_nodes=True, architecture="before_hopper", correction=correction)
    assert curve.time_s(20_000) == pytest.approx(75e-6 + 20e-6 + 3e-6 * math.sqrt(15 * 20 / (1 + 20 / 60)))


def test_long_messages_take_a_constant_longer() -> None:
    line = CostLine("nvls", "nvls", 10e-6, 1e-9)
    curve = corrected(line, several_nodes=False, architecture="hopper_on", correction=read_correction(TABLES))
    # the root tends to 3 L sqrt(4) = 60 us
    assert curve.time_s(10**13) - 10**4 == pytest.approx(20e-6 + 60e-6, rel=1e-3)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("h100-sxm-80gb", "hopper_on"),
        ("gb200-nvl72-186gb", "hopper_on"),
        ("a100-sxm-40gb", "before_hopper"),
        ("l40s-48gb", "before_hopper"),
        ("v100-sxm-32gb", "before_hopper"),
        ("mi300x-192gb", "amd"),
    ],
)
def test_architecture_classes(device: str, expected: str) -> None:
    assert architecture_class(ClusterSpec.parse(f"8x{device}")) == expected


def test_devices_of_kind_cpu_are_not_corrected() -> None:
    toy = ClusterSpec.parse("2x4xtoy")
    group = AxisGroup(nodes=2, ranks_per_node=4, groups_per_node=1)
    for kind in ("all_gather", "all_to_all", "send_recv"):
        (line,) = collective_lines(kind, group, toy)
        expected = line.latency_s + 10**6 * line.seconds_per_byte
        assert collective_time_s(kind, 10**6, group, toy) == pytest.approx(expected)


@given(
    ranks=st.sampled_from([2, 4, 8]),
    nodes=st.sampled_from([1, 2, 16]),
    nbytes=st.integers(1, 1 << 36),
    more=st.integers(0, 1 << 36),
    constants=st.lists(st.floats(1e-3, 1e3), min_size=9, max_size=9),
    kind=st.sampled_from(["all_reduce", "all_gather", "all_to_all", "send_recv"]),
)
def test_time_never_falls_as_bytes_grow_whatever_the_constants(
    ranks: int, nodes: int, nbytes: int, more: int, constants: list[float], kind: str
) -> None:
    place = dict(zip(PLACE, constants, strict=True))
    correction = read_correction({**TABLES, "one_node": place, "several_nodes": place})
    group = AxisGroup(nodes=nodes, ranks_per_node=ranks, groups_per_node=1)
    curves = price_curves(kind, group, ClusterSpec.parse("16x8xb200-sxm-180gb"), correction)  # type: ignore[arg-type]
    times = [min(curve.time_s(size) for curve in curves) for size in (nbytes, nbytes + more)]
    assert times[0] <= times[1] * (1 + 1e-12)


def test_shipped_constants_are_sane_and_say_their_rows() -> None:
    correction = shipped_correction()
    for place in (correction.one_node, correction.several_nodes):
        for family, factor in place.latency_factors.items():
            assert 0.5 < factor < 4, family  # NCCL's latencies are too short, but of the right order
    assert correction.architecture_factors["hopper_on"] == 1.0
    assert 0 < correction.shares.card < correction.shares.link <= 1
    assert SHIPPED["rows"]["used"] == sum(count for name, count in SHIPPED["rows"].items() if name != "used") > 500


def test_the_catalogue_repeats_the_fitted_latency_of_efa() -> None:
    for name in ("efa-100", "efa-400"):
        assert read_link(name, "test").latency_s == pytest.approx(SHIPPED["links"]["efa_latency_s"], rel=0.01)
    assert find_device("h100-sxm-80gb").inter_node.latency_s == 2.7e-6
