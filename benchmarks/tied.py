"""A problem in which some nodes are bound to choose alike, stated with one variable for each of their choices.

That is the problem with equality constraints between these nodes, after substitution: what two edges between the same
nodes show is then the same pair, and what is charged once for the same pairs are paid together. Left to a solver as
constraints, choices are equal and flows are not, so that the relaxation says little.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from planner.ilp.problem import Assignment, Charge, Edge, Node, Problem, SharedCharge

Member = tuple[int, int, int]
"""Edge, producer's port, consumer's port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tied:
    """A problem with its nodes tied together.

    Attributes:
        problem: one node for each group.
        group_of: by node of the original problem, its group.
        choice_of: likewise, by choice of the group the node's own.
    """

    problem: Problem
    group_of: tuple[int, ...]
    choice_of: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, problem: Problem, groups: Sequence[Sequence[int]], options: Sequence[Sequence[Hashable]]) -> Self:
        """Return ``problem`` with the nodes of each group tied.

        Args:
            problem: what is to be chosen.
            groups: nodes that choose alike; a node in no group is by itself.
            options: by node what its choices stand for: equal ones are tied.
        """
        named = {node for group in groups for node in group}
        together = [*groups, *([node] for node in range(len(problem.nodes)) if node not in named)]
        group_of = [0] * len(problem.nodes)
        choice_of: list[tuple[int, ...]] = [()] * len(problem.nodes)
        for number, group in enumerate(together):
            for node in group:
                index = {option: choice for choice, option in enumerate(options[node])}
                assert set(index) == set(options[group[0]]), "equal blocks have equal choices"
                group_of[node] = number
                choice_of[node] = tuple(index[option] for option in options[group[0]])
        nodes = [_node(problem, group, choice_of) for group in together]
        edges, edge_of = _edges(problem, group_of, choice_of)
        tied = Problem(
            nodes=tuple(nodes), edges=edges, shared_charges=_shared_charges(problem, edge_of), constant=problem.constant
        )
        return cls(problem=tied, group_of=tuple(group_of), choice_of=tuple(choice_of))

    def taken_apart(self, assignment: Assignment) -> Assignment:
        """Return an assignment of the tied problem as one of the original."""
        return tuple(choices[assignment[group]] for group, choices in zip(self.group_of, self.choice_of, strict=True))


def _node(problem: Problem, group: Sequence[int], choice_of: Sequence[Sequence[int]]) -> Node:
    charges = []
    for choice in range(len(choice_of[group[0]])):
        charges.append(_sum([problem.nodes[node].charges[choice_of[node][choice]] for node in group]))
    return Node(name=problem.nodes[group[0]].name, charges=tuple(charges))


def _edges(
    problem: Problem, group_of: Sequence[int], choice_of: Sequence[Sequence[int]]
) -> tuple[tuple[Edge, ...], list[int]]:
    """Return the edges between groups, and which of them each original edge became."""
    alike: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[Edge]] = defaultdict(list)
    keys = []
    for edge in problem.edges:
        producer_ports = tuple(edge.producer_ports[choice] for choice in choice_of[edge.producer])
        consumer_ports = tuple(edge.consumer_ports[choice] for choice in choice_of[edge.consumer])
        keys.append((group_of[edge.producer], group_of[edge.consumer], producer_ports, consumer_ports))
        alike[keys[-1]].append(edge)
    edges = []
    for (producer, consumer, producer_ports, consumer_ports), members in alike.items():
        pairs = {
            pair: _sum([edge.pairs[pair] for edge in members])
            for pair in members[0].pairs
            if all(pair in edge.pairs for edge in members)
        }
        edges.append(
            Edge(
                producer=producer,
                consumer=consumer,
                producer_ports=producer_ports,
                consumer_ports=consumer_ports,
                pairs=pairs,
            )
        )
    number = {key: index for index, key in enumerate(alike)}
    return tuple(edges), [number[key] for key in keys]


def _shared_charges(problem: Problem, edge_of: Sequence[int]) -> tuple[SharedCharge, ...]:
    together: dict[frozenset[Member], list[Charge]] = defaultdict(list)
    for shared in problem.shared_charges:
        together[frozenset((edge_of[edge], p, q) for edge, p, q in shared.members)].append(shared.charge)
    return tuple(
        SharedCharge(charge=_sum(charges), members=tuple(sorted(members))) for members, charges in together.items()
    )


def _sum(charges: Sequence[Charge]) -> Mapping[str, float]:
    total: dict[str, float] = defaultdict(float)
    for charge in charges:
        for name, amount in charge.items():
            total[name] += amount
    return dict(total)
