"""A traced model at any micro-batch size: its graph, regions, op profiles and liveness, each computed once."""

from __future__ import annotations

from dataclasses import dataclass, field

from planner.graph.op_graph import OpGraph, at_batch
from planner.graph.trace_module import BASE_BATCH, TracedModule
from planner.liveness.structure import Structure, at_another_batch, build_structure
from planner.pricing.op_times import OpTimes
from planner.profile.op_profile import GraphProfile
from planner.profile.profile import profile_graph
from planner.regions.block_grouping import UNIFORM_BLOCKS, Grouping, group_first_blocks
from planner.regions.blocks import Blocks, find_blocks
from planner.regions.regions import RegionGraph, block_of, build_regions, split_classes
from planner.strategies.token_reordering import Reordering, find_reordering, with_zigzag_attention


@dataclass(slots=True)
class ModelAnalysis:
    """A model at any micro-batch size: graph, regions, op profiles, liveness. Each is computed once.

    Attributes:
        graph: the graph as traced, at ``traced_batch`` samples.
        any_batch: whether the graph can be converted to other batch sizes.
        flash_attention: whether attention runs in a fused kernel.
        fold: whether equal blocks share their decisions; see `build_regions`.
        lists: FQN patterns of the whole model's lists of blocks, if the graph is one pipeline stage; otherwise empty.
        cached_before: tokens of each sequence in the KV cache before a step; None: the model has no KV cache.
        compiles: whether the device runs a fused op as one kernel in the forward and one in the backward.
        joins: whether linear layers with the same input accumulate its gradient in their GEMMs.
        reordering: how tokens are brought into zigzag order, or a text that says why they cannot be; None: the job does
            not ask for zigzag order. If they can be, attention in ``graph`` is marked as zigzag.
        totals_s: cache of `compute_bound`: (forward and backward, recomputation), seconds of a micro-batch on one
            device.
    """

    graph: OpGraph
    traced_batch: int
    any_batch: bool
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
    def from_module(
        cls,
        module: TracedModule,
        *,
        flash_attention: bool,
        seq: int | None = None,
        compiles: bool = True,
        zigzag: bool = False,
    ) -> ModelAnalysis:
        """Return the analysis of a traced module.

        Args:
            module: the traced module.
            flash_attention: whether attention runs in a FlashAttention kernel.
            seq: tokens of each sequence in the KV cache before a decoding step; other phases do not read it.
            compiles: whether the device runs a fused op as one kernel in the forward and one in the backward.
            zigzag: whether sharded sequences are to be in zigzag order; only training reads it.
        """
        reordering = find_reordering(module.graph) if zigzag and module.phase == "training" else None
        cached = module.phase != "training" and module.has_kv_cache
        return cls(
            graph=with_zigzag_attention(module.graph) if isinstance(reordering, Reordering) else module.graph,
            traced_batch=module.traced_batch,
            any_batch=module.any_batch,
            flash_attention=flash_attention,
            cached_before=((seq or 0) if module.phase == "decode" else 0) if cached else None,
            compiles=compiles,
            joins=module.fused_ops,
            reordering=reordering,
        )

    def bare(self) -> ModelAnalysis:
        """Return the same model with empty caches."""
        return self.with_graph(self.graph, self.lists)

    def with_graph(self, graph: OpGraph, lists: frozenset[str]) -> ModelAnalysis:
        """Return the analysis of another graph, such as that of a pipeline stage, under the same assumptions."""
        return ModelAnalysis(
            graph=graph,
            traced_batch=self.traced_batch,
            any_batch=self.any_batch,
            flash_attention=self.flash_attention,
            fold=self.fold,
            lists=lists,
            cached_before=self.cached_before,
            compiles=self.compiles,
            joins=self.joins,
            reordering=self.reordering,
        )

    @property
    def base(self) -> RegionGraph:
        """The regions at the base batch size, for which strategies are looked up: these do not depend on the batch."""
        return self.regions_at(self._base_batch)[0]

    @property
    def blocks(self) -> Blocks:
        """The repeated blocks."""
        return self.regions_at(self._base_batch)[1]

    @property
    def _base_batch(self) -> int:
        return BASE_BATCH if self.any_batch else self.traced_batch

    def regions_at(self, batch: int) -> tuple[RegionGraph, Blocks]:
        """Return the regions and the repeated blocks at a micro-batch of ``batch`` samples."""
        if batch not in self._regions:
            graph = at_batch(self.graph, self.traced_batch, batch) if self.any_batch else self.graph
            regions = build_regions(graph, fold=self.fold)
            self._regions[batch] = regions, find_blocks(regions, self.lists)
        return self._regions[batch]

    def grouping(self, ac: str, leading_blocks: int | None = None) -> Grouping:
        """Return the grouping of the blocks under a checkpointing mode; see `group_first_blocks`."""
        if (ac, leading_blocks) not in self._groupings:
            self._groupings[ac, leading_blocks] = group_first_blocks(self.blocks, ac, leading_blocks)
        return self._groupings[ac, leading_blocks]

    def structure(self, batch: int, grouping: Grouping = UNIFORM_BLOCKS) -> Structure:
        """Return the mesh-independent part of the program at a micro-batch of ``batch`` samples."""
        if (batch, grouping) not in self._structures:
            regions, blocks = self.regions_at(batch)
            profile = self.profile(batch)
            if grouping.parts and self.fold:
                parts = dict(grouping.parts)
                regions = split_classes(regions, lambda region: parts.get(block_of(region.fqn) or ""))
                blocks = find_blocks(regions, self.lists)
            base_structure = next(
                (
                    structure
                    for (_, cached_grouping), structure in self._structures.items()
                    if cached_grouping == grouping
                ),
                None,
            )
            structure = None if base_structure is None else at_another_batch(base_structure, regions, profile)
            self._structures[batch, grouping] = structure or build_structure(
                regions, profile, blocks, dict(grouping.modes)
            )
        return self._structures[batch, grouping]

    def profile(self, batch: int) -> GraphProfile:
        """Return the unsplit cost of every op at a micro-batch of ``batch`` samples."""
        if batch not in self._profiles:
            self._profiles[batch] = profile_graph(
                self.graph_at(batch),
                flash_attention=self.flash_attention,
                cached_before=self.cached_before,
                compiles=self.compiles,
                shared_input_linears=self.joins,
            )
        return self._profiles[batch]

    def graph_at(self, batch: int) -> OpGraph:
        """Return the graph at a micro-batch of ``batch`` samples."""
        return self.regions_at(batch)[0].graph
