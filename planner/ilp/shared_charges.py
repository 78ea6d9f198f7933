"""Collected charges of port pairs: those of single pairs, and those that several pairs share."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence

from planner.ilp.problem import Edge, SharedCharge
from planner.ilp.quantities import Charge, Quantity

Pair = tuple[int, int, int]
"""(edge, producer port, consumer port)."""


class SharedChargeCollector:
    """Charges by sets of port pairs. A charge is paid once if any pair of its set is chosen."""

    def __init__(self) -> None:
        self._by_members: dict[tuple[Pair, ...], dict[Quantity, float]] = {}

    def add(self, members: tuple[Pair, ...], charge: Charge, count: float = 1) -> None:
        """Add ``count`` times ``charge``, to be paid once if any pair of ``members`` is chosen."""
        if not charge:
            return
        total = self._by_members.setdefault(members, {})
        for name, amount in charge.items():
            total[name] = total.get(name, 0.0) + amount * count

    def settle(self, edges: list[Edge]) -> tuple[SharedCharge, ...]:
        """Return the charges that several pairs share; add the charges of single pairs to the pairs in ``edges``."""
        shared_charges = []
        alone: dict[int, dict[tuple[int, int], Charge]] = defaultdict(dict)
        for members, charge in self._by_members.items():
            if len(members) == 1:
                ((edge, p, q),) = members
                alone[edge][p, q] = charge
            else:
                shared_charges.append(SharedCharge(charge=charge, members=members))
        for edge, own in alone.items():
            pairs = {pair: sum_charges(charge, own.get(pair)) for pair, charge in edges[edge].pairs.items()}
            edges[edge] = dataclasses.replace(edges[edge], pairs=pairs)
        return tuple(shared_charges)


def sum_charges(charge: Charge, more: Charge | None) -> Charge:
    """Return the sum of two charges; one of them itself where the other is empty or None."""
    if not more or not charge:
        return more or charge
    total = dict(charge)
    for name, amount in more.items():
        total[name] = total.get(name, 0.0) + amount
    return total


def pairs_on(edges: Sequence[Edge], edge_indices: Sequence[int]) -> Iterator[tuple[int, int, tuple[Pair, ...]]]:
    """Yield (p, q, members) for each pair of ports that is compatible on any edge of ``edge_indices``.

    ``members`` has (edge, p, q) for each edge on which the pair is compatible.
    """
    members: dict[tuple[int, int], list[Pair]] = defaultdict(list)
    for edge in edge_indices:
        for p, q in edges[edge].pairs:
            members[p, q].append((edge, p, q))
    for (p, q), edge_pairs in members.items():
        yield p, q, tuple(edge_pairs)
