"""Random feasible assignments, for tests that the executor runs every plan that the planner can choose."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from planner.ilp.problem import Problem

Allowed = Callable[[int, int], bool]
"""(node, choice) -> whether the choice may be taken; called only for choices that are tried."""

Mask = npt.NDArray[np.bool_]


class _Domains:
    """The remaining choices of each node, kept arc-consistent."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._meets = []
        for edge in problem.edges:
            pairs = set(edge.pairs)
            table = np.array([[(p, q) in pairs for q in edge.consumer_ports] for p in edge.producer_ports], dtype=bool)
            self._meets.append(table)
        self.open: list[Mask] = [np.ones(len(node.charges), dtype=bool) for node in problem.nodes]

    def narrow(self) -> bool:
        """Remove choices that an edge makes impossible; return False if a node has no choice left."""
        changed = True
        while changed:
            changed = False
            for edge, meets in zip(self._problem.edges, self._meets, strict=True):
                if edge.producer == edge.consumer:
                    own = self.open[edge.producer] & meets.diagonal()
                    changed |= self._set(edge.producer, own)
                    continue
                left = self.open[edge.producer] & meets[:, self.open[edge.consumer]].any(axis=1)
                changed |= self._set(edge.producer, left)
                right = self.open[edge.consumer] & meets[self.open[edge.producer], :].any(axis=0)
                changed |= self._set(edge.consumer, right)
        return all(mask.any() for mask in self.open)

    def _set(self, node: int, mask: Mask) -> bool:
        if (mask == self.open[node]).all():
            return False
        self.open[node] = mask
        return True


def random_assignment(problem: Problem, seed: int, allowed: Allowed) -> tuple[int, ...] | None:
    """Return a random assignment with compatible ports on all edges; None: there is none.

    Args:
        problem: the problem.
        seed: equal seeds give equal assignments.
        allowed: a further check of each choice.
    """
    generator = random.Random(seed)
    domains = _Domains(problem)
    if not domains.narrow():
        return None
    order = list(range(len(problem.nodes)))
    generator.shuffle(order)
    return _extend(domains, order, generator, allowed)


def _extend(
    domains: _Domains, order: Sequence[int], generator: random.Random, allowed: Allowed
) -> tuple[int, ...] | None:
    if not order:
        return tuple(int(np.flatnonzero(mask)[0]) for mask in domains.open)
    node, rest = order[0], order[1:]
    choices = [int(c) for c in np.flatnonzero(domains.open[node])]
    generator.shuffle(choices)
    before = [mask.copy() for mask in domains.open]
    for choice in choices:
        if not allowed(node, choice):
            continue
        domains.open[node] = np.zeros_like(before[node])
        domains.open[node][choice] = True
        if domains.narrow():
            assignment = _extend(domains, rest, generator, allowed)
            if assignment is not None:
                return assignment
        domains.open = [mask.copy() for mask in before]
    return None
