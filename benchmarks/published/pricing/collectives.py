"""The rows of collectives.csv with predicted times, without and with a sweep of the row's own cluster.

    cd benchmarks && python -m published.pricing.collectives --truth ../../shared/truth

Check 6 counts measured rows of trust A and B. Not priced are forced algorithms and settings, symmetric memory, times of
kernels without launch, other libraries (DeepEP), primitives of a framework that also copy tensors, TCP, and devices
that the catalogue does not have. Digitized rows of 8 MB and more are priced, but no check counts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cost_model.collectives.correction import Correction
from cost_model.collectives.price import AxisGroup, collective_time_s, price_curves
from cost_model.hardware.cluster import ClusterSpec
from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.hardware.sweep import make_sweep
from published.rows.priced_row import PricedRow, number, read

FILE = "collectives.csv"
DEVICES = {
    "A100 SXM 40GB": "a100-sxm-40gb",
    "A100": "a100-sxm-80gb",
    "H100": "h100-sxm-80gb",
    "H200": "h200-sxm-141gb",
    "B200": "b200-sxm-180gb",
    "GB200": "gb200-nvl72-186gb",
    "V100": "v100-sxm-32gb",
    "MI300X": "mi300x-192gb",
    "MI325X": "mi325x-256gb",
    "MI355X": "mi355x-288gb",
    "MI200": "mi250x-64gb",
}
OTHER_FORMS = ("PCIe", "NVL", "PCIE")
RACK_NODES = 18
"""Trays of 4 devices in a GB200 rack. The rack is one NVLink domain, and so one node of the cost model."""

KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}
SIZE_CLASSES = ((64 << 10, "< 64 KiB"), (1 << 20, "< 1 MiB"), (16 << 20, "< 16 MiB"), (256 << 20, "< 256 MiB"))
LARGEST = ">= 256 MiB"
LEAST_DIGITIZED_BYTES = 8e6
"""Bytes below which one pixel of a bandwidth plot is too large a share of the time."""
LEAST_SWEEP_POINTS = 5
CARDS = re.compile(r"(\d+)\s*x\s*(\d+)\s*Gb/s")
FORCED = ("forced", "NVLS_ENABLE", "symmetric", "ring", "DeepEP", "v2", "second environment")


class LeftOutError(ValueError):
    """A row is not priced; tables print the message as the reason."""


def price(folder: Path, correction: Correction | None = None) -> list[PricedRow]:
    """Return every row of collectives.csv with its price in microseconds, or left out with a reason."""

    def predict(row: Mapping[str, str]) -> float:
        return predicted_s(row, correction)

    return [_priced(row, predict, check=6) for row in read(folder, FILE)]


def price_with_sweep(folder: Path) -> list[PricedRow]:
    """Return the measured rows of trust A and B, each priced by the sweep of its cluster without the row's own size.

    A sweep is the rows of one source, device, shape, collective and setting. ``tags["place"]`` is ``interior`` for
    sizes between others of the sweep (check 7), else ``end``.
    """
    sweeps: dict[tuple[str, ...], list[dict[str, str]]] = defaultdict(list)
    for row in read(folder, FILE):
        if row["kind"] == "measured" and row["trust"] in ("A", "B") and _size_and_time(row):
            sweeps[_sweep_of(row)].append(row)
    priced = []
    for rows in sweeps.values():
        sizes = sorted({float(row["bytes"]) for row in rows})
        for row in rows:
            place = "end" if float(row["bytes"]) in (sizes[0], sizes[-1]) else "interior"
            others = [other for other in rows if float(other["bytes"]) != float(row["bytes"])]
            predict = functools.partial(_predicted_with_sweep_s, others=others)
            one = _priced(row, predict, check=7 if place == "interior" else None)
            priced.append(dataclasses.replace(one, tags={**one.tags, "place": place}))
    return priced


def predicted_s(
    row: Mapping[str, str], correction: Correction | None = None, efa_latency_s: float | None = None
) -> float:
    """Return the model's seconds for a row, with the given constants in place of the shipped ones.

    Raises:
        LeftOutError: the row is out of scope.
    """
    kind, group, cluster = shape_of(row, efa_latency_s=efa_latency_s)
    if correction is None:
        return collective_time_s(kind, float(row["bytes"]), group, cluster)
    return min(curve.time_s(float(row["bytes"])) for curve in price_curves(kind, group, cluster, correction))


def _predicted_with_sweep_s(row: Mapping[str, str], others: list[dict[str, str]]) -> float:
    kind, group, cluster = shape_of(row)
    if len(others) < LEAST_SWEEP_POINTS:
        raise LeftOutError(f"fewer than {LEAST_SWEEP_POINTS} other sizes in its sweep")
    points = [(float(other["bytes"]), float(other["time_us"]) * 1e-6) for other in others]
    swept = cluster.with_sweep(make_sweep(kind, group.nodes, group.ranks_per_node, points))
    return collective_time_s(kind, float(row["bytes"]), group, swept)


def shape_of(
    row: Mapping[str, str], efa_latency_s: float | None = None, card_latency_s: float | None = None
) -> tuple[CollectiveKind, AxisGroup, ClusterSpec]:
    """Return the collective of a row, its group and its cluster; latencies as in ``cluster_of``.

    Raises:
        LeftOutError: the row is out of scope.
    """
    reason = left_out(row)
    if reason is not None:
        raise LeftOutError(reason)
    cluster = cluster_of(row, efa_latency_s, card_latency_s)
    group = AxisGroup(nodes=cluster.nodes, ranks_per_node=cluster.devices_per_node, groups_per_node=1)
    return KINDS[row["collective"]], group, cluster


def left_out(row: Mapping[str, str]) -> str | None:
    """Return why a row is not priced; None for priced rows."""
    variant, notes = row["variant"], row["notes"]
    reasons = (
        (row["kind"] not in ("measured", "digitized"), f"kind {row['kind']}: not a measurement of one size"),
        (row["trust"] not in ("A", "B"), f"trust {row['trust']}"),
        (not _size_and_time(row), "no size or time"),
        (row["kind"] == "digitized" and (number(row, "bytes") or 0) < LEAST_DIGITIZED_BYTES, "digitized, below 8 MB"),
        (row["collective"] not in KINDS, f"collective {row['collective']}"),
        (any(word in variant for word in FORCED), "forced algorithm or setting"),
        ("kernel-only" in notes, "time of the kernel alone"),
        ("torch.cat" in notes and row["collective"] != "all_reduce", "a framework's primitive, copies included"),
        ("TCP" in row["interconnect"], "TCP"),
        (device_of(row["gpu"]) is None, "device not in the catalogue"),
        (not number(row, "nodes") or not number(row, "gpus_per_node"), "shape not stated"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def device_of(gpu: str) -> str | None:
    """Return the catalogue's device of the longest known prefix of ``gpu``; None where none is known."""
    known = [prefix for prefix in DEVICES if gpu.startswith(prefix)]
    if not known or any(form in gpu for form in OTHER_FORMS):
        return None
    return DEVICES[max(known, key=len)]


def cluster_of(
    row: Mapping[str, str], efa_latency_s: float | None = None, card_latency_s: float | None = None
) -> ClusterSpec:
    """Return the cluster that the row was measured on.

    Its cards are those of ``interconnect`` ("4x 100 Gb/s"), else the usual ones of the device; EFA where it is stated.
    Latencies are the catalogue's where they are None.
    """
    nodes, per_node = int(float(row["nodes"])), int(float(row["gpus_per_node"]))
    device = device_of(row["gpu"])
    if device == DEVICES["GB200"]:
        nodes, per_node = max(1, nodes // RACK_NODES), per_node * min(nodes, RACK_NODES)
    data: dict[str, object] = {"nodes": nodes, "devices_per_node": per_node, "device": device}
    if nodes > 1:
        cards = CARDS.search(row["interconnect"])
        link: dict[str, object] = {"bandwidth_bytes_per_s": int(cards[2]) * 1e9 / 8} if cards else {}
        latency_s = card_latency_s
        if "EFA" in row["interconnect"]:
            latency_s = shipped_efa_latency_s() if efa_latency_s is None else efa_latency_s
        if latency_s is not None:
            link["latency_s"] = latency_s
        data["inter_node"] = link
        if cards:
            data["cards_per_node"] = int(cards[1])
    return ClusterSpec.from_dict(data)


@functools.cache
def shipped_efa_latency_s() -> float:
    """Return the catalogue's latency of EFA in seconds."""
    link = {"nodes": 2, "devices_per_node": 8, "device": "h100-sxm-80gb", "inter_node": "efa-400"}
    return ClusterSpec.from_dict(link).inter_node.latency_s


def size_class(nbytes: float) -> str:
    """Return the name of the size class of ``nbytes``."""
    return next((name for limit, name in SIZE_CLASSES if nbytes < limit), LARGEST)


def _size_and_time(row: Mapping[str, str]) -> bool:
    return (number(row, "bytes") or 0) > 0 and (number(row, "time_us") or 0) > 0


def _sweep_of(row: Mapping[str, str]) -> tuple[str, ...]:
    columns = ("source", "gpu", "nodes", "gpus_per_node", "interconnect", "collective", "algo", "variant")
    return tuple(row[column] for column in columns)


def _priced(row: dict[str, str], predict: Callable[[Mapping[str, str]], float], check: int | None) -> PricedRow:
    several = (number(row, "nodes") or 1) > (RACK_NODES if row["gpu"].startswith("GB200") else 1)
    tags = {
        "gpu": row["gpu"].split(" ")[0] or "not stated",
        "kind": row["kind"],
        "collective": row["collective"],
        "nodes": "several nodes" if several else "one node",
        "size": size_class(number(row, "bytes") or 0.0),
        "trust": row["trust"],
    }
    predicted, reason = None, None
    try:
        predicted = predict(row) * 1e6
    except LeftOutError as error:
        reason = str(error)
    return PricedRow(
        file=FILE,
        row_id=row["row_id"],
        quantity="time_us",
        source=row["source"],
        measured=number(row, "time_us") or 0.0,
        predicted=predicted,
        left_out=reason,
        tags=tags,
        checks=(check,) if check is not None and row["kind"] == "measured" and row["trust"] in ("A", "B") else (),
        assumed=("network cards as usual for the device",) if several and not CARDS.search(row["interconnect"]) else (),
    )


def summary(rows: Iterable[PricedRow]) -> str:
    """Return the number of rows, mean and median absolute error, and mean signed error as text; a dash for no rows."""
    errors = [row.error for row in rows if row.predicted is not None]
    if not errors:
        return "    0       -"
    sizes = [abs(error) for error in errors]
    figures = f"{statistics.mean(sizes):7.1%} {statistics.median(sizes):7.1%} {statistics.mean(errors):+8.1%}"
    return f"{len(errors):5} {figures}"


def print_tables(title: str, rows: list[PricedRow], check: int) -> None:
    """Print the rows of ``check`` by split, number of nodes, size, and source."""
    judged = [row for row in rows if check in row.checks and row.predicted is not None]
    print(f"\n{title:52} {'rows':>5} {'mean':>7} {'median':>7} {'signed':>8}")
    for split in ("calibration", "validation"):
        for nodes in ("one node", "several nodes"):
            mine = [row for row in judged if row.split == split and row.tags["nodes"] == nodes]
            print(f"{split:12} {nodes:14} {'all':24} {summary(mine)}")
            for name in [*(name for _, name in SIZE_CLASSES), LARGEST]:
                print(f"{'':27} {name:24} {summary(row for row in mine if row.tags['size'] == name)}")
            for tag in ("gpu", "collective"):
                for value in sorted({row.tags[tag] for row in mine}):
                    print(f"{'':27} {value:24} {summary(row for row in mine if row.tags[tag] == value)}")
            for source in sorted({row.source for row in mine}):
                print(f"{'':14} {source[:36]:37} {summary(row for row in mine if row.source == source)}")


def main() -> int:
    """Print the tables of checks 6 and 7."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path("../../shared/truth"), help="folder of collectives.csv")
    folder = parser.parse_args().truth
    rows = price(folder)
    reasons: dict[str, int] = defaultdict(int)
    for row in rows:
        reasons[row.left_out or "priced"] += 1
    print(", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items(), key=lambda item: -item[1])))
    print_tables("check 6: data sheets and shipped constants", rows, 6)
    swept = price_with_sweep(folder)
    print_tables("check 7: sweep of the cluster, size left out", swept, 7)
    ends = [row for row in swept if row.tags["place"] == "end" and row.tags["trust"] in ("A", "B")]
    for nodes in ("one node", "several nodes"):
        print(f"ends of sweeps {nodes:37} {summary(row for row in ends if row.tags['nodes'] == nodes)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
