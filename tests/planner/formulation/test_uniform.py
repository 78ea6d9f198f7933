"""Uniform storage: a parameter that is stored apart is stored like the rest, if the changed decision is accepted."""

from __future__ import annotations

import dataclasses

import pytest
from support import families
from torch.distributed.tensor import Replicate

from planner.formulation.decision import Decision
from planner.formulation.estimate import itemise
from planner.formulation.formulate import Formulator
from planner.formulation.perturbed import (
    SLOWER_COMMUNICATION,
    SLOWER_KERNELS,
    exposed_communication,
    perturbed_step_times_s,
    slow_communication,
    slow_kernels,
)
from planner.formulation.uniform import with_uniform_storage
from planner.ilp.quantities import BACKWARD, EXPOSED, FORWARD
from planner.ilp.step_cost import step_time_s
from planner.liveness.structure import Structure
from planner.pricing.storage_options import StorageOption
from planner.run.baselines import fully_sharded
from planner.run.run_planner import RunPlanner
from planner.session import MeshSpec, PlanningSession

APART = StorageOption(stored=(Replicate(),), accumulated=None)


@pytest.fixture(scope="module")
def fsdp() -> tuple[Formulator, Structure, Decision]:
    module, inputs = families.make("llama", 8)
    session = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, dtype="fp32")
    planner: RunPlanner = session._planner
    mesh = MeshSpec.parse("dp=4")
    candidate = planner.solve(planner.run_of(mesh, 1, "none"), fully_sharded(mesh), memory_bytes=None)
    assert candidate is not None
    formulator, structure = planner.formulator(candidate.run)
    return formulator, structure, candidate.decision


def test_a_parameter_that_is_stored_apart_is_stored_like_the_rest(
    fsdp: tuple[Formulator, Structure, Decision],
) -> None:
    formulator, structure, decision = fsdp
    in_groups = [position for position, choice in enumerate(decision.stored) if choice.fsdp_axes is not None]
    assert len(in_groups) > 2
    first = in_groups[0]
    stored = tuple(APART if position == first else choice for position, choice in enumerate(decision.stored))
    apart = dataclasses.replace(decision, stored=stored)
    assert with_uniform_storage(formulator, structure, apart, lambda changed: True) == decision
    assert with_uniform_storage(formulator, structure, apart, lambda changed: False) == apart
    step_s = step_time_s(itemise(formulator, structure, decision).charge)

    def accepts(changed: Decision) -> bool:
        return step_time_s(itemise(formulator, structure, changed).charge) < step_s

    assert with_uniform_storage(formulator, structure, apart, accepts) == apart


def test_a_decision_without_fsdp_groups_stays(fsdp: tuple[Formulator, Structure, Decision]) -> None:
    formulator, structure, decision = fsdp
    replicated = dataclasses.replace(decision, stored=tuple(APART for _ in decision.stored), reshard_after={})
    assert with_uniform_storage(formulator, structure, replicated, lambda changed: True) == replicated


def test_perturbed_step_times(fsdp: tuple[Formulator, Structure, Decision]) -> None:
    """By hand: 10 s of kernels, 2 s of them the optimizer's outside of the phases, 3 s overlapped, 1 s blocking."""
    formulator, structure, decision = fsdp
    totals = {
        FORWARD.compute: 8.0,
        FORWARD.prefetch["inside-node"]: 3.0,
        BACKWARD.blocking["inside-node"]: 1.0,
        EXPOSED: 2.5,
    }
    assert step_time_s(totals) == 11.5
    assert step_time_s(slow_communication(totals, 2.0)) == pytest.approx(8.0 + SLOWER_COMMUNICATION * 1.5 + 2.0)
    assert step_time_s(exposed_communication(totals)) == pytest.approx(11.5 + 0.6)
    assert step_time_s(slow_kernels(totals, 2.0)) == pytest.approx(SLOWER_KERNELS * 10.0 + 1.5)
    bound_s = step_time_s(itemise(formulator, structure, decision).charge)
    for time_s in perturbed_step_times_s(formulator, structure, decision).values():
        assert bound_s <= time_s <= SLOWER_COMMUNICATION * bound_s


def test_a_link_that_becomes_the_bottleneck_is_seen() -> None:
    totals = {FORWARD.compute: 8.0, FORWARD.prefetch["between-nodes"]: 7.0}
    assert step_time_s(totals) == 8.0
    assert step_time_s(slow_communication(totals, 0.0)) == pytest.approx(9.1)
    assert step_time_s(exposed_communication(totals)) == pytest.approx(9.4)
