"""Uniform storage: parameters that are stored unlike most others are stored alike, where that costs little."""

from __future__ import annotations

import dataclasses
from collections import Counter
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
    common = _most_common(formulator, structure, decision)
    if common is None:
        return decision
    for position in range(len(structure.parameters)):
        if decision.stored[position] == common or not _possible(formulator, structure, decision, position, common):
            continue
        stored = (*decision.stored[:position], common, *decision.stored[position + 1 :])
        changed = dataclasses.replace(decision, stored=stored)
        if accepts(changed):
            decision = changed
    return decision


def _most_common(formulator: Formulator, structure: Structure, decision: Decision) -> StorageOption | None:
    """Return the storage option of most bytes of parameters in FSDP groups; None: there is no group."""
    nbytes: Counter[StorageOption] = Counter()
    for parameter, choice in zip(structure.parameters, decision.stored, strict=True):
        if choice.fsdp_axes is not None:
            nbytes[choice] += formulator.value_of(parameter).nbytes * len(parameter.values)
    return nbytes.most_common(1)[0][0] if nbytes else None


def _possible(
    formulator: Formulator, structure: Structure, decision: Decision, position: int, option: StorageOption
) -> bool:
    """Return whether a parameter class can be stored as ``option`` under the strategies of ``decision``."""
    parameter = structure.parameters[position]
    in_group = any(position in block.parameter_counts for block in structure.fsdp_groups)
    layouts = stored_layouts(formulator.value_of(parameter), formulator.pricer.run.mesh.shape)
    if not in_group or option.stored not in layouts:
        return False
    if formulator.parameter_price(parameter, option) is None:
        return False
    return all(
        formulator.use_price(parameter, use, option, producer_port(decision.strategies[use[0]], use[1])) is not None
        for use in parameter.uses
    )
