"""``techniques="auto"``: the plan with the techniques that pay, each with its measured gain.

search without techniques
search with fused ops, which almost always pay: the faster of the two gives the configuration
on that configuration (mesh, micro-batches, checkpointing): with each of the others, and without each that pays
`planner.build` then searches with those that pay, for the plan that is given
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from cost_model.layouts.layout import MeshSpec
from planner.errors import InfeasibleError, JobError, ModelError, SolverError
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule, trace_module, with_fused_projections
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

_SEARCH_SHARE, _TRIAL_SHARE = 0.3, 0.02
"""Fractions of the time limit: of each search over all meshes, and of each plan on one configuration."""

NOTHING_PAYS = f"techniques: none gives {LEAST_GAIN:.0%} of the step time or more."

_Names = frozenset[Technique]
_NO_NAMES: _Names = frozenset()
_FUSED_OPS: _Names = frozenset({"fused-ops"})
_REALLGATHER: _Names = frozenset({"reallgather"})


class _Configuration(NamedTuple):
    """What stays fixed while techniques are compared."""

    mesh: MeshSpec
    micro_batches: int
    ac: str | None

    @classmethod
    def of_plan(cls, plan: ShardingPlan) -> _Configuration:
        return cls(plan.mesh.spec, plan.micro_batches, plan.job.ac)


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoTechniques:
    """The techniques that pay for a job.

    Attributes:
        spec: the job with these techniques, and those that it named next to "auto".
        gains_s: technique -> seconds that a step would take more without it; None: not measured, or nothing fits
            without it.
        search_s: seconds of the search for them.
    """

    spec: JobSpec
    gains_s: Mapping[Technique, float | None]
    search_s: float

    def recorded(self, plan: ShardingPlan) -> ShardingPlan:
        """Return ``plan``, which was made for ``spec``, with the gains of its techniques."""
        techniques = tuple(
            dataclasses.replace(technique, gain_s=self.gains_s.get(technique.name)) for technique in plan.techniques
        )
        notes = plan.notes if self.gains_s else (*plan.notes, NOTHING_PAYS)
        timings = {**plan.timings, "techniques_s": self.search_s}
        return dataclasses.replace(plan, techniques=techniques, notes=notes, timings=timings)


def auto_techniques(
    model: nn.Module | TracedModule,
    spec: JobSpec,
    *,
    example_inputs: GivenInputs = None,
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> AutoTechniques:
    """Return the techniques that pay for ``spec``, whose techniques are "auto".

    Techniques that ``spec`` names next to "auto" are used in any case. Other arguments are those of `build_plan`.

    Raises:
        PlannerError: as `build_plan`.
    """
    if baselines.parse_planner(spec.planner)[1] is not None:
        advice = "Name the techniques, or choose another planner."
        raise JobError("techniques is auto, and a random plan is not optimised.", what_to_do=advice, field="techniques")
    started = time.perf_counter()
    choice = _Choice(_Sessions(model, spec, example_inputs, tp_plan, progress))
    choice.choose()
    names = choice.names | frozenset(spec.listed_techniques)
    return AutoTechniques(
        spec=dataclasses.replace(spec, techniques=tuple(name for name in TECHNIQUES if name in names)),
        gains_s={name: choice.gains_s.get(name) for name in choice.names},
        search_s=time.perf_counter() - started,
    )


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
            assert not isinstance(self.model, TracedModule)
            try:
                with_fused_projections(self.model)
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

    def search_if_any(self, names: _Names) -> ShardingPlan | None:
        """Return the result of `search`, or None where there is no plan."""
        session = self._session(names, self._limited(_SEARCH_SHARE))
        try:
            return session.plan_if_any(planner=self.spec.planner, mesh=self.spec.mesh)
        except SolverError:  # time was up
            return None

    def plan_at(self, names: _Names, at: _Configuration, known: ShardingPlan | None = None) -> ShardingPlan | None:
        """Return the fastest plan with the techniques ``names`` at a configuration; None: there is none that fits.

        Args:
            names: the techniques.
            at: the configuration.
            known: the plan of a search with ``names`` that chose this configuration. It is the result, unless the
                search knows a faster plan.
        """
        if (names, at) not in self._plans:
            is_fastest = known is not None and (known.solver is None or known.solver.fastest_s is None)
            self._plans[names, at] = known if is_fastest else self._planned_at(names, at)
        return self._plans[names, at]

    def _planned_at(self, names: _Names, at: _Configuration) -> ShardingPlan | None:
        spec = dataclasses.replace(self._limited(_TRIAL_SHARE), micro_batches=at.micro_batches, ac=at.ac, tolerance=0.0)
        try:
            return self._session(names, spec).plan_if_any(planner=self.spec.planner, mesh=at.mesh)
        except SolverError:  # time was up
            return None

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
                opaque_modules=spec.opaque_modules,
            )
        return self._traced[form]


class _Choice:
    """The choice of techniques.

    Attributes:
        names: the techniques that pay, and are used in addition to those of the job.
        gains_s: technique -> seconds that a step would take more without it; None: nothing fits without it.
    """

    def __init__(self, sessions: _Sessions) -> None:
        self._sessions = sessions
        self._candidates = sessions.candidates()
        self.names: _Names = _NO_NAMES
        self.gains_s: dict[Technique, float | None] = {}

    def choose(self) -> None:
        """Set the names of the techniques that pay, and their gains.

        Raises:
            PlannerError: there is no plan, even with all techniques.
        """
        try:
            plain = self._sessions.search(_NO_NAMES)
        except InfeasibleError:
            if not self._candidates:
                raise
            self._choose_to_fit()
            return
        fused = self._sessions.search_if_any(_FUSED_OPS) if self._candidates >= _FUSED_OPS else None
        if fused is not None and _used(fused) >= _FUSED_OPS and _share(fused, plain) >= LEAST_GAIN:
            self.names, self.gains_s["fused-ops"] = _FUSED_OPS, _fastest_s(plain) - _fastest_s(fused)
            first = fused
        else:
            first = plain
        others = self._others(first)
        if not others:
            return
        alone, self.names = self.names, self.names | others
        at = _Configuration.of_plan(first)
        self._add_gains(others, at)
        if alone:
            # Without fused ops, the configuration of the plan without techniques is the one that is known to fit.
            plan = self._sessions.plan_at(self.names, at)
            unfused = self._sessions.plan_at(others, _Configuration.of_plan(plain))
            self.gains_s["fused-ops"] = _gain_s(plan, unfused)

    def _others(self, first: ShardingPlan) -> _Names:
        """Return the techniques other than fused ops that pay on the configuration of ``first``."""
        at = _Configuration.of_plan(first)
        candidates = self._candidates - _FUSED_OPS
        if not _all_gathers_inputs(first):
            candidates -= _REALLGATHER
        others = _NO_NAMES
        for name in CONSIDERED:
            if name in candidates:
                before = self._sessions.plan_at(self.names | others, at, known=None if others else first)
                plan = self._sessions.plan_at(self.names | others | {name}, at)
                if plan is not None and name in _used(plan) and _share(plan, before) >= LEAST_GAIN:
                    others |= {name}
        return self._paying(self.names, others, at)

    def _choose_to_fit(self) -> None:
        """Choose where nothing fits without techniques: techniques save memory too."""
        plan = self._sessions.search(self._candidates)
        at = _Configuration.of_plan(plan)
        self.names = self._paying(_NO_NAMES, self._candidates & _used(plan), at)
        self._add_gains(self.names, at)

    def _paying(self, fixed: _Names, names: _Names, at: _Configuration) -> _Names:
        """Return the techniques of ``names`` that pay where all of the result, and ``fixed``, are used."""
        while names:
            plan = self._sessions.plan_at(fixed | names, at)
            if plan is None:
                return names
            shares = {name: _share(plan, self._sessions.plan_at((fixed | names) - {name}, at)) for name in names}
            least = min(sorted(shares), key=lambda name: shares[name])
            if shares[least] >= LEAST_GAIN:
                return names
            names -= {least}
        return names

    def _add_gains(self, names: _Names, at: _Configuration) -> None:
        """Set the gains of ``names`` on a configuration: by how much a step is longer without each."""
        plan = self._sessions.plan_at(self.names, at)
        for name in names:
            self.gains_s[name] = _gain_s(plan, self._sessions.plan_at(self.names - {name}, at))


def _used(plan: ShardingPlan) -> _Names:
    return frozenset(technique.name for technique in plan.techniques)


def _share(plan: ShardingPlan, without: ShardingPlan | None) -> float:
    """Return by how much a step of ``without`` is longer, as a fraction of a step of ``plan``; inf: there is none."""
    return math.inf if without is None else _fastest_s(without) / _fastest_s(plan) - 1.0


def _gain_s(plan: ShardingPlan | None, without: ShardingPlan | None) -> float | None:
    """Return the seconds by which a step of ``without`` is longer than one of ``plan``; None: one of them is none."""
    return None if plan is None or without is None else max(_fastest_s(without) - _fastest_s(plan), 0.0)


def _fastest_s(plan: ShardingPlan) -> float:
    """Return the seconds of a step of the fastest plan of a search, which may have chosen a simpler one."""
    fastest_s = None if plan.solver is None else plan.solver.fastest_s
    return _step_time_s(plan) if fastest_s is None else fastest_s


def _step_time_s(plan: ShardingPlan) -> float:
    """Return the estimated step time in seconds of a plan that has an estimate."""
    assert plan.estimate is not None
    return plan.estimate.step_time_s


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
