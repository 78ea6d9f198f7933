"""Uniform storage: parameters that are stored unlike most others are stored alike, where that costs little."""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable

from planner.formulation.decision import Decision
from planner.formulation.formulate import Formulator
from planner.liveness.structure import Structure
from planner.pricing.port_layouts import producer_port
from planner.pricing.storage_options import StorageOption, stored_layouts


def with_uniform_storage(
    formulator: Formulator, structure: Structure, decision: Decision, accepts: Callable[[Decision], bool]
) -> Decision:
    """Return ``decision`` in which as many parameters as possible are stored like most bytes of the FSDP groups.

    Strategies stay as they are: only parameters that their ops use in the layout that such a group all-gathers to can
    change. A decision without FSDP groups is returned as it is.

    Args:
        formulator: prices the decisions.
        structure: the structure of the run.
        decision: the decision to change.
        accepts: whether a changed decision is allowed, by its step time and memory.
    """
    most_common = _most_common(formulator, structure, decision)
    for position, parameter in enumerate(structure.parameters):
        common = most_common.get(formulator.value_of(parameter).requires_grad, decision.stored[position])
        if decision.stored[position] == common or not _possible(formulator, structure, decision, position, common):
            continue
        stored = (*decision.stored[:position], common, *decision.stored[position + 1 :])
        changed = dataclasses.replace(decision, stored=stored)
        if accepts(changed):
            decision = changed
    return decision


def _most_common(formulator: Formulator, structure: Structure, decision: Decision) -> dict[bool, StorageOption]:
    """Return the storage options of most bytes of trained (True) and of frozen parameters in FSDP groups."""
    nbytes: dict[bool, Counter[StorageOption]] = defaultdict(Counter)
    for parameter, choice in zip(structure.parameters, decision.stored, strict=True):
        value = formulator.value_of(parameter)
        if choice.fsdp_axes is not None:
            nbytes[value.requires_grad][choice] += value.nbytes * len(parameter.values)
    return {trained: counter.most_common(1)[0][0] for trained, counter in nbytes.items()}


def _possible(
    formulator: Formulator, structure: Structure, decision: Decision, position: int, option: StorageOption
) -> bool:
    """Return whether a parameter class can be stored as ``option`` under the strategies of ``decision``."""
    parameter = structure.parameters[position]
    in_group = any(position in block.parameter_counts for block in structure.fsdp_groups)
    layouts = stored_layouts(formulator.value_of(parameter), formulator.pricer.run.mesh.shape, (), formulator.rounded)
    if not in_group or option.stored not in layouts:
        return False
    if formulator.parameter_price(parameter, option) is None:
        return False
    return all(
        formulator.use_price(parameter, use, option, producer_port(decision.strategies[use[0]], use[1])) is not None
        for use in parameter.uses
    )
