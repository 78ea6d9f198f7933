"""What the search walks over: the traced model at any batch, and the meshes of a cluster."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError, MeshError
from planner.graph.op_graph import OpGraph, at_batch
from planner.graph.trace_module import BASE_BATCH, TracedModule
from planner.liveness.structure import Structure, at_another_batch, build_structure
from planner.plan.job import CheckpointingMode
from planner.pricing.op_times import OpTimes
from planner.pricing.run_spec import Run
from planner.profile.op_profile import GraphProfile
from planner.profile.profile import profile
from planner.regions.block_grouping import ALIKE, Grouping, first_blocks
from planner.regions.blocks import Blocks, find_blocks
from planner.regions.regions import RegionGraph, block_of, build_regions, in_parts
from planner.strategies.token_reordering import Reordering, find_reordering, in_any_order


@dataclass(slots=True)
class ModelAnalysis:
    """A model's graph at any micro-batch, with what follows from it; every answer is remembered.

    Attributes:
        fold: whether equal blocks share their decisions; see `build_regions`.
        lists: patterns of the whole model's lists of blocks, where this is one stage of it.
        cached_before: tokens of each sequence in its key-value cache before a step; None: it has no cache.
        compiles: whether fused ops are one kernel each way on the device.
        joins: whether linear layers that read the same tensor add up its gradient in their products.
        reordering: how sequences are brought into an even order, or why they cannot be; None: nobody asked. Attention
            in ``graph`` is said to be handed them so.
        totals_s: what `least_compute_s` remembers: seconds of a micro-batch on one device, and of running blocks again.
    """

    graph: OpGraph
    traced_batch: int
    is_open: bool
    flash_attention: bool
    fold: bool = True
    lists: frozenset[str] = frozenset()
    cached_before: int | None = None
    compiles: bool = True
    joins: bool = False
    reordering: Reordering | str | None = None
    _regions: dict[int, tuple[RegionGraph, Blocks]] = field(default_factory=dict)
    _profiles: dict[int, GraphProfile] = field(default_factory=dict)
    _groupings: dict[tuple[str, int | None], Grouping] = field(default_factory=dict)
    _structures: dict[tuple[int, Grouping], Structure] = field(default_factory=dict)
    totals_s: dict[tuple[OpTimes, bool, int, Grouping], tuple[float, float]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        module: TracedModule,
        *,
        flash_attention: bool,
        seq: int | None = None,
        compiles: bool = True,
        even_order: bool = False,
    ) -> ModelAnalysis:
        """Return the model of which ``module`` is the graph.

        Args:
            seq: tokens in the cache before a decoding step.
            even_order: whether sequences are to be in an even order where they are split.
        """
        reordering = find_reordering(module.graph) if even_order and module.phase == "training" else None
        cached = module.phase != "training" and module.decodes
        return cls(
            graph=in_any_order(module.graph) if isinstance(reordering, Reordering) else module.graph,
            traced_batch=module.traced_batch,
            is_open=module.is_open,
            flash_attention=flash_attention,
            cached_before=((seq or 0) if module.phase == "decode" else 0) if cached else None,
            compiles=compiles,
            joins=module.fused,
            reordering=reordering,
        )

    def bare(self) -> ModelAnalysis:
        """Return the same model with nothing remembered."""
        return ModelAnalysis(
            graph=self.graph,
            traced_batch=self.traced_batch,
            is_open=self.is_open,
            flash_attention=self.flash_attention,
            fold=self.fold,
            lists=self.lists,
            compiles=self.compiles,
            joins=self.joins,
            reordering=self.reordering,
        )

    @property
    def base(self) -> RegionGraph:
        """The regions as traced: strategies are looked up on these, since they do not depend on the batch."""
        return self._at(self._base_batch)[0]

    @property
    def blocks(self) -> Blocks:
        """The repeated modules."""
        return self._at(self._base_batch)[1]

    @property
    def _base_batch(self) -> int:
        return BASE_BATCH if self.is_open else self.traced_batch

    def _at(self, batch: int) -> tuple[RegionGraph, Blocks]:
        if batch not in self._regions:
            graph = at_batch(self.graph, self.traced_batch, batch) if self.is_open else self.graph
            regions = build_regions(graph, fold=self.fold)
            self._regions[batch] = regions, find_blocks(regions, self.lists)
        return self._regions[batch]

    def grouping(self, ac: str, apart: int | None = None) -> Grouping:
        """Return how the blocks are grouped under a mode of checkpointing; see `first_blocks`."""
        if (ac, apart) not in self._groupings:
            self._groupings[ac, apart] = first_blocks(self.blocks, ac, apart)
        return self._groupings[ac, apart]

    def structure(self, batch: int, grouping: Grouping = ALIKE) -> Structure:
        """Return the mesh-independent part of the problem at a micro-batch of ``batch`` samples."""
        if (batch, grouping) not in self._structures:
            regions, blocks = self._at(batch)
            found = self.profile(batch)
            if grouping.parts and self.fold:
                parts = dict(grouping.parts)
                regions = in_parts(regions, lambda region: parts.get(block_of(region.fqn) or ""))
                blocks = find_blocks(regions, self.lists)
            known = next((structure for (_, other), structure in self._structures.items() if other == grouping), None)
            structure = None if known is None else at_another_batch(known, regions, found)
            self._structures[batch, grouping] = structure or build_structure(
                regions, found, blocks, dict(grouping.modes)
            )
        return self._structures[batch, grouping]

    def profile(self, batch: int) -> GraphProfile:
        """Return the unsplit cost of every op at a micro-batch of ``batch`` samples."""
        if batch not in self._profiles:
            self._profiles[batch] = profile(
                self.graph_at(batch),
                flash_attention=self.flash_attention,
                cached_before=self.cached_before,
                compiles=self.compiles,
                joins=self.joins,
            )
        return self._profiles[batch]

    def graph_at(self, batch: int) -> OpGraph:
        """Return the graph at a micro-batch of ``batch`` samples."""
        return self._at(batch)[0].graph


_NAMES = ("tp", "fsdp")
"""Of the inner axes of a mesh, from the innermost on."""


def checked_axes(axes: int) -> int:
    """Return ``axes``, if the search has meshes of so many.

    Raises:
        JobError: it has not.
    """
    if axes not in (1, 2, 3):
        raise JobError(f"meshes of {axes} axes are not searched.", what_to_do="Choose 1, 2 or 3.", field="axes")
    return axes


def meshes_of(cluster: ClusterSpec, axes: int = 2) -> list[MeshSpec]:
    """Return every mesh of the cluster with up to ``axes`` (1 to 3) axes; the inner in or across nodes."""
    found: list[tuple[int, ...]] = [()]
    for count in range(1, axes):
        found += [(*sizes, size) for sizes in found if len(sizes) == count - 1 for size in _next_sizes(cluster, sizes)]
    return [_mesh(cluster, sizes) for sizes in found]


def node_pairs(cluster: ClusterSpec) -> MeshSpec | None:
    """Return the mesh with an axis inside a node and one of two nodes around it; None where there are no two pairs."""
    sizes = (cluster.devices_per_node, 2)
    pair = math.prod(sizes)
    return _mesh(cluster, sizes) if sizes[0] > 1 and cluster.size % pair == 0 and cluster.size > pair else None


def _mesh(cluster: ClusterSpec, sizes: Sequence[int]) -> MeshSpec:
    """Return the mesh with axes of ``sizes``, from the innermost on, and one around them for all other devices."""
    inner = list(zip(_NAMES, sizes, strict=False))
    return MeshSpec(axes=(("dp", cluster.size // math.prod(sizes)), *reversed(inner)))


def _next_sizes(cluster: ClusterSpec, sizes: tuple[int, ...]) -> Iterator[int]:
    """Yield the sizes that an axis around axes of ``sizes`` can have, and another around it."""
    inside, per_node = math.prod(sizes), cluster.devices_per_node
    for size in range(2, cluster.size // inside // 2 + 1):
        reach = inside * size
        if cluster.size % reach == 0 and (per_node % reach == 0 or reach % per_node == 0):
            yield size


def modes_of(traced: ModelAnalysis, ac: str | None) -> list[str]:
    """Return the modes of checkpointing that a job leaves to choose from.

    Raises:
        JobError: one is asked for, and there are no blocks.
    """
    if ac is not None and ac != "none" and not traced.blocks.lists:
        raise JobError(
            f"ac is {ac!r}, but this model has no repeated blocks to checkpoint.", what_to_do="Choose none.", field="ac"
        )
    return [ac] if ac is not None else (["none", "selective", "full"] if traced.blocks.lists else ["none"])


def check_mesh(mesh: MeshSpec, cluster: ClusterSpec) -> None:
    """Refuse a mesh that is not the whole cluster.

    Raises:
        MeshError: naming both sizes.
    """
    if mesh.size != cluster.size:
        raise MeshError(
            f"mesh {mesh} has {mesh.size} devices and the cluster {cluster.name} has {cluster.size}.",
            what_to_do=f"Choose axis sizes whose product is {cluster.size}.",
        )


def least_compute_s(traced: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return a time that no plan of ``run`` can beat: all compute, perfectly split, no communication."""
    compute_s, again_s = _totals(traced, times, run, batch)
    return (compute_s + again_s) / run.mesh.size * run.passes


def least_recompute_s(traced: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> float:
    """Return what no plan of ``run`` can beat in running blocks again, perfectly split."""
    _, again_s = _totals(traced, times, run, batch)
    return again_s / run.mesh.size * run.passes


def _totals(traced: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> tuple[float, float]:
    """Return the seconds of one micro-batch, unsplit, and those of running blocks again. They ask for no mesh."""
    key = times, run.job.training, batch, run.grouping
    if key not in traced.totals_s:
        each = list(_whole(traced, times, run, batch))
        compute_s = sum(forward_s + backward_s for _, forward_s, _, backward_s in each)
        traced.totals_s[key] = compute_s, sum(again_s for _, _, again_s, _ in each)
    return traced.totals_s[key]


def op_seconds(traced: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> dict[str, float]:
    """Return op -> seconds of one micro-batch, unsplit, forward and backward."""
    return {name: sum(seconds) for name, *seconds in _whole(traced, times, run, batch)}


def _whole(traced: ModelAnalysis, times: OpTimes, run: Run, batch: int) -> Iterator[tuple[str, float, float, float]]:
    """Yield each op and its seconds unsplit: its forward, that again where a block is run again, and its backward.

    One device's share of the work takes at least its share of the whole's time: pieces fill a device no better.
    """
    modes = _modes_of_ops(traced, batch, run.grouping)
    planned = _planned_ops(traced, batch)
    graph, profiles = traced.graph_at(batch), traced.profile(batch).ops
    for op in graph.ops:
        if op.name not in planned:
            continue
        inputs = [graph.values[name] for name in op.inputs]
        output = graph.values[op.outputs[0]]
        profile = profiles[op.name]
        whole = times.of(op, inputs, output, [v.shape for v in inputs], output.shape, profile, 1.0, 1)
        least = times.least_share(op, inputs)
        forward_s, backward_s = least * whole.forward_s, least * whole.backward_s
        if not run.job.training:
            yield op.name, forward_s, 0.0, 0.0
            continue
        mode = modes.get(op.name)
        recomputed = mode == "full" or (mode == "selective" and profile.flops == 0)
        yield op.name, forward_s, forward_s if recomputed else 0.0, backward_s


def _planned_ops(traced: ModelAnalysis, batch: int) -> set[str]:
    """Return the ops that regions are made of: all but those on plain values, which every rank runs whole."""
    regions, _ = traced._at(batch)
    return {region_op.op.name for region in regions.regions for region_op in region.ops}


def _modes_of_ops(traced: ModelAnalysis, batch: int, grouping: Grouping) -> dict[str, CheckpointingMode]:
    """Return op -> how its block is checkpointed, of those whose block is."""
    regions, blocks = traced._at(batch)
    modes = dict(grouping.modes)
    return {
        region_op.op.name: modes[block]
        for region in regions.regions
        if (block := blocks.of_region.get(region.index)) in modes
        for region_op in region.ops
    }
