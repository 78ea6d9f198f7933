"""A problem whose nodes are tied in groups: all nodes of a group make the same choice.

The tied problem is the original problem with equality constraints between these nodes, after substitution: it has one
node per group. Edges between the same groups become one edge, and charges shared by the same port pairs become one
charge. Equality constraints alone would not tie the flows of the edges, so that the relaxation would be weak.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from planner.ilp.problem import Assignment, Edge, Node, Problem, SharedCharge
from planner.ilp.quantities import Charge, Quantity

Member = tuple[int, int, int]
"""Edge, producer's port, consumer's port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiedProblem:
    """A problem whose nodes are tied in groups.

    Attributes:
        problem: the tied problem, with one node per group.
        group_of: node of the original problem -> its group, a node of the tied problem.
        choice_of: node of the original problem -> the node's choice for each choice of its group.
    """

    problem: Problem
    group_of: tuple[int, ...]
    choice_of: tuple[tuple[int, ...], ...]

    @classmethod
    def from_groups(
        cls, problem: Problem, groups: Sequence[Sequence[int]], options: Sequence[Sequence[Hashable]]
    ) -> Self:
        """Return ``problem`` with the nodes of each group tied.

        Args:
            problem: the original problem.
            groups: nodes of each group; a node in no group becomes a group of its own.
            options: for each node, a key for each of its choices; nodes of a group choose equal keys.
        """
        grouped = {node for group in groups for node in group}
        all_groups = [*groups, *([node] for node in range(len(problem.nodes)) if node not in grouped)]
        group_of = [0] * len(problem.nodes)
        choice_of: list[tuple[int, ...]] = [()] * len(problem.nodes)
        for number, group in enumerate(all_groups):
            for node in group:
                index = {option: choice for choice, option in enumerate(options[node])}
                assert set(index) == set(options[group[0]]), "nodes of a group have the same options"
                group_of[node] = number
                choice_of[node] = tuple(index[option] for option in options[group[0]])
        nodes = [_tied_node(problem, group, choice_of) for group in all_groups]
        edges, edge_of = _tied_edges(problem, group_of, choice_of)
        tied = Problem(
            nodes=tuple(nodes), edges=edges, shared_charges=_shared_charges(problem, edge_of), constant=problem.constant
        )
        return cls(problem=tied, group_of=tuple(group_of), choice_of=tuple(choice_of))

    def untied(self, assignment: Assignment) -> Assignment:
        """Return an assignment of the tied problem as one of the original problem."""
        return tuple(choices[assignment[group]] for group, choices in zip(self.group_of, self.choice_of, strict=True))


def _tied_node(problem: Problem, group: Sequence[int], choice_of: Sequence[Sequence[int]]) -> Node:
    charges = [
        _sum([problem.nodes[node].charges[choice_of[node][choice]] for node in group])
        for choice in range(len(choice_of[group[0]]))
    ]
    return Node(name=problem.nodes[group[0]].name, charges=tuple(charges))


def _tied_edges(
    problem: Problem, group_of: Sequence[int], choice_of: Sequence[Sequence[int]]
) -> tuple[tuple[Edge, ...], list[int]]:
    """Return the edges between groups, and for each original edge the index of its tied edge."""
    members_of: dict[tuple[int, int, tuple[int, ...], tuple[int, ...]], list[Edge]] = defaultdict(list)
    keys = []
    for edge in problem.edges:
        producer_ports = tuple(edge.producer_ports[choice] for choice in choice_of[edge.producer])
        consumer_ports = tuple(edge.consumer_ports[choice] for choice in choice_of[edge.consumer])
        keys.append((group_of[edge.producer], group_of[edge.consumer], producer_ports, consumer_ports))
        members_of[keys[-1]].append(edge)
    edges = []
    for (producer, consumer, producer_ports, consumer_ports), members in members_of.items():
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
    number = {key: index for index, key in enumerate(members_of)}
    return tuple(edges), [number[key] for key in keys]


def _shared_charges(problem: Problem, edge_of: Sequence[int]) -> tuple[SharedCharge, ...]:
    charges_of: dict[frozenset[Member], list[Charge]] = defaultdict(list)
    for shared in problem.shared_charges:
        charges_of[frozenset((edge_of[edge], p, q) for edge, p, q in shared.members)].append(shared.charge)
    return tuple(
        SharedCharge(charge=_sum(charges), members=tuple(sorted(members))) for members, charges in charges_of.items()
    )


def _sum(charges: Sequence[Charge]) -> Charge:
    total: dict[Quantity, float] = defaultdict(float)
    for charge in charges:
        for quantity, amount in charge.items():
            total[quantity] += amount
    return dict(total)
