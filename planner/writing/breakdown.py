"""`breakdown`: where a decision's seconds and bytes are spent, by parts of the model, ops, tensors and time."""

from __future__ import annotations

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cost_model.layouts.layout import Layout, format_layout
from cost_model.layouts.uneven import piece_numel
from planner.formulation.decision import Decision
from planner.formulation.estimate import Item, collective_rows, items
from planner.formulation.formulate import Formulator
from planner.ilp.quantities import BACKWARD, FORWARD, Charge, Kind, PhaseQuantities
from planner.ilp.step_cost import live_bytes
from planner.liveness.structure import EdgeKey, Structure
from planner.plan.estimate import Breakdown, MemoryPoint, OpCost, ParameterBytes, RedistributionCost, SectionCost
from planner.plan.job import BYTES_PER_ELEMENT
from planner.plan.patterns import match_keys
from planner.pricing.op_times import OpTime
from planner.pricing.price import Collective, Price, add_prices
from planner.strategies.local_ops import packet_name
from planner.writing.fqn_entries import fold_names
from planner.writing.sections import Section, SectionShares, find_sections

MOST_POINTS = 120
"""Most points of the memory curve: a model of many unlike blocks has thousands."""


def breakdown(
    formulator: Formulator,
    structure: Structure,
    decision: Decision,
    modules: Sequence[str],
    rename: Callable[[str], str] = str,
) -> Breakdown:
    """Return where the seconds and bytes of ``decision`` are spent.

    Args:
        modules: FQNs of the model's modules.
        rename: FQN in the graph -> FQN in the model, which differ in the stages of a pipeline.
    """
    return _Writer(formulator, structure, decision, modules, rename).write()


class _Redistribution(NamedTuple):
    """What tells one redistribution from another; see `RedistributionCost`."""

    section: int
    producer: int | None
    consumer: int | None
    before: tuple[str, ...]
    after: tuple[str, ...]


class _Writer:
    def __init__(
        self,
        formulator: Formulator,
        structure: Structure,
        decision: Decision,
        modules: Sequence[str],
        rename: Callable[[str], str],
    ) -> None:
        self._formulator, self._structure, self._decision = formulator, structure, decision
        self._run = formulator.pricer.run
        self._modules, self._rename = modules, rename
        self._position = {op.name: number for number, op in enumerate(structure.regions.graph.ops)}
        self._sections = find_sections(structure)
        self._in_section = SectionShares.of(structure, self._sections)
        self._op_index: dict[tuple[int, str], int] = {}

    def write(self) -> Breakdown:
        """Return the breakdown."""
        all_items = list(items(self._formulator, self._structure, self._decision))
        total = add_prices([item.price for item in all_items])
        ops = tuple(self._ops())
        return Breakdown(
            sections=tuple(self._section_costs(all_items)),
            ops=ops,
            redistributions=tuple(self._redistributions(all_items)),
            parameters=tuple(self._parameters()),
            held=_held(total.charge),
            memory=tuple(_thinned(list(self._memory(total.charge)))),
        )

    @property
    def _share(self) -> float:
        """The micro-batches of a step over those that the idle time of a pipeline is counted with."""
        return self._run.micro_batches / self._run.passes

    # --- sections ------------------------------------------------------------------------------------------------

    def _section_costs(self, all_items: Sequence[Item]) -> Iterator[SectionCost]:
        charges: list[dict[str, float]] = [defaultdict(float) for _ in self._sections]
        collectives: list[list[Collective]] = [[] for _ in self._sections]
        for item in all_items:
            seconds = _seconds(item.price.charge)
            if not (any(seconds.values()) or item.price.collectives):
                continue
            for number, share in self._in_section.of_item(item):
                for name, amount in seconds.items():
                    charges[number][name] += self._share * share * amount
                collectives[number] += [
                    dataclasses.replace(each, count=each.count * share) for each in item.price.collectives
                ]
        for section, charge, own in zip(self._sections, charges, collectives, strict=True):
            yield SectionCost(
                module=self._pattern(section.modules),
                calls=len(section.modules),
                **charge,
                collectives=collective_rows(Price(collectives=tuple(own)), self._run),
            )

    def _pattern(self, names: Sequence[str]) -> str:
        """Return one FQN pattern of the modules ``names`` of the graph."""
        renamed = {self._rename(name): None for name in names}
        folded = list(fold_names(renamed, self._modules))
        if len(folded) == 1:
            return folded[0]
        # Blocks between which others run elsewhere, as in the chunks of an interleaved pipeline.
        names_in_order = list(renamed)
        first, last = (name.rpartition(".") for name in (names_in_order[0], names_in_order[-1]))
        return f"{first[0]}.{{{first[2]}...{last[2]}}}"

    # --- ops and redistributions ---------------------------------------------------------------------------------

    def _ops(self) -> Iterator[OpCost]:
        """Yield the ops of the first block of each section, in execution order."""
        regions = self._structure.regions
        rows = []
        for number, section in enumerate(self._sections):
            first = section.regions[: section.per_block]
            pairs = [(r, index) for index in first for r in regions.regions[index].ops]
            rows += [(number, *pair) for pair in sorted(pairs, key=lambda pair: self._position[pair[0].op.name])]
        for index, (number, region_op, _) in enumerate(rows):
            self._op_index[number, region_op.op.name] = index
        makers = {output: op.name for op in regions.graph.ops for output in op.outputs}
        for number, region_op, region_index in rows:
            section, op = self._sections[number], region_op.op
            time = self._op_time(region_index, op.name)
            profile = self._structure.profile.ops[op.name]
            calls = self._run.micro_batches * len(section.modules)
            made = (self._op_index.get((number, makers.get(name, ""))) for name in op.inputs)
            yield OpCost(
                section=number,
                op=packet_name(op) or op.target_name,
                module=self._module_pattern(section, regions.graph.calls[op.call].fqn),
                flops=profile.flops,
                nbytes=profile.nbytes,
                forward_s=calls * time.forward_s,
                backward_s=calls * time.backward_s,
                inputs=tuple(dict.fromkeys(producer for producer in made if producer is not None)),
            )

    def _module_pattern(self, section: Section, fqn: str) -> str:
        """Return the FQN pattern of module ``fqn`` of a section's first block, in all of its blocks."""
        first = section.modules[0]
        inside = fqn == first or fqn.startswith(f"{first}.")
        if len(section.modules) == 1 or not inside:
            return self._rename(fqn)
        return self._pattern(section.modules) + fqn[len(first) :]

    def _op_time(self, region_index: int, op_name: str) -> OpTime:
        """Return the seconds of one call of an op under the decision, with its recomputation in the backward."""
        structure = self._structure
        region = structure.regions.regions[region_index]
        region_class = structure.regions.class_of[region_index]
        representative = structure.representative(region_class)
        place = next(place for place, each in enumerate(region.ops) if each.op.name == op_name)
        region_op = representative.ops[place]
        strategy, mode = self._decision.strategies[region_class], structure.mode(representative)
        time = self._formulator.pricer.regions.op_time(representative, region_op, strategy, mode)
        return time if self._run.job.training else time._replace(backward_s=0.0)

    def _redistributions(self, all_items: Sequence[Item]) -> Iterator[RedistributionCost]:
        """Yield the redistributions of a step; those of a recomputed forward are one with the forward's own."""
        seconds: dict[_Redistribution, float] = defaultdict(float)
        for item in all_items:
            if item.edge is None or item.ports is None:
                continue
            source, target = item.ports
            once = sum(each.count * each.time_s for each in item.price.collectives)
            for section, share in self._in_section.of_item(item):
                ends = self._ends(section, item.edge)
                key = _Redistribution(section, *ends, _text(source.layout), _text(target.layout))
                seconds[key] += self._share * share * once
        for key, time_s in seconds.items():
            yield RedistributionCost(**key._asdict(), time_s=time_s)

    def _ends(self, section: int, edge: EdgeKey) -> tuple[int | None, int | None]:
        """Return the ops (indices) of a section that make and first read the tensor of an edge."""
        regions = self._structure.regions
        inside = self._sections[section].regions[: self._sections[section].per_block]
        consumer = next((i for i in inside if regions.class_of[i] == edge.consumer), None)
        if consumer is None:
            return None, None
        region = regions.regions[consumer]
        value = region.slots[edge.consumer_slot].value.name
        reader = next((r.op.name for r in region.ops if edge.consumer_slot in r.inputs), None)
        maker = next((op.name for op in regions.graph.ops if value in op.outputs), "")
        return self._op_index.get((section, maker)), self._op_index.get((section, reader or ""))

    # --- bytes ---------------------------------------------------------------------------------------------------

    def _parameters(self) -> Iterator[ParameterBytes]:
        graph, job, mesh = self._structure.regions.graph, self._run.job, self._run.mesh.shape
        for parameter, choice in zip(self._structure.parameters, self._decision.stored, strict=True):
            value = graph.values[parameter.values[0]]
            trained = job.training and value.requires_grad
            itemsize = BYTES_PER_ELEMENT[job.stored_dtype] if trained else value.dtype.itemsize
            one = itemsize * piece_numel(value.shape, choice.stored, mesh, graph.rounded)
            shape = tuple(graph.rounded.get(length, length) for length in value.shape)
            names = {self._rename(graph.parameters[name][0]): None for name in parameter.values}
            folded = fold_names(names, names)
            for pattern, count in _counts(folded, names).items():
                yield ParameterBytes(name=pattern, count=count, shape=shape, nbytes=one * count)

    def _memory(self, total: Charge) -> Iterator[MemoryPoint]:
        """Yield the live bytes at each peak candidate, in the order in which the candidates run."""
        live = live_bytes(total)
        training = self._run.job.training
        before = self._seconds_before()
        whole_s = before[-1] or 1.0
        points = []
        regions = {r.op.name: region for region in self._structure.regions.regions for r in region.ops}
        for candidate in self._structure.timeline.candidates:
            roles = live.get(candidate.key, {})
            if candidate.position < 0:
                points.append(MemoryPoint(phase="update", fraction=1.0, module="", live=_rounded(roles)))
                continue
            done = before[candidate.position] / whole_s
            if training:  # the backward runs from the last op to the first
                done = 1.0 - before[candidate.position + 1] / whole_s
            op = self._structure.regions.graph.ops[candidate.position]
            points.append(
                MemoryPoint(
                    phase="backward" if training else "forward",
                    fraction=min(max(done, 0.0), 1.0),
                    module=self._rename(regions[op.name].fqn if op.name in regions else ""),
                    live=_rounded(roles),
                )
            )
        yield from sorted(points, key=lambda point: (point.phase == "update", point.fraction))

    def _seconds_before(self) -> list[float]:
        """Return, by position, the seconds of the ops before an op in the phase that has the peak; last, of all ops."""
        regions = self._structure.regions
        times: dict[str, OpTime] = {}
        for members in regions.classes:
            first = regions.regions[members.members[0]]
            own = [self._op_time(first.index, r.op.name) for r in first.ops]
            for member in members.members:
                region = regions.regions[member]
                times |= {r.op.name: time for r, time in zip(region.ops, own, strict=True)}
        none = OpTime(0.0, 0.0)
        found = (times.get(op.name, none) for op in regions.graph.ops)
        seconds = (time.backward_s if self._run.job.training else time.forward_s for time in found)
        return list(itertools.accumulate(seconds, initial=0.0))


def _seconds(charge: Charge) -> dict[str, float]:
    """Return the seconds of kernels and waits of a charge, by field of `SectionCost`."""
    seconds = dict.fromkeys(("forward_s", "backward_s", "forward_wait_s", "backward_wait_s"), 0.0)
    for phase, name in ((FORWARD, "forward"), (BACKWARD, "backward")):
        seconds[f"{name}_s"] += charge.get(phase.compute, 0.0)
        seconds[f"{name}_wait_s"] += _wait_s(charge, phase)
    return seconds


def _wait_s(charge: Charge, phase: PhaseQuantities) -> float:
    """Return the seconds of a charge by which communication delays the kernels of a phase."""
    name = phase.compute.phase
    waits = (Kind.SLOWDOWN, Kind.BLOCKING)
    return sum(amount for quantity, amount in charge.items() if quantity.kind in waits and quantity.phase == name)


def _held(total: Charge) -> dict[str, int]:
    """Return role -> bytes that are allocated during the whole step, with the largest working memory of a region."""
    held: dict[str, float] = defaultdict(float)
    for quantity, amount in total.items():
        if quantity.kind is Kind.PERSISTENT and quantity.role is not None:
            held[quantity.role] += amount
    held["transient"] += max((amount for q, amount in total.items() if q.kind is Kind.TRANSIENT), default=0.0)
    return _rounded(held)


def _rounded(roles: Mapping[str, float]) -> dict[str, int]:
    return {role: round(nbytes) for role, nbytes in roles.items() if round(nbytes)}


def _text(layout: Layout | None) -> tuple[str, ...]:
    return () if layout is None else tuple(format_layout(layout))


def _counts(folded: Mapping[str, object], names: Mapping[str, object]) -> dict[str, int]:
    """Return pattern -> how many of ``names`` it stands for."""
    if len(folded) == 1:
        return {next(iter(folded)): len(names)}
    return {pattern: max(len(matched), 1) for pattern, matched in match_keys(dict(folded), list(names)).items()}


def _thinned(points: list[MemoryPoint]) -> list[MemoryPoint]:
    """Return at most about `MOST_POINTS` points, with the one of the most bytes among them."""
    if len(points) <= MOST_POINTS:
        return points
    fullest = max(range(len(points)), key=lambda index: sum(points[index].live.values()))
    step = -(-len(points) // MOST_POINTS)
    kept = {*range(0, len(points), step), fullest, len(points) - 1}
    return [point for index, point in enumerate(points) if index in kept]
