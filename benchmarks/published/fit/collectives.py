"""The fit of ``cost_model/collectives/collectives.toml`` to the calibration sources of collectives.csv.

    cd benchmarks && python -m published.fit.collectives --truth ../../shared/truth

The script prints the error of every source under constants that were fitted to all other sources.

The loss is the mean of |ln(predicted / measured)|, so that a constant follows the median of a cluster's rows, not its
worst row, and lies between clusters that disagree. A sweep of n rows has weight sqrt(n). The fit runs in stages, so
that rows of one place do not influence the constants of another: one node, several nodes (with EFA's latency), pairs of
ranks.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_model.collectives.correction import architecture_class, read_correction
from cost_model.collectives.point_to_point import Shares
from cost_model.collectives.price import collective_lines
from cost_model.hardware.devices import find_device
from published.fit.simplex import minimize
from published.fit.toml_text import four_digits
from published.pricing import collectives
from published.rows.priced_row import calibration_sources, number, read

HEADER = """Constants of correction.py and point_to_point.py, which describe each, fitted to the calibration sources of
collectives.csv (benchmarks/published/rows/split.toml), listed last with their numbers of rows. Written by
benchmarks/calibrate_from_published.py on {date}; do not edit. All are factors and shares without unit but
few_channels_bytes, ..._bytes_per_s, and efa_latency_s, which devices.toml repeats rounded."""
FAMILIES = ("LL", "LL128", "Simple", "nvls", "pairs")
STEPS = (0.5, 0.2, 0.05)
PRIOR_WEIGHT = 0.005
"""Loss per square of ln(constant / expected): a constant moves by a factor of e only if the mean error falls by more
than half a percent. Constants that the rows do not determine stay near NCCL's latencies and the textbook's ramp."""
EXPECTED = {"ll_latency": 1.5, "ll128_latency": 1.5, "simple_latency": 1.5, "nvls_latency": 1.5}
EXPECTED_RAMP, EXPECTED_LIMIT = 1.0, 10.0
PAIR_KINDS = ("all_to_all", "send_recv")
NOMINAL = Shares(link=1.0, card=1.0, few_channels_bytes_per_s=1.0, few_channels_bytes=0.0)
FEW_CHANNELS_BYTES = 64 << 20
"""Bytes up to which the time of one pair on NVLink 5 rises; from there to 512 MiB the time is nearly constant. Read off
the send/recv rows of the Vultr cluster."""
USUAL_CARD_LATENCY_S = 2.7e-6
"""Seconds of latency of an InfiniBand or RoCE card (NCCL). EFA's latency is fitted as a multiple of it."""
LARGEST_PAIR_BYTES = 4 << 20
"""Bytes of the largest message between nodes in the fit. Times of larger messages depend on the card's share, which is
taken from NVIDIA's slides: the only swept cluster had not been tuned. With tuned settings it agrees with the slides."""
Constants = dict[str, float]
Row = Mapping[str, str]
Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The uncorrected cost lines of rows. The fastest line of a row is its price; absent lines have 1e6 s.

    Attributes:
        latency_s: [row, line], latency without that of network cards.
        per_card_s: [row, line], seconds that each second of a card's latency adds.
        transfer_s: [row, line], seconds to move the bytes.
        family: [row, line], index in FAMILIES.
        architecture, efa, nbytes, measured_s, weight: [row]; ``efa`` is 1 for EFA cards, else 0.
    """

    latency_s: Array
    per_card_s: Array
    transfer_s: Array
    family: NDArray[np.int64]
    architecture: tuple[str, ...]
    efa: Array
    nbytes: Array
    measured_s: Array
    weight: Array


def calibrate(folder: Path) -> dict[str, dict[str, object]]:
    """Return the tables of ``collectives.toml``: the fitted constants, and their sources with numbers of rows."""
    sources = calibration_sources().get(collectives.FILE, frozenset())
    tables = fit([row for row in read(folder, collectives.FILE) if row["source"] in sources])
    return {
        name: {key: four_digits(value) if isinstance(value, float) else value for key, value in table.items()}
        for name, table in tables.items()
    }


def fit(rows: Sequence[Row]) -> dict[str, dict[str, object]]:
    """Return the tables of ``collectives.toml``, fitted to all usable rows of ``rows``, not rounded."""
    usable = [row for row in rows if collectives.left_out(row) is None]
    pairs = [row for row in usable if collectives.KINDS[row["collective"]] in PAIR_KINDS]
    others = [row for row in usable if row not in pairs]
    one_node, shared = _fit_place([row for row in others if _one_node(row)], {"before_hopper": 2.0, "amd": 2.0}, {})
    several, efa = _fit_place([row for row in others if not _one_node(row)], {"efa": 4.0}, shared)
    near = [row for row in pairs if _one_node(row)]
    far = [row for row in pairs if not _one_node(row) and float(row["bytes"]) <= LARGEST_PAIR_BYTES]
    near_fit = _fit_pairs(near, shared, inside=True, card_share=1.0)
    card_share = _card_share(rows)
    far_fit = _fit_pairs(far, shared, inside=False, card_share=card_share)
    used = Counter(row["source"] for row in (*others, *near, *far))
    tables: dict[str, dict[str, object]] = {
        "one_node": {**one_node, **{key: near_fit[key] for key in far_fit}},
        "several_nodes": {**several, **far_fit},
        "architectures": {"hopper_on": 1.0, **shared},
        "pairs": {
            "link_share": near_fit["link_share"],
            "card_share": card_share,
            "few_channels_bytes_per_s": near_fit["few_channels_bytes_per_s"],
            "few_channels_bytes": FEW_CHANNELS_BYTES,
        },
        "links": {"efa_latency_s": efa["efa"] * USUAL_CARD_LATENCY_S},
        "rows": {"used": sum(used.values()), **dict(sorted(used.items()))},
    }
    _check_against_model(others, tables)
    return tables


def _check_against_model(rows: Sequence[Row], tables: Mapping[str, Mapping[str, Any]]) -> None:
    """Assert that the fitted arrays give the prices of ``cost_model``."""
    correction, efa_latency_s = read_correction(tables), tables["links"]["efa_latency_s"]
    for name, one_node in (("one_node", True), ("several_nodes", False)):
        mine = [row for row in rows if _one_node(row) is one_node]
        constants = {**tables[name], **tables["architectures"], "efa": efa_latency_s / USUAL_CARD_LATENCY_S}
        model_s = [collectives.predicted_s(row, correction, efa_latency_s) for row in mine]
        np.testing.assert_allclose(times_s(lines_of(mine), constants), model_s, rtol=1e-9)


def _fit_place(rows: Sequence[Row], more: Constants, fixed: Constants) -> tuple[Constants, Constants]:
    """Return the constants of one place's rings, trees and NVLS, and those of ``more``, fitted together.

    Args:
        rows: the rows to fit to.
        more: further constants -> expected value.
        fixed: constants that are known.
    """
    lines = lines_of(rows)
    start = {**EXPECTED, "ramp": EXPECTED_RAMP, "ramp_limit": EXPECTED_LIMIT, **more}
    names, expected = tuple(start), np.log(list(start.values()))

    def loss(point: Array) -> float:
        constants = {**fixed, **dict(zip(names, np.exp(point).tolist(), strict=True))}
        return _loss(times_s(lines, constants), lines) + PRIOR_WEIGHT * float(np.sum((point - expected) ** 2))

    point = minimize(loss, expected.tolist(), STEPS)
    fitted = dict(zip(names, np.exp(point).tolist(), strict=True))
    return {name: fitted[name] for name in names if name not in more}, {name: fitted[name] for name in more}


def _fit_pairs(rows: Sequence[Row], shared: Constants, *, inside: bool, card_share: float) -> Constants:
    """Return the fitted constants of pairs between nodes; or ``inside`` a node, with the reached share of a link."""
    lines = lines_of(rows)
    slow = np.array([inside and collectives.KINDS[row["collective"]] == "send_recv" for row in rows])
    start = {"pairs_latency": 1.5, "pairs_ramp": EXPECTED_RAMP, "pairs_ramp_limit": EXPECTED_LIMIT}
    if inside:
        start |= {"link_share": 0.93, "few_channels_bytes_per_s": 85e9}
    names, expected = tuple(start), np.log(list(start.values()))
    if not rows:
        return dict(start)

    def loss(point: Array) -> float:
        constants = dict(zip(names, np.exp(point).tolist(), strict=True))
        transfer_s = lines.transfer_s[:, 0] / (constants["link_share"] if inside else card_share)
        if inside:
            few_channels_s = np.minimum(lines.nbytes, FEW_CHANNELS_BYTES) / constants["few_channels_bytes_per_s"]
            transfer_s = np.where(slow, np.maximum(transfer_s, few_channels_s), transfer_s)
        latency_s = _latency_s(lines, shared)[:, 0]
        times = _corrected_s(latency_s, transfer_s, constants["pairs_latency"], constants, "pairs_ramp")
        return _loss(times, lines) + PRIOR_WEIGHT * float(np.sum((point - expected) ** 2))

    point = minimize(loss, expected.tolist(), STEPS)
    return dict(zip(names, np.exp(point).tolist(), strict=True))


def times_s(lines: Lines, constants: Constants) -> Array:
    """Return the corrected seconds of each row, by the formula of ``cost_model.collectives.correction``."""
    factors = np.array([constants["ll_latency"], constants["ll128_latency"], constants["simple_latency"],
                        constants["nvls_latency"], 1.0])  # fmt: skip
    latency_s = _latency_s(lines, constants)
    times = _corrected_s(latency_s, lines.transfer_s, factors[lines.family], constants, "ramp")
    return np.asarray(times.min(axis=1), dtype=np.float64)


def _corrected_s(latency_s: Array, transfer_s: Array, factor: Array | float, constants: Constants, ramp: str) -> Array:
    limit_s = constants[f"{ramp}_limit"] * latency_s
    root = np.sqrt(latency_s * transfer_s / (1.0 + transfer_s / limit_s))
    return np.asarray(factor * latency_s + transfer_s + constants[ramp] * root, dtype=np.float64)


def _latency_s(lines: Lines, constants: Constants) -> Array:
    card_s = USUAL_CARD_LATENCY_S * np.where(lines.efa > 0, constants.get("efa", 1.0), 1.0)
    factors = np.array([constants.get(name, 1.0) for name in lines.architecture])
    return np.asarray((lines.latency_s + lines.per_card_s * card_s[:, None]) * factors[:, None], dtype=np.float64)


def _loss(times: Array, lines: Lines) -> float:
    return float(np.average(np.abs(np.log(times / lines.measured_s)), weights=lines.weight))


def lines_of(rows: Sequence[Row]) -> Lines:
    """Return the uncorrected cost lines of ``rows``."""
    sweeps = [tuple(row[column] for column in ("source", "nodes", "gpus_per_node", "collective")) for row in rows]
    sizes = Counter(sweeps)
    without, with_latency = (_lines_at(rows, latency_s) for latency_s in (0.0, 1.0))
    return Lines(
        latency_s=without[0],
        per_card_s=with_latency[0] - without[0],
        transfer_s=without[1],
        family=without[2].astype(np.int64),
        architecture=tuple(architecture_class(collectives.cluster_of(row)) for row in rows),
        efa=np.array(["EFA" in row["interconnect"] for row in rows], dtype=np.float64),
        nbytes=np.array([float(row["bytes"]) for row in rows]),
        measured_s=np.array([float(row["time_us"]) * 1e-6 for row in rows]),
        weight=np.array([sizes[sweep] ** -0.5 for sweep in sweeps]),
    )


def _lines_at(rows: Sequence[Row], card_latency_s: float) -> Array:
    """Return latency, transfer seconds and family as an array [3, row, line], for cards with this latency."""
    lines = np.zeros((3, len(rows), 8))
    lines[0], lines[1] = 1e6, 1e6
    for index, row in enumerate(rows):
        kind, group, cluster = collectives.shape_of(row, efa_latency_s=card_latency_s, card_latency_s=card_latency_s)
        for column, line in enumerate(collective_lines(kind, group, cluster, NOMINAL)):
            family = FAMILIES.index(line.family)
            lines[:, index, column] = line.latency_s, float(row["bytes"]) * line.seconds_per_byte, family
    return lines


def _card_share(rows: Sequence[Row]) -> float:
    """Return the share of a card's rate that pairs reach in NVIDIA's all-to-all between 4 nodes of A100 and of H100.

    Of the printed bus bandwidth, S(n-1)/n over the time, (n-R)/(n-1) leaves the node through each rank's card, with n
    ranks, R of them per node. Without such rows the share is 0.77.
    """
    shares = []
    for row in rows:
        if row["kind"] != "headline" or row["collective"] != "all_to_all" or row["variant"] or _one_node(row):
            continue
        bus, device = number(row, "busbw_gbs"), collectives.device_of(row["gpu"])
        if bus is None or device is None or not row["nodes"]:
            continue
        ranks, per_node = int(row["nodes"]) * int(row["gpus_per_node"]), int(row["gpus_per_node"])
        link = find_device(device).inter_node
        sent_bytes_per_s = bus * 1e9 * (ranks - per_node) / (ranks - 1)
        shares.append(sent_bytes_per_s / (link.bandwidth_bytes_per_s * link.efficiency))
    return statistics.mean(shares) if shares else 0.77


def _one_node(row: Row) -> bool:
    return (number(row, "nodes") or 1) <= (collectives.RACK_NODES if row["gpu"].startswith("GB200") else 1)


def leave_out(folder: Path) -> None:
    """Print, for each source, the mean error of its rows under constants fitted to all other sources."""
    rows = [row for row in read(folder, collectives.FILE) if collectives.left_out(row) is None]
    headlines = [row for row in read(folder, collectives.FILE) if row["kind"] == "headline"]
    errors_by_source: dict[str, list[tuple[float, float]]] = defaultdict(list)
    machines = sorted({_machine(row) for row in rows})
    for machine in machines:
        tables = fit([*headlines, *(row for row in rows if _machine(row) != machine)])
        correction, efa_latency_s = read_correction(tables), float(str(tables["links"]["efa_latency_s"]))
        for row in rows:
            if _machine(row) == machine and row["kind"] == "measured":
                price_s = collectives.predicted_s(row, correction, efa_latency_s)
                error = abs(price_s / (float(row["time_us"]) * 1e-6) - 1)
                place = "one node" if _one_node(row) else "several nodes"
                errors_by_source[f"{place:14} {machine}"].append((error, float(row["bytes"])))
                errors_by_source[f"{place:14} ALL"].append((error, float(row["bytes"])))
    for name, errors in sorted(errors_by_source.items()):
        large = [error for error, nbytes in errors if nbytes >= 256 << 20]
        mean = statistics.mean(error for error, _ in errors)
        print(f"{name[:80]:80} {len(errors):4} {mean:6.1%} {statistics.mean(large) if large else 0:6.1%} from 256 MiB")


def _machine(row: Row) -> str:
    """Return the source of a row; the files of one machine's profile count as one source."""
    start = row["source"][:24]
    return start if start.startswith(("VIA-Research", "microsoft/nnscaler")) else row["source"]


def main() -> None:
    """Print the errors with each source left out of the fit in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--truth", type=Path, default=Path("../../shared/truth"), help="folder of collectives.csv")
    leave_out(parser.parse_args().truth)


if __name__ == "__main__":
    main()
