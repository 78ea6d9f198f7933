"""`Structure`: the part of a planning problem that is the same on every mesh (classes, edges, multiplicities)."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from planner.graph.op_graph import Crossing
from planner.ilp.quantities import NEVER_ALIVE
from planner.liveness.backward_liveness import Timeline, build_timeline
from planner.liveness.forward_liveness import forward_copies, forward_peak_candidates, forward_timeline
from planner.liveness.multiplicity import Link, Multiplicity, MultiplicityCounter
from planner.liveness.op_order import OpOrder
from planner.liveness.parameter_classes import FsdpGroup, ParameterClass, find_fsdp_groups, parameter_classes
from planner.liveness.peak_candidates import find_peak_candidates
from planner.plan.job import CheckpointingMode
from planner.profile.op_profile import GraphProfile
from planner.regions.blocks import Blocks
from planner.regions.regions import Region, RegionGraph, is_sent


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeKey:
    """A link between region classes: from a slot of one to a slot of the other."""

    producer: int
    producer_slot: int
    consumer: int
    consumer_slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The part of a problem without a mesh: classes, edges, and how often each redistribution and saved copy occurs.

    Attributes:
        modes: FQN of a checkpointed block -> its checkpointing mode.
        same_producer_ports: pairs of edges (indices) whose producers need equal ports, because one key of the plan
            states the ports of both edges.
        same_consumer_ports: the same for the edges' consumers.
        first_region_class: class of the region with parameters that runs first; None: no region has parameters.
        boundary_slots: region class -> slots of the model's inputs, and of boundary tensors that a pipeline stage
            sends. Each tensor occurs once.
        autograd_sums: for each region class and op, input -> number of members in which autograd adds the gradient to
            that of another use. Where many blocks read a tensor, one of them adds nothing.
        gemm_sums: for each region class and op, input -> number of members in which the op's GEMM adds to a gradient
            that exists already.
    """

    regions: RegionGraph
    profile: GraphProfile
    blocks: Blocks
    modes: Mapping[str, CheckpointingMode]
    edges: tuple[EdgeKey, ...]
    parameters: tuple[ParameterClass, ...]
    redistributions: tuple[Multiplicity, ...]
    recomputed_redistributions: tuple[Multiplicity, ...]
    saved_tensors: tuple[Multiplicity, ...]
    saved_copies: tuple[Multiplicity, ...]
    shared_gradients: tuple[Multiplicity, ...]
    same_producer_ports: tuple[tuple[int, int], ...]
    same_consumer_ports: tuple[tuple[int, int], ...]
    first_region_class: int | None
    boundary_slots: Mapping[int, tuple[int, ...]]
    autograd_sums: tuple[tuple[Mapping[int, int], ...], ...]
    gemm_sums: tuple[tuple[Mapping[int, int], ...], ...]
    fsdp_groups: tuple[FsdpGroup, ...]
    timeline: Timeline

    def without_peak_candidates(self) -> Structure:
        """Return the structure without peak candidates, for a problem that needs no peak memory."""
        return dataclasses.replace(
            self,
            parameters=tuple(parameter.without_peak_candidates() for parameter in self.parameters),
            fsdp_groups=tuple(block.without_peak_candidates() for block in self.fsdp_groups),
            timeline=dataclasses.replace(self.timeline, candidates=(), throughout=NEVER_ALIVE),
            saved_tensors=(),
            saved_copies=(),
            shared_gradients=(),
        )

    def representative(self, region_class: int) -> Region:
        """Return a region of the class."""
        return self.regions.regions[self.regions.classes[region_class].members[0]]

    def mode(self, region: Region) -> CheckpointingMode | None:
        """Return the checkpointing mode of the block that ``region`` is in; None: it is in no checkpointed block."""
        return self.modes.get(self.blocks.of_region.get(region.index, ""))


def build_structure(
    regions: RegionGraph, profile: GraphProfile, blocks: Blocks, modes: Mapping[str, CheckpointingMode]
) -> Structure:
    """Return the structure of the planning problem of a model.

    Args:
        modes: FQN of a checkpointed block -> its mode, the same for all blocks of one region class.
    """
    edge_index: dict[EdgeKey, int] = {}
    leaving: dict[tuple[int, int], list[Link]] = defaultdict(list)
    for link in regions.links:
        key = EdgeKey(
            producer=regions.class_of[link.producer],
            producer_slot=link.producer_slot,
            consumer=regions.class_of[link.consumer],
            consumer_slot=link.consumer_slot,
        )
        edge = edge_index.setdefault(key, len(edge_index))
        leaving[link.producer, link.producer_slot].append((edge, link.consumer, link.consumer_slot))
    op_order = OpOrder(regions, profile, blocks, modes)
    timeline = forward_timeline(op_order) if op_order.is_forward else build_timeline(op_order)
    multiplicities = MultiplicityCounter(regions, profile, blocks, modes, leaving, timeline).count()
    if op_order.is_forward:
        multiplicities["saved_copies"] = forward_copies(op_order, timeline, leaving)
    parameters = parameter_classes(regions, timeline)
    with_parameters = [
        (region.ops[0].op.name, regions.class_of[region.index])
        for region in regions.regions
        if region.ops and any(slot.origin == "parameter" for slot in region.slots)
    ]
    order = {op.name: position for position, op in enumerate(regions.graph.ops)}
    autograd_sums, gemm_sums = (
        {name: getattr(op, use) for name, op in profile.ops.items()} for use in ("autograd_sums", "gemm_sums")
    )
    return Structure(
        regions=regions,
        profile=profile,
        blocks=blocks,
        modes=modes,
        edges=tuple(edge_index),
        parameters=parameters,
        same_producer_ports=_agreements(regions, edge_index),
        same_consumer_ports=_alike(regions, edge_index),
        first_region_class=min(with_parameters, key=lambda pair: order[pair[0]])[1] if with_parameters else None,
        boundary_slots=_arguments(regions),
        autograd_sums=tuple(_counted(regions, members.members, autograd_sums) for members in regions.classes),
        gemm_sums=tuple(_counted(regions, members.members, gemm_sums) for members in regions.classes),
        fsdp_groups=find_fsdp_groups(regions, blocks, parameters, timeline),
        timeline=timeline,
        **multiplicities,
    )


def at_another_batch(structure: Structure, regions: RegionGraph, profile: GraphProfile) -> Structure | None:
    """Return ``structure`` with the regions and profile of the same model at another batch; None if more would change.

    A structure counts tensors, so that their bytes do not matter, except for the choice of peak candidates. At a batch
    of 1, autograd may save other tensors.
    """
    original = structure.regions
    if (regions.classes, regions.class_of, regions.links) != (original.classes, original.class_of, original.links):
        return None
    if profile.root != structure.profile.root or _structural_facts(profile) != _structural_facts(structure.profile):
        return None
    order = OpOrder(regions, profile, structure.blocks, structure.modes)
    if (
        forward_peak_candidates(order) if order.is_forward else find_peak_candidates(order)
    ) != structure.timeline.candidates:
        return None
    return dataclasses.replace(structure, regions=regions, profile=profile)


def _structural_facts(profile: GraphProfile) -> list[tuple[object, ...]]:
    """Return, for each op, the facts of its profile that a structure depends on."""
    return [
        (
            *(name, op.saved, op.autograd_sums, op.gemm_sums, op.in_place),
            *(op.saved_extra_nbytes > 0, op.cached_extra_nbytes > 0, op.nbytes > 0, op.flops > 0),
        )
        for name, op in profile.ops.items()
    ]


def _arguments(regions: RegionGraph) -> dict[int, tuple[int, ...]]:
    slot_by_value: dict[str, tuple[int, int]] = {}
    sent = {output.value for output in regions.graph.outputs if output.is_sent}
    for region in regions.regions:
        for position, slot in enumerate(region.slots):
            passed_through = slot.value.name in sent and is_sent(region, slot)
            if (slot.value.kind == "input" and slot.source is None) or passed_through:
                slot_by_value.setdefault(slot.value.name, (regions.class_of[region.index], position))
    slots: dict[int, list[int]] = defaultdict(list)
    for region_class, position in slot_by_value.values():
        slots[region_class].append(position)
    return {region_class: tuple(positions) for region_class, positions in slots.items()}


def _counted(
    regions: RegionGraph, members: tuple[int, ...], inputs: Mapping[str, tuple[int, ...]]
) -> tuple[Mapping[int, int], ...]:
    """Return, for each op of a class, input -> number of members whose op has it in ``inputs`` (op name -> inputs)."""
    ops_of = [regions.regions[member].ops for member in members]
    return tuple(Counter(i for op in same for i in inputs[op.op.name]) for same in zip(*ops_of, strict=True))


def hook_key(regions: RegionGraph, crossing: Crossing) -> tuple[str, str, str]:
    """Return (module FQN, "input" or "output", argument path), for which a plan has one port."""
    return regions.graph.calls[crossing.call].fqn, crossing.direction, crossing.paths[0]


def _agreements(regions: RegionGraph, edge_index: Mapping[EdgeKey, int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of edges whose ports one key of the plan states, so that their producers need equal ports."""
    pairs = {pair for edges in _named_together(regions, edge_index) for pair in itertools.pairwise(edges)}
    return tuple(sorted(pairs))


def _alike(regions: RegionGraph, edge_index: Mapping[EdgeKey, int]) -> tuple[tuple[int, int], ...]:
    """Return pairs of edges to different entries whose ports one key states, so that consumers need equal ports.

    Such edges come from a module that is called twice, such as an activation or dropout.
    """
    entries = {edge: (key.consumer, key.consumer_slot) for key, edge in edge_index.items()}
    pairs: set[tuple[int, int]] = set()
    for edges in _named_together(regions, edge_index):
        first: dict[tuple[int, int], int] = {}
        for edge in edges:
            first.setdefault(entries[edge], edge)
        pairs.update(itertools.pairwise(first.values()))
    return tuple(sorted(pairs))


def _named_together(regions: RegionGraph, edge_index: Mapping[EdgeKey, int]) -> list[list[int]]:
    """Return, for each key of a plan, the edges whose ports it states.

    Edges without a gradient come last, because they agree with any gradient.
    """
    by_key: dict[tuple[str, str, str], dict[int, bool]] = defaultdict(dict)
    for link in regions.links:
        slot = regions.regions[link.consumer].slots[link.consumer_slot]
        assert slot.boundary is not None
        key = EdgeKey(
            producer=regions.class_of[link.producer],
            producer_slot=link.producer_slot,
            consumer=regions.class_of[link.consumer],
            consumer_slot=link.consumer_slot,
        )
        by_key[hook_key(regions, slot.boundary)][edge_index[key]] = not slot.value.requires_grad
    return [sorted(edges, key=lambda edge: (edges[edge], edge)) for edges in by_key.values()]
