"""How far the shipped collective model is from published nccl-tests: prints mean, median and signed error.

    python benchmarks/collectives_accuracy.py --truth ../shared/truth

Rows judged: ``kind`` measured and trust A or B of collectives.csv, for devices of the catalogue. Left out: forced
algorithms and settings, symmetric memory, kernel-only times, DeepEP, and the rows in CONSTANTS_FROM, from which
constants of the catalogue were read. Network cards are set as the row's ``interconnect`` says where it says so ("4x
100 Gb/s"), else as usual for the device.
"""

from __future__ import annotations

import argparse
import csv
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cost_model import AxisGroup, ClusterSpec, CollectiveKind, collective_time_s

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
    "MI200": "mi250x-64gb",
}
RACK_NODES = 18
"""Trays of 4 in a GB200 rack, which is one NVLink domain and so one node to the model."""

KINDS: dict[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "sendrecv": "send_recv",
}
SIZE_CLASSES = ((64 << 10, "< 64 KiB"), (1 << 20, "< 1 MiB"), (16 << 20, "< 16 MiB"), (256 << 20, "< 256 MiB"))
CARDS = re.compile(r"(\d+)x (\d+) Gb/s")
FORCED = ("forced", "NVLS_ENABLE", "symmetric", "ring", "DeepEP", "v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One measured row and what the model says of it; error is (predicted - measured) / measured."""

    device: str
    kind: CollectiveKind
    nodes: int
    nbytes: int
    error: float


def constants_from(row: dict[str, str]) -> bool:
    """Tell whether a constant of the catalogue was read from this row, so that it cannot judge the model."""
    xgmi_efficiency = row["row_id"] == "C0706"
    nvls_threshold = row["source"].startswith("stas00") and row["nodes"] == "1" and row["gpus_per_node"] in "4567"
    return xgmi_efficiency or nvls_threshold


def left_out(row: dict[str, str]) -> str | None:
    """Return why a row is not judged, or None where it is."""
    if row["kind"] != "measured":
        return f"kind {row['kind']}"
    if row["trust"] not in ("A", "B"):
        return "trust C or D"
    if not row["bytes"] or not row["time_us"]:
        return "no size or time"
    if any(word in row["variant"] for word in FORCED) or "kernel-only" in row["notes"]:
        return "forced algorithm or setting"
    if constants_from(row):
        return "a constant was read from it"
    return None if find_device_name(row["gpu"]) else "device not in the catalogue"


def find_device_name(gpu: str) -> str | None:
    """Return the catalogue's name of the longest prefix of ``gpu`` that is known."""
    known = [prefix for prefix in DEVICES if gpu.startswith(prefix)]
    return DEVICES[max(known, key=len)] if known else None


def cluster_of(row: dict[str, str]) -> ClusterSpec:
    """Return the cluster that the row was measured on."""
    nodes, per_node = int(row["nodes"]), int(row["gpus_per_node"])
    device = find_device_name(row["gpu"])
    if device == DEVICES["GB200"]:
        nodes, per_node = nodes // RACK_NODES, per_node * RACK_NODES
    data: dict[str, object] = {"nodes": nodes, "devices_per_node": per_node, "device": device}
    cards = CARDS.search(row["interconnect"])
    if nodes > 1 and cards:
        data["cards_per_node"] = int(cards[1])
        data["inter_node"] = {"bandwidth_bytes_per_s": int(cards[2]) * 1e9 / 8}
    return ClusterSpec.from_dict(data)


def compare(row: dict[str, str]) -> Comparison:
    """Return the model's price of the row beside the measurement."""
    cluster = cluster_of(row)
    group = AxisGroup(nodes=cluster.nodes, ranks_per_node=cluster.devices_per_node, groups_per_node=1)
    kind, nbytes = KINDS[row["collective"]], int(float(row["bytes"]))
    measured_s = float(row["time_us"]) * 1e-6
    predicted_s = collective_time_s(kind, nbytes, group, cluster)
    return Comparison(
        device=cluster.device.name,
        kind=kind,
        nodes=cluster.nodes,
        nbytes=nbytes,
        error=(predicted_s - measured_s) / measured_s,
    )


def size_class(nbytes: int) -> str:
    """Return the name of the size class."""
    return next((name for limit, name in SIZE_CLASSES if nbytes < limit), ">= 256 MiB")


def print_table(title: str, comparisons: Iterable[Comparison], column: Callable[[Comparison], str]) -> None:
    """Print rows, mean and median absolute error and mean signed error, by one or several nodes and by ``column``."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for item in comparisons:
        place = "one node" if item.nodes == 1 else "several nodes"
        found[place, column(item)].append(item.error)
        found[place, "all"].append(item.error)
    print(f"\n{title:32} {'rows':>5} {'mean |e|':>9} {'median |e|':>11} {'signed':>8}")
    for (place, name), errors in sorted(found.items(), key=lambda entry: (entry[0][0], entry[0][1] == "all")):
        sizes = [abs(error) for error in errors]
        figures = f"{statistics.mean(sizes):9.1%} {statistics.median(sizes):11.1%} {statistics.mean(errors):+8.1%}"
        print(f"{place:14} {name:17} {len(errors):5} {figures}")


def main() -> int:
    """Price every judged row and print the tables; 2 where the file is not there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path("../shared/truth"), help="folder that holds collectives.csv")
    path = parser.parse_args().truth / "collectives.csv"
    if not path.is_file():
        print(f"{path} is not there; name the folder of collectives.csv with --truth", file=sys.stderr)
        return 2
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    reasons = Counter(reason for row in rows if (reason := left_out(row)) is not None)
    comparisons = [compare(row) for row in rows if left_out(row) is None]
    print(f"{len(comparisons)} rows judged; left out:", ", ".join(f"{n} {why}" for why, n in reasons.most_common()))
    same = [item for item in comparisons if item.kind in ("all_reduce", "all_gather", "reduce_scatter")]
    order = [name for _, name in SIZE_CLASSES] + [">= 256 MiB"]
    same.sort(key=lambda item: order.index(size_class(item.nbytes)))
    print_table("all-reduce, gather, scatter", same, lambda item: size_class(item.nbytes))
    print_table("every collective", comparisons, lambda item: item.kind)
    print_table("every device", comparisons, lambda item: item.device)
    large = [item for item in comparisons if item.nbytes >= 256 << 20]
    print_table(">= 256 MiB, every device", large, lambda item: item.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
