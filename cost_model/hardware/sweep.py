"""Measured sweeps of collectives: their points, read from nccl-tests' output, CSV or JSON."""

from __future__ import annotations

import csv
import io
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from cost_model.hardware.collective_kinds import COLLECTIVE_KINDS, CollectiveKind
from cost_model.hardware.devices import LinkSpec, read_link
from cost_model.hardware.reading import ClusterError, as_integer, as_mapping, as_number, check_keys

_KEYS = ("kind", "nodes", "ranks_per_node", "nbytes", "times_s", "intra_node", "inter_node", "cards_per_node", "source")
_COLUMNS = ("kind", "nodes", "ranks_per_node", "nbytes", "time_s")
_NCCL_TESTS = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "sendrecv": "send_recv",
}
_RANK = re.compile(r"^#\s*Rank\s+\d+.*?\bon\s+(\S+)\s+device", re.MULTILINE)
_FIGURE = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"
_POINT = re.compile(
    rf"^\s*(\d+)\s+\d+\s+[a-z]\w*\s+(?:[a-z]\w*\s+)?(?:-?\d+\s+)?({_FIGURE})\s+{_FIGURE}\s+{_FIGURE}(?:\s|$)"
)
"""A line of nccl-tests: size, count, type, redop and root (if printed), then out-of-place time, algbw and busbw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Seconds of one collective over increasing sizes, on one group of ``nodes`` x ``ranks_per_node`` ranks.

    Attributes:
        nbytes, times_s: bytes as ``collective_time_s`` counts them, increasing, and the seconds of each size.
        intra_node, inter_node, cards_per_node: the links and the number of cards per node on which the sweep was
            measured, so that a link changed afterwards changes the price; None and 0 until the sweep is added to a
            cluster.
        source: source of the measurement.
    """

    kind: CollectiveKind
    nodes: int
    ranks_per_node: int
    nbytes: tuple[float, ...]
    times_s: tuple[float, ...]
    intra_node: LinkSpec | None = None
    inter_node: LinkSpec | None = None
    cards_per_node: int = 0
    source: str = field(default="given by the user", hash=False)

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ClusterError(f"sweep: unknown collective {self.kind!r}; known: {', '.join(COLLECTIVE_KINDS)}")
        if min(self.nodes, self.ranks_per_node) < 1 or self.nodes * self.ranks_per_node < 2:
            raise ClusterError(f"sweep: {self.nodes} x {self.ranks_per_node} ranks; a collective has two or more")
        if not self.nbytes or len(self.nbytes) != len(self.times_s):
            raise ClusterError(f"sweep: {len(self.nbytes)} sizes and {len(self.times_s)} times; give one for each")
        if min(self.nbytes) <= 0 or min(self.times_s) <= 0:
            raise ClusterError("sweep: sizes and times must be above 0")
        if list(self.nbytes) != sorted(set(self.nbytes)):
            raise ClusterError("sweep: sizes must increase, each given once")

    def measured_on(self, intra_node: LinkSpec, inter_node: LinkSpec, cards_per_node: int) -> Sweep:
        """Return this sweep with the links that it was measured on."""
        return replace(self, intra_node=intra_node, inter_node=inter_node, cards_per_node=cards_per_node)

    def to_dict(self) -> dict[str, object]:
        """Return plain JSON data, which ``read_sweep`` reads back."""
        data: dict[str, object] = {
            "kind": self.kind,
            "nodes": self.nodes,
            "ranks_per_node": self.ranks_per_node,
            "nbytes": list(self.nbytes),
            "times_s": list(self.times_s),
            "cards_per_node": self.cards_per_node,
            "source": self.source,
        }
        if self.intra_node is not None and self.inter_node is not None:
            data |= {"intra_node": self.intra_node.to_dict(), "inter_node": self.inter_node.to_dict()}
        return data


def read_sweep(data: Mapping[str, object], where: str = "sweep") -> Sweep:
    """Return the sweep that ``data`` describes, as ``Sweep.to_dict`` writes it.

    Raises:
        ClusterError: a key is unknown or missing, or its value is wrong.
    """
    check_keys(data, _KEYS, where)
    missing = [key for key in _KEYS[:5] if key not in data]
    if missing:
        raise ClusterError(f"{where}: missing {', '.join(missing)}; give a value for each")
    sweep = make_sweep(
        str(data["kind"]),
        as_integer(data["nodes"], f"{where}.nodes"),
        as_integer(data["ranks_per_node"], f"{where}.ranks_per_node"),
        zip(_numbers(data["nbytes"], f"{where}.nbytes"), _numbers(data["times_s"], f"{where}.times_s"), strict=False),
        source=str(data.get("source", "given by the user")),
    )
    if "intra_node" not in data or "inter_node" not in data:
        return sweep
    return sweep.measured_on(
        read_link(data["intra_node"], f"{where}.intra_node"),
        read_link(data["inter_node"], f"{where}.inter_node"),
        as_integer(data.get("cards_per_node", 0), f"{where}.cards_per_node"),
    )


def make_sweep(
    kind: str,
    nodes: int,
    ranks_per_node: int,
    points: Iterable[tuple[float, float]],
    *,
    source: str = "given by the user",
) -> Sweep:
    """Return the sweep of (bytes, seconds) points in any order; of points with equal bytes the fastest counts."""
    best: dict[float, float] = {}
    for nbytes, time_s in points:
        best[nbytes] = min(time_s, best.get(nbytes, time_s))
    sizes = sorted(best)
    return Sweep(
        kind=cast(CollectiveKind, kind),
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        nbytes=tuple(sizes),
        times_s=tuple(best[size] for size in sizes),
        source=source,
    )


def read_sweep_file(
    path: Path, *, kind: str | None = None, nodes: int | None = None, ranks_per_node: int | None = None
) -> tuple[Sweep, ...]:
    """Return the sweeps of a file.

    The file is ``.json`` (a list of ``Sweep.to_dict``), ``.csv`` (columns kind, nodes, ranks_per_node, nbytes, time_s),
    or the output of nccl-tests, of which the out-of-place times are read.

    Args:
        path: path of the file.
        kind, nodes, ranks_per_node: for an output of nccl-tests that does not state them. nccl-tests names the
            collective from version 2.17 on, and the hosts in its ``Rank`` lines. None: as the file or its name states.

    Raises:
        ClusterError: the file cannot be read, or the collective or the shape of its group is unknown.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ClusterError(f"cannot read sweep {path}: {error}; give the path of a file that exists") from error
    try:
        if path.suffix == ".json":
            return tuple(read_sweep(as_mapping(item, "a sweep"), "a sweep") for item in _json_list(text))
        if path.suffix == ".csv":
            return _read_csv(text, source=path.name)
        return (_read_nccl_tests(text, path.name, kind, nodes, ranks_per_node),)
    except ClusterError as error:
        raise ClusterError(f"sweep {path}: {error}") from error


def _json_list(text: str) -> list[object]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterError(f"not JSON: {error}") from error
    return data if isinstance(data, list) else [data]


def _read_csv(text: str, source: str) -> tuple[Sweep, ...]:
    points: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    for number, row in enumerate(csv.DictReader(io.StringIO(text)), start=2):
        missing = [column for column in _COLUMNS if not row.get(column)]
        if missing:
            raise ClusterError(f"line {number}: no {', '.join(missing)}; the columns are {', '.join(_COLUMNS)}")
        shape = (row["kind"], as_integer(row["nodes"], "nodes"), as_integer(row["ranks_per_node"], "ranks_per_node"))
        points[shape].append((as_number(row["nbytes"], "nbytes"), as_number(row["time_s"], "time_s")))
    return tuple(make_sweep(*shape, measured, source=source) for shape, measured in points.items())


def _read_nccl_tests(text: str, name: str, kind: str | None, nodes: int | None, ranks_per_node: int | None) -> Sweep:
    hosts = _RANK.findall(text)
    if hosts:
        nodes = nodes or len(set(hosts))
        ranks_per_node = ranks_per_node or len(hosts) // len(set(hosts))
    kind = kind or _named_kind(text) or _named_kind(name)
    if kind is None or nodes is None or ranks_per_node is None:
        stated = {"kind": kind, "nodes": nodes, "ranks_per_node": ranks_per_node}
        missing = ", ".join(key for key, value in stated.items() if value is None)
        raise ClusterError(f"the file does not state {missing}; give it next to the file's name")
    points = [(float(match[1]), float(match[2]) * 1e-6) for line in text.splitlines() if (match := _POINT.match(line))]
    return make_sweep(kind, nodes, ranks_per_node, [point for point in points if min(point) > 0], source=name)


def _named_kind(text: str) -> str | None:
    kinds = {kind for name, kind in _NCCL_TESTS.items() if re.search(rf"\b{name}(?:_perf)?(?![a-z])", text)}
    return kinds.pop() if len(kinds) == 1 else None


def _numbers(value: object, where: str) -> list[float]:
    if not isinstance(value, (list, tuple)):
        raise ClusterError(f"{where} must be a list of numbers, not {value!r}")
    return [as_number(item, where) for item in value]
