"""``techniques="auto"``: the plan with the techniques that pay, each with its measured gain.

search without techniques -> configuration (mesh, micro-batches, checkpointing)
on that configuration: plan with all candidates, and without each; drop those that give too little
search with the rest; where its configuration is another one, the same there
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn

from cost_model.layouts.layout import MeshSpec
from planner.errors import InfeasibleError, JobError, ModelError, SolverError
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule, trace_module
from planner.plan.job_spec import JobSpec
from planner.plan.ports import Port, ports_of
from planner.plan.sharding_plan import ShardingPlan
from planner.plan.techniques import TECHNIQUES, Technique
from planner.progress import Progress, SweepProgress
from planner.run import baselines
from planner.session import PlanningSession

LEAST_GAIN = 0.01
"""Fraction of the step time that a technique has to give, with all others in use, to be kept."""

CONSIDERED: tuple[Technique, ...] = ("fused-ops", "fused-projections", "zigzag", "reallgather")
"""The techniques that ``auto`` chooses from. The executor does not run async-tp; flash3 needs a package that may be
missing where the plan runs; heterogeneous-blocks makes equal blocks differ."""

_TRAINING_ONLY: tuple[Technique, ...] = ("zigzag", "reallgather")
_OF_THE_GRAPH: tuple[Technique, ...] = ("fused-ops", "fused-projections")
"""Techniques that change the graph: a model that is traced already either has them or not."""

_SEARCH_SHARE, _TRIAL_SHARE = 0.4, 0.02
"""Fractions of the time limit: of each search over all meshes, and of each plan on one configuration."""

NOTHING_PAYS = f"techniques: none gives {LEAST_GAIN:.0%} of the step time or more."

_Names = frozenset[Technique]
_NO_NAMES: _Names = frozenset()


class _Configuration(NamedTuple):
    """What stays fixed while techniques are compared; ``micro_batches`` and ``ac`` None: the planner chooses them."""

    mesh: MeshSpec
    micro_batches: int | None
    ac: str | None

    @classmethod
    def of_plan(cls, plan: ShardingPlan) -> _Configuration:
        return cls(plan.mesh.spec, plan.micro_batches, plan.job.ac)


def plan_with_auto_techniques(
    model: nn.Module | TracedModule,
    spec: JobSpec,
    *,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ShardingPlan:
    """Return the plan of ``spec``, whose techniques are "auto", with the techniques that pay.

    Techniques that ``spec`` names next to "auto" are used in any case. Other arguments are those of `build_plan`.

    Raises:
        PlannerError: as `build_plan`.
    """
    if baselines.parse_planner(spec.planner)[1] is not None:
        advice = "Name the techniques, or choose another planner."
        raise JobError("techniques is auto, and a random plan is not optimised.", what_to_do=advice, field="techniques")
    started = time.perf_counter()
    choice = _Choice(_Sessions(model, spec, example_inputs, tp_plan, progress))
    plan, names = choice.plan()
    gains_s = choice.gains_s(plan, names)
    techniques = tuple(
        dataclasses.replace(technique, gain_s=gains_s.get(technique.name)) for technique in plan.techniques
    )
    notes = plan.notes if names else (*plan.notes, NOTHING_PAYS)
    others_s = time.perf_counter() - started - sum(plan.timings.values())
    timings = {**plan.timings, "techniques_s": max(others_s, 0.0)}
    return dataclasses.replace(plan, techniques=techniques, notes=notes, timings=timings)


class _Sessions:
    """Plans of one job with any techniques. The model is traced once for each form of its graph."""

    def __init__(
        self,
        model: nn.Module | TracedModule,
        spec: JobSpec,
        example_inputs: GivenInputs,
        tp_plan: Mapping[str, str] | None,
        progress: Progress | None,
    ) -> None:
        self.model, self.spec = model, spec
        self._inputs, self._tp_plan, self._progress = example_inputs, tp_plan, progress
        self._traced: dict[tuple[bool, bool], TracedModule] = {}
        self._plans: dict[tuple[_Names, _Configuration], ShardingPlan | None] = {}
        self.named = frozenset(spec.listed_techniques)

    def candidates(self) -> _Names:
        """Return the techniques that may be added to those of the job."""
        excluded = self.named | (_NO_NAMES if self.spec.phase == "training" else frozenset(_TRAINING_ONLY))
        if isinstance(self.model, TracedModule):
            excluded |= frozenset(_OF_THE_GRAPH)
        names = frozenset(CONSIDERED) - excluded
        if "fused-projections" in names:
            try:
                self._trace(frozenset({"fused-projections"}))
            except ModelError:
                names -= {"fused-projections"}
        return names

    def search(self, names: _Names) -> ShardingPlan:
        """Return the fastest plan with the techniques ``names``, searched as the job says.

        Raises:
            PlannerError: there is no plan.
        """
        session = self._session(names, self._limited(_SEARCH_SHARE))
        return session.plan(planner=self.spec.planner, mesh=self.spec.mesh)

    def plan_at(self, names: _Names, at: _Configuration) -> ShardingPlan | None:
        """Return the fastest plan with the techniques ``names`` at a configuration; None: there is none that fits."""
        if (names, at) not in self._plans:
            spec = dataclasses.replace(
                self._limited(_TRIAL_SHARE), micro_batches=at.micro_batches, ac=at.ac, tolerance=0.0
            )
            try:
                plan = self._session(names, spec).plan_if_any(planner=self.spec.planner, mesh=at.mesh)
            except SolverError:  # time was up
                plan = None
            self._plans[names, at] = plan
        return self._plans[names, at]

    def _limited(self, share: float) -> JobSpec:
        limit_s = self.spec.time_limit_s
        return dataclasses.replace(self.spec, time_limit_s=None if limit_s is None else limit_s * share)

    def _session(self, names: _Names, spec: JobSpec) -> PlanningSession:
        techniques = tuple(name for name in TECHNIQUES if name in self.named | names)
        return PlanningSession(
            self._trace(names),
            spec=dataclasses.replace(spec, techniques=techniques),
            tp_plan=self._tp_plan,
            progress=self._progress_of(techniques),
        )

    def _progress_of(self, techniques: Iterable[Technique]) -> Progress | None:
        subject, progress = f"techniques {', '.join(techniques) or 'none'}", self._progress
        return None if progress is None else lambda event: progress(SweepProgress(subject=subject, event=event))

    def _trace(self, names: _Names) -> TracedModule:
        if isinstance(self.model, TracedModule):
            return self.model
        spec, used = self.spec, self.named | names
        form = "fused-ops" in used, "fused-projections" in used
        if form not in self._traced:
            self._traced[form] = trace_module(
                self.model,
                example_inputs=self._inputs,
                batch=spec.batch,
                seq=spec.seq,
                micro_batches=spec.micro_batches,
                dtype=spec.dtype,
                phase=spec.phase,
                fused_ops=form[0],
                fused_projections=form[1],
            )
        return self._traced[form]


class _Choice:
    """The choice of techniques by leave-one-out."""

    def __init__(self, sessions: _Sessions) -> None:
        self._sessions = sessions

    def plan(self) -> tuple[ShardingPlan, _Names]:
        """Return the fastest plan with the techniques that pay, and the techniques that were added to the job's.

        Raises:
            PlannerError: there is no plan, even with all techniques.
        """
        names, plain = self._sessions.candidates(), None
        try:
            plain = plan = self._sessions.search(_NO_NAMES)
        except InfeasibleError:
            if not names:
                raise
            plan = self._sessions.search(names)  # techniques save memory too: perhaps a plan fits with them only
        else:
            names -= _NO_NAMES if _all_gathers_inputs(plain) else frozenset[Technique]({"reallgather"})
        while True:
            at = _Configuration.of_plan(plan)
            remaining = self._paying(names, at)
            if not remaining:
                return (plan, names) if plain is None else (plain, _NO_NAMES)
            if plan is not plain and remaining == names:
                return plan, names
            names, plan = remaining, self._sessions.search(remaining)
            if _Configuration.of_plan(plan) == at:
                return plan, names

    def gains_s(self, plan: ShardingPlan, names: _Names) -> dict[Technique, float | None]:
        """Return the seconds that a step would take more without each of ``names``; None: nothing fits without.

        All are compared on the configuration of ``plan``, which has the techniques ``names``.
        """
        at = _Configuration.of_plan(plan)
        with_all_s = self._step_time_s(names, at) if names else None
        gains: dict[Technique, float | None] = dict.fromkeys(names)
        for name in names:
            without_s = self._step_time_s(names - {name}, at)
            if with_all_s is not None and without_s is not None:
                gains[name] = max(without_s - with_all_s, 0.0)
        return gains

    def _paying(self, names: _Names, at: _Configuration) -> _Names:
        """Return the techniques of ``names`` that pay where all of the result are used."""
        while names:
            plan = self._sessions.plan_at(names, at)
            if plan is None:
                return _NO_NAMES
            used = names & {technique.name for technique in plan.techniques}
            if used != names:
                names = used
                continue
            step_s = _step_time_s(plan)
            shares = {name: self._share(names - {name}, at, step_s) for name in names}
            least = min(sorted(shares), key=lambda name: shares[name])
            if shares[least] >= LEAST_GAIN:
                return names
            names -= {least}
        return names

    def _share(self, names: _Names, at: _Configuration, step_s: float) -> float:
        """Return by how much a step with ``names`` only is longer than ``step_s``, as a fraction of it."""
        without_s = self._step_time_s(names, at)
        return math.inf if without_s is None else without_s / step_s - 1.0

    def _step_time_s(self, names: _Names, at: _Configuration) -> float | None:
        """Return the seconds of a step with ``names``; None: no plan fits.

        It is of the fastest plan on a configuration or, where nothing fits there, on the configuration's mesh.
        """
        spec = self._sessions.spec
        wider = at._replace(micro_batches=spec.micro_batches, ac=spec.ac)
        plan = self._sessions.plan_at(names, at) or self._sessions.plan_at(names, wider)
        return None if plan is None else _step_time_s(plan)


def _all_gathers_inputs(plan: ShardingPlan) -> bool:
    """Return whether a module's input is all-gathered on any axis: only such inputs can be re-all-gathered."""
    ports = (port for spec in plan.input_plan.values() for _, port in ports_of(spec))
    return any(_is_all_gathered(port) for port in ports)


def _is_all_gathered(port: Port) -> bool:
    if port.source is None:
        return False
    return any(
        before.is_shard() and after.is_replicate() for before, after in zip(port.source, port.layout, strict=True)
    )


def _step_time_s(plan: ShardingPlan) -> float:
    """Return the estimated step time in seconds of a plan that has an estimate."""
    assert plan.estimate is not None
    return plan.estimate.step_time_s
