"""Parameter classes (they share a stored layout), FSDP groups, and the lifetimes of gradients and unsharded copies."""

from __future__ import annotations

import dataclasses
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

from planner.ilp.quantities import NEVER_ALIVE, Lifetime, Quantity
from planner.liveness.backward_liveness import Timeline
from planner.liveness.op_order import NEVER
from planner.model_rewrites.opaque_op import OP_NAME
from planner.regions.blocks import Blocks
from planner.regions.regions import Region, RegionGraph

_UsePair = tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterClass:
    """Equal parameters of equal blocks, which share their stored layout.

    A lifetime says how many of the parameters' tensors are alive at each peak candidate.

    Attributes:
        values: the parameters.
        uses: (region class, slot) -> number of redistributions of each parameter there; 0: it is used there as it was
            redistributed for another use, to which `same_layout` joins it.
        same_layout: pairs of uses under one name, which need the same layout.
        served: those of these pairs whose second use is served by what is redistributed for the first.
        gradients: lifetime of gradients.
        working: use -> lifetime of the parameters that an op uses at the candidate.
        pending: use -> lifetime of gradients from that use, if it is the last of several uses in the forward. Each
            waits for the gradients of the other uses.
        unreduced: lifetime of gradients that wait for other gradients of their block.
    """

    values: tuple[str, ...]
    uses: Mapping[tuple[int, int], int]
    same_layout: tuple[_UsePair, ...]
    served: tuple[_UsePair, ...]
    gradients: Lifetime
    working: Mapping[tuple[int, int], Lifetime]
    pending: Mapping[tuple[int, int], Lifetime]
    unreduced: Lifetime

    def sharing(self, use: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Return ``use`` and the uses that are served by what is redistributed for it."""
        return use, *(other for first, other in self.served if first == use)

    @property
    def is_used_again(self) -> bool:
        """Whether gradients of several uses of a parameter add up, such as those of two calls of its module."""
        return len(self.uses) > 1 or sum(self.uses.values()) > 1

    def without_peak_candidates(self) -> ParameterClass:
        """Return the class with empty lifetimes."""
        nothing = dict.fromkeys(self.uses, NEVER_ALIVE)
        return dataclasses.replace(self, gradients=NEVER_ALIVE, working=nothing, pending=nothing, unreduced=NEVER_ALIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpGroup:
    """A kind of block whose parameters can be in FSDP groups: one group, and one flat collective, for each block.

    Attributes:
        kind: FQN of one block of the kind.
        blocks: FQNs of all blocks of the kind.
        parameter_counts: index of a parameter class -> how many of its parameters are in one block.
        nbytes: unsharded bytes of these parameters, in one block.
        trained_numel: elements of those that are trained, whose gradients are reduced.
        is_first: whether it is the first kind in the model.
        chunk_heads: how many blocks of the kind begin a chunk of the model, other than the first chunk.
        unsharded: at candidates inside such blocks, number of blocks with unsharded parameters: the block itself, and
            the block before it, which the backward prefetches.
        reduce_buffers: at candidates inside such blocks, number of blocks whose gradients are being reduced: the block
            after it, if any.
        unsharded_until_backward: at all candidates, number of blocks' unsharded parameters that are alive if they stay
            unsharded from forward to backward.
        unreduced: at candidates inside such blocks, fraction of the block's gradients (in bytes) that exist.
    """

    kind: str
    blocks: tuple[str, ...]
    parameter_counts: Mapping[int, int]
    nbytes: int
    trained_numel: int
    is_first: bool
    chunk_heads: int
    unsharded: Lifetime
    reduce_buffers: Lifetime
    unsharded_until_backward: Lifetime
    unreduced: Lifetime

    @property
    def count(self) -> int:
        """Number of blocks of the kind."""
        return len(self.blocks)

    def without_peak_candidates(self) -> FsdpGroup:
        """Return the group with empty lifetimes."""
        return dataclasses.replace(
            self,
            unsharded=NEVER_ALIVE,
            reduce_buffers=NEVER_ALIVE,
            unsharded_until_backward=NEVER_ALIVE,
            unreduced=NEVER_ALIVE,
        )


def parameter_classes(regions: RegionGraph, timeline: Timeline) -> tuple[ParameterClass, ...]:
    """Return the parameter classes: parameters with the same uses are in one class."""
    uses: dict[str, dict[tuple[int, int], int]] = {}
    joined: dict[str, tuple[_UsePair, ...]] = {}
    served: dict[str, tuple[_UsePair, ...]] = {}
    for value, calls in _reader_calls(regions).items():
        uses[value], joined[value], served[value] = {}, (), ()
        for by_use in calls.values():
            # The gradient of a copy is priced with its first use, so that one with a gradient comes first.
            first = max(by_use, key=lambda use: (_has_gradient(regions, use), len(by_use[use])))
            seen: set[int] = set()
            for use in (first, *(other for other in by_use if other != first)):
                uses[value][use] = uses[value].get(use, 0) + len(by_use[use] - seen)
                seen |= by_use[use]
            pairs = tuple((first, use) for use in by_use if use != first)
            joined[value] += pairs
            served[value] += tuple((first, use) for first, use in pairs if by_use[first] & by_use[use])
    groups: dict[Hashable, list[str]] = defaultdict(list)
    for value, counts in uses.items():
        groups[tuple(sorted(counts.items())), joined[value], served[value]].append(value)
    return tuple(
        ParameterClass(
            values=tuple(values),
            uses=dict(sorted(uses[values[0]].items())),
            same_layout=joined[values[0]],
            served=served[values[0]],
            gradients=_gradients(values, timeline),
            working={use: _working(use[0], values, regions, timeline) for use in uses[values[0]]},
            pending={use: _pending(use[0], values, regions, timeline) for use in uses[values[0]]},
            unreduced=_unreduced(values, timeline),
        )
        for values in groups.values()
    )


def _has_gradient(regions: RegionGraph, use: tuple[int, int]) -> bool:
    """Return whether an op that reads the slot of ``use`` (region class, slot) has a backward."""
    region_class, slot = use
    region = regions.regions[regions.classes[region_class].members[0]]
    return any(
        region.slots[output].value.requires_grad
        for region_op in region.ops
        if slot in region_op.inputs
        for output in region_op.outputs
    )


def _reader_calls(regions: RegionGraph) -> dict[str, dict[str, dict[tuple[int, int], set[int]]]]:
    """Return parameter -> name -> use (region class, slot) -> calls of the parameter's reader that contain the use."""
    found: dict[str, dict[str, dict[tuple[int, int], set[int]]]] = {}
    for region in regions.regions:
        alike = _alike_in_opaque(region)
        for position, slot in enumerate(region.slots):
            if slot.origin == "parameter" and slot.parameter is not None and slot.reader is not None:
                by_use = found.setdefault(slot.value.name, {}).setdefault(slot.parameter, {})
                use = regions.class_of[region.index], alike.get(position, position)
                by_use.setdefault(use, set()).add(slot.reader)
    return found


def _alike_in_opaque(region: Region) -> dict[int, int]:
    """Return position of a parameter of an opaque module -> position of the first of its kind.

    Those of equal blocks inside the module are of one kind: all are whole where it runs.
    """
    first: dict[Hashable, int] = {}
    return {
        position: first.setdefault((re.sub(r"\d+", "*", slot.parameter), slot.value.shape, slot.value.dtype), position)
        for item in region.ops
        if item.op.target_name == OP_NAME
        for position in item.inputs
        if (slot := region.slots[position]).origin == "parameter" and slot.parameter is not None
    }


def _gradients(values: Sequence[str], timeline: Timeline) -> Lifetime:
    """Return the lifetime of gradients: at each candidate, the number of parameters that only later ops use."""
    first = sorted(min(timeline.uses[value], default=NEVER) for value in values)
    return Lifetime.of({
        c.quantity("gradients"): len(first) - bisect_right(first, c.position) for c in timeline.candidates
    })  # fmt: skip


def _pending(region_class: int, values: Sequence[str], regions: RegionGraph, timeline: Timeline) -> Lifetime:
    """Return the lifetime of gradients of a last use, in ``region_class``, that wait for the gradients of other uses.

    Autograd adds up the gradients of all uses before it accumulates them into the parameter's gradient.
    """
    members = regions.classes[region_class].members
    inside = {region_op.op.name for member in members for region_op in regions.regions[member].ops}
    counts: Counter[Quantity] = Counter()
    for value in values:
        uses = timeline.uses[value]
        if len(uses) > 1 and regions.graph.ops[max(uses)].name in inside:
            waiting = (m for m in timeline.candidates if min(uses) <= m.position < max(uses))
            counts.update(candidate.quantity("gradients") for candidate in waiting)
    return Lifetime.of(counts)


def _unreduced(values: Sequence[str], timeline: Timeline) -> Lifetime:
    """Return the lifetime of gradients that wait for their block.

    At each candidate in a block, it counts the parameters that later ops of the block use first.
    """
    first = sorted(min(timeline.uses[value], default=NEVER) for value in values)
    counts: dict[Quantity, int] = {}
    for block, candidates in timeline.blocks.items():
        for candidate in candidates:
            later = bisect_right(first, timeline.ends[block]) - bisect_right(first, candidate.position)
            if later > 0:
                counts[candidate.quantity("gradients")] = later
    return Lifetime.of(counts)


def _working(region_class: int, values: Sequence[str], regions: RegionGraph, timeline: Timeline) -> Lifetime:
    """Return the lifetime of parameters in use: at each candidate in ``region_class``, how many its op uses."""
    members = regions.classes[region_class].members
    inside = {region_op.op.name for member in members for region_op in regions.regions[member].ops}
    counts = {}
    for candidate in timeline.candidates:
        if regions.graph.ops[candidate.position].name in inside:
            counts[candidate.quantity("transient")] = sum(
                candidate.position in timeline.uses[value] for value in values
            )
    return Lifetime.of(counts)


def find_fsdp_groups(
    regions: RegionGraph, blocks: Blocks, parameters: Sequence[ParameterClass], timeline: Timeline
) -> tuple[FsdpGroup, ...]:
    """Return the kinds of blocks that can have FSDP groups.

    A group's parameters are used once, inside their block. Blocks without a backward have none:
    ``fully_shard`` would not free their parameters before the step ends.
    """
    graph = regions.graph
    home: dict[str, str] = {}
    contents: dict[str, list[int]] = defaultdict(list)
    differentiable: set[str] = set()
    for region in regions.regions:
        block = blocks.of_region.get(region.index)
        if block is None:
            continue
        contents[block].append(regions.class_of[region.index])
        if any(graph.values[name].requires_grad for item in region.ops for name in item.op.outputs):
            differentiable.add(block)
        for slot in region.slots:
            if slot.origin == "parameter" and slot.parameter is not None and slot.parameter.startswith(block + "."):
                home[slot.value.name] = block
    counts_by_block: dict[str, Counter[int]] = defaultdict(Counter)
    for index, parameter in enumerate(parameters):
        blocks_of = [home.get(name, "") for name in parameter.values]
        if not parameter.is_used_again and differentiable.issuperset(blocks_of):
            for block in blocks_of:
                counts_by_block[block][index] += 1
    groups: list[FsdpGroup] = []
    in_order = sorted(counts_by_block, key=lambda block: timeline.starts[block])
    last = in_order[-1] if in_order else ""
    # If the first chunk has no block, the first block of all begins a later chunk. `is_first` counts it already.
    leading = {next((b for b in in_order if timeline.starts[b] >= chunk), "") for chunk in timeline.chunks}
    leading -= set(in_order[:1])
    for block in blocks.representatives:
        if block in counts_by_block:
            members = [(graph.values[parameters[index].values[0]], n) for index, n in counts_by_block[block].items()]
            alike = [b for b in counts_by_block if sorted(contents[b]) == sorted(contents[block])]
            ends = [min(timeline.starts[b] for b in counts_by_block), max(timeline.starts[b] for b in counts_by_block)]
            inside = {
                candidate.quantity("transient"): (1 + (timeline.starts[b] > ends[0]), int(timeline.starts[b] < ends[1]))
                for b in alike
                for candidate in timeline.blocks.get(b, ())
            }
            groups.append(
                FsdpGroup(
                    kind=block,
                    blocks=tuple(alike),
                    parameter_counts=dict(counts_by_block[block]),
                    nbytes=sum(n * value.nbytes for value, n in members),
                    trained_numel=sum(
                        n * value.nbytes // value.dtype.itemsize for value, n in members if value.requires_grad
                    ),
                    is_first=not groups,
                    chunk_heads=len(leading.intersection(alike)),
                    unsharded=Lifetime.of({name: whole for name, (whole, _) in inside.items()}),
                    reduce_buffers=Lifetime.of({name: reducing for name, (_, reducing) in inside.items()}),
                    unsharded_until_backward=_gathered(alike, last, timeline),
                    unreduced=_arrived([b for b in alike if b in timeline.blocks], home, regions, timeline),
                )
            )
    return tuple(groups)


def _gathered(alike: Sequence[str], last: str, timeline: Timeline) -> Lifetime:
    """Return the lifetime of parameters that stay unsharded: number of blocks ``alike`` that ran forward, not backward.

    After the ``last`` of all blocks, one more counts: torch keeps its all-gather buffer until the root's forward ends.
    """
    starts = [timeline.starts[block] for block in alike]
    buffer_from = timeline.ends[last] if last in alike else NEVER
    return Lifetime.of({
        candidate.quantity("parameters"): sum(start <= candidate.position for start in starts)
        + (candidate.position > buffer_from)
        for candidate in timeline.candidates
    })  # fmt: skip


def _arrived(blocks: Sequence[str], home: Mapping[str, str], regions: RegionGraph, timeline: Timeline) -> Lifetime:
    """Return, at candidates inside each block, the fraction of its gradients' bytes that later ops have computed."""
    shares: dict[Quantity, float] = {}
    for block in blocks:
        values = [regions.graph.values[name] for name in home if home[name] == block]
        sizes = [(min(timeline.uses[value.name]), value.nbytes) for value in values if value.requires_grad]
        whole = sum(nbytes for _, nbytes in sizes)
        for candidate in timeline.blocks[block] if whole else ():
            later = sum(nbytes for position, nbytes in sizes if position > candidate.position)
            shares[candidate.quantity("gradients")] = later / whole
    return Lifetime.of(shares)
