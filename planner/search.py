"""From a model, a cluster and a job to the best plan: the road that `build_plan` takes.

    module --trace--> OpGraph --regions--> RegionGraph --strategies, prices--> Problem --ilp--> Assignment --> ShardingPlan

Around it: every mesh that was not given, numbers of micro-batches and modes of activation checkpointing are tried, lower
bounds first, so that what cannot win is not solved.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cost_model import ClusterSpec, reserve_bytes
from cost_model.layout import MeshSpec
from planner import baselines
from planner.assemble import Decision, decision_from_plan, decision_of, entries_of
from planner.baselines import Restriction
from planner.candidates import (
    TracedModel,
    check_mesh,
    least_compute_s,
    least_memory_bytes,
    meshes_of,
    micro_batch_counts,
    trace_model,
)
from planner.costs import Pricer, Run
from planner.errors import InfeasibleError, JobError, MeshError, PlanMismatchError
from planner.estimate import estimate
from planner.fingerprint import model_fingerprint, torch_fingerprint
from planner.formulate import Formulation, Formulator, Layer
from planner.ilp import least_memory, solve
from planner.inputs import GivenInputs, as_inputs, batch_of, inputs_for
from planner.job import Job
from planner.plan import PlanMesh, ShardingPlan
from planner.polish import polish
from planner.problem import Solution
from planner.random_assignment import random_assignment
from planner.report import Estimate, SolverReport
from planner.strategies.enumerate import StrategyTable

Progress = Callable[[str], None]

STATE_BYTES_PER_PARAMETER = 4
"""A floor for lower bounds: no optimizer and dtype of ours keeps less than one float32 or two bf16 values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A priced decision in one run."""

    run: Run
    layer: Layer
    decision: Decision
    estimate: Estimate
    solution: Solution | None


@dataclass(slots=True)
class Clock:
    """Seconds spent in each stage of planning."""

    spent: dict[str, float] = field(default_factory=dict)

    def add(self, stage: str, started: float) -> None:
        self.spent[stage] = self.spent.get(stage, 0.0) + time.perf_counter() - started


class Search:
    """One planning request: the model is traced once, and every run of it is formulated and solved from that."""

    def __init__(self, traced: TracedModel, job: Job, cluster: ClusterSpec, batch: int, clock: Clock) -> None:
        self._traced = traced
        self._job = job
        self._cluster = cluster
        self._batch = batch
        self._clock = clock
        self._table = StrategyTable()
        self._memory_bytes = job.memory_bytes or cluster.device.memory_bytes

    @property
    def memory_bytes(self) -> int:
        """The cap on the peak per device."""
        return self._memory_bytes

    def run_of(self, mesh: MeshSpec, micro_batches: int, ac: str) -> Run:
        """Return the run of the job on ``mesh``."""
        return Run(job=self._job, cluster=self._cluster, mesh=mesh, micro_batches=micro_batches, ac=ac)

    def formulator(self, run: Run) -> tuple[Formulator, Layer]:
        """Return what builds the problem of ``run``."""
        micro_batch = self._batch // run.micro_batches
        layer = self._traced.layer(micro_batch, run.ac)
        pricer = Pricer(run, self._traced.profile(micro_batch))
        return Formulator(layer, pricer, self._table, self._traced.base), layer

    def formulate(self, run: Run, restriction: Restriction | None) -> tuple[Formulator, Layer, Formulation | None]:
        """Return the problem of ``run``, or None in its place where the restriction leaves nothing."""
        started = time.perf_counter()
        formulator, layer = self.formulator(run)
        built = formulator.build(
            None if restriction is None else restriction.accepts, None if restriction is None else restriction.accepts_stored
        )
        self._clock.add("costs_s", started)
        return formulator, layer, built

    def solve(self, run: Run, restriction: Restriction | None) -> Candidate | None:
        """Return the best decision in ``run``, None where none fits."""
        formulator, layer, formulation = self.formulate(run, restriction)
        while formulation is not None:
            started = time.perf_counter()
            solution = solve(formulation.problem, memory_bytes=self._memory_bytes, mip_gap=self._job.mip_gap)
            self._clock.add("solve_s", started)
            if solution is None:
                return None
            decision = decision_of(formulation, solution.assignment)
            refused = self._refused(run, formulation, decision)
            if not refused:
                decision = polish(formulator, layer, decision)
                found = estimate(formulator, layer, decision)
                return Candidate(run=run, layer=layer, decision=decision, estimate=found, solution=solution)
            formulation = _without(formulator, formulation, decision, refused)
        return None

    def _refused(self, run: Run, formulation: Formulation, decision: Decision) -> list[int]:
        """Return the region classes whose strategy DTensor would run otherwise on the whole mesh than axis by axis."""
        started = time.perf_counter()
        refused = [
            index for index, strategy in enumerate(decision.strategies)
            if not self._table.runs(self._base_region(formulation.layer, index), strategy, run.mesh.shape)
        ]  # fmt: skip
        self._clock.add("check_s", started)
        return refused

    def _base_region(self, layer: Layer, index: int) -> Any:
        return self._traced.base.regions[layer.representative(index).index]

    def random(self, run: Run, seed: int) -> Candidate | None:
        """Return a random decision, whatever it costs; None where none can be found."""
        formulator, layer, formulation = self.formulate(run, None)
        assert formulation is not None

        def allowed(node: int, choice: int) -> bool:
            if node >= len(formulation.strategies):
                return True
            return self._table.runs(self._base_region(layer, node), formulation.strategies[node][choice], run.mesh.shape)

        assignment = random_assignment(formulation.problem, seed, allowed)
        if assignment is None:
            return None
        decision = decision_of(formulation, assignment)
        return Candidate(run=run, layer=layer, decision=decision, estimate=estimate(formulator, layer, decision), solution=None)

    def best(
        self,
        meshes: Sequence[MeshSpec],
        counts: Sequence[int],
        modes: Sequence[str],
        restrict: Callable[[MeshSpec], Restriction | None],
        progress: Progress | None,
    ) -> Candidate | None:
        """Return the fastest candidate over all runs, None where none fits."""
        best: Candidate | None = None
        for ac in modes:
            for mesh in meshes:
                best = self._best_on(mesh, counts, ac, restrict(mesh), best, progress)
        return best

    def _best_on(
        self, mesh: MeshSpec, counts: Sequence[int], ac: str, restriction: Restriction | None, best: Candidate | None, progress: Progress | None
    ) -> Candidate | None:
        """Return the better of ``best`` and what ``mesh`` gives: the smallest number of micro-batches that fits, and the next."""
        found_before: float | None = None
        for count in counts:
            run = self.run_of(mesh, count, ac)
            micro_batch = self._batch // count
            floor = least_memory_bytes(self._traced, run, micro_batch, STATE_BYTES_PER_PARAMETER) + reserve_bytes(self._cluster.device)
            if floor > self._memory_bytes:
                continue
            if best is not None and least_compute_s(self._traced, run, micro_batch) >= best.estimate.step_time_s:
                break
            if progress is not None:
                progress(f"solving mesh {mesh}, {count} micro-batches, checkpointing {ac}")
            candidate = self.solve(run, restriction)
            if candidate is None:
                continue
            if best is None or candidate.estimate.step_time_s < best.estimate.step_time_s:
                best = candidate
            if found_before is not None and candidate.estimate.step_time_s >= found_before:
                break
            found_before = candidate.estimate.step_time_s
        return best

    def refuse(
        self, meshes: Sequence[MeshSpec], counts: Sequence[int], modes: Sequence[str], restrict: Callable[[MeshSpec], Restriction | None]
    ) -> InfeasibleError:
        """Return the error that says what would do: the least memory per device over all runs, and what takes it up."""
        least: tuple[float, Layer, Decision, Run] | None = None
        for mesh in meshes:
            for count in counts:
                run = self.run_of(mesh, count, modes[-1])
                formulator, layer, formulation = self.formulate(run, restrict(mesh))
                while formulation is not None:
                    found = least_memory(formulation.problem)
                    if found is None:
                        break
                    decision = decision_of(formulation, found[0])
                    refused = self._refused(run, formulation, decision)
                    if not refused:
                        if least is None or found[1] < least[0]:
                            least = found[1], layer, decision, run
                        break
                    formulation = _without(formulator, formulation, decision, refused)
        if least is None:
            return InfeasibleError(
                "no layout of this model divides evenly over these meshes and this batch.",
                budget_bytes=self._memory_bytes,
                least_bytes=None,
                what_to_do="Choose another mesh, or a batch that the mesh divides.",
            )
        nbytes, layer, decision, run = least
        return InfeasibleError(
            budget_bytes=self._memory_bytes, least_bytes=int(-(-nbytes // 1)), largest_tensors=_largest(layer, decision, run)
        )


def _largest(layer: Layer, decision: Decision, run: Run) -> tuple[tuple[str, int], ...]:
    from cost_model.layout import split_factor

    values = layer.regions.graph.values
    rows: list[tuple[str, int]] = []
    for parameter, choice in zip(layer.parameters, decision.stored, strict=True):
        value = values[parameter.values[0]]
        rows.append((layer.regions.graph.parameters[parameter.values[0]][0], value.nbytes // split_factor(choice.stored, run.mesh.shape)))
    for index, strategy in enumerate(decision.strategies):
        region = layer.representative(index)
        for position, slot in enumerate(region.slots):
            layout = strategy.forward[position]
            if slot.origin == "op" and layout is not None:
                rows.append((f"{region.fqn or '(root)'}:{slot.value.name}", slot.value.nbytes // split_factor(layout, run.mesh.shape)))
    return tuple(sorted(rows, key=lambda row: -row[1])[:3])


def _without(formulator: Formulator, formulation: Formulation, decision: Decision, refused: Sequence[int]) -> Formulation | None:
    """Return the problem without the strategies that were refused."""
    strategies = [
        tuple(s for s in choices if index not in refused or s != decision.strategies[index])
        for index, choices in enumerate(formulation.strategies)
    ]
    return formulator.of(strategies, formulation.stored) if all(strategies) else None


def build_plan(
    model: nn.Module,
    *,
    cluster: str | ClusterSpec | Mapping[str, Any],
    example_inputs: GivenInputs = None,
    mesh: str | MeshSpec | None = None,
    batch: int | None = None,
    seq: int | None = None,
    micro_batches: int | None = None,
    ac: str | None = None,
    memory_gb: float | None = None,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    planner: str = "ilp",
    tp_plan: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> ShardingPlan:
    """Return the fastest plan for training ``model`` on ``cluster`` within its memory.

    Args:
        model: any module; stays as it is, and may be on the meta device.
        cluster: for example "4x8xh100-sxm-80gb".
        example_inputs: arguments of one call with the global batch (tuple or dict); None: made from a Hugging Face config.
        mesh: for example "dp=4,tp=8"; None: all one- and two-axis meshes of the cluster are tried.
        batch: samples per step in all; None takes the example inputs'.
        seq: tokens per sample, for models that read tokens.
        micro_batches: None: chosen.
        ac: activation checkpointing of all blocks, "none", "selective" or "full"; None: chosen.
        memory_gb: cap on the peak per device in 1e9 bytes; None: the device's memory.
        optimizer: a name of ``cost_model.memory.OPTIMIZERS``.
        dtype: of computing: "bf16", "fp16" or "fp32"; parameters rest, and gradients are reduced, in fp32.
        planner: "ilp", a baseline's name, or "random:SEED".
        tp_plan: the expert plan for "tensor-parallel"; None takes the model's own.
        progress: told of each stage.

    Raises:
        PlannerError: the request cannot be planned; `InfeasibleError` where nothing fits.
    """
    name, seed = baselines.parse_planner(planner)
    cluster = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.parse(cluster)
    inputs = inputs_for(model, batch=batch, seq=seq) if example_inputs is None else as_inputs(example_inputs)
    given_batch = batch_of(inputs)
    job = Job(
        batch=batch or given_batch,
        seq=seq,
        optimizer=optimizer,
        dtype=dtype,
        flash_attention=cluster.device.flash_attention,
        memory_bytes=None if memory_gb is None else _memory_bytes(memory_gb),
        micro_batches=micro_batches,
        ac=ac,  # type: ignore[arg-type]
    )
    assert job.batch is not None
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    if spec is not None:
        check_mesh(spec, cluster)
    counts = [micro_batches] if micro_batches is not None else micro_batch_counts(job.batch)
    if name == "random":
        counts = counts[:1]
    clock = Clock()
    started = time.perf_counter()
    if progress is not None:
        progress("tracing")
    alone = job.batch // counts[0] if len(counts) == 1 else None
    traced = trace_model(model, inputs, given_batch, alone, dtype, cluster.device.flash_attention)
    clock.add("trace_s", started)
    search = Search(traced, job, cluster, job.batch, clock)
    candidate = _find(search, traced, cluster, spec, name, seed, counts, ac, model, tp_plan, progress)
    return _write(model, candidate, job, cluster, name, seed, clock, search.memory_bytes)


def _memory_bytes(memory_gb: float) -> int:
    if not memory_gb > 0:
        raise JobError(f"memory_gb is {memory_gb}.", what_to_do="Give gigabytes (1e9 bytes) above 0.", field="memory_bytes")
    return int(memory_gb * 1e9)


def _find(
    search: Search,
    traced: TracedModel,
    cluster: ClusterSpec,
    spec: MeshSpec | None,
    name: str,
    seed: int | None,
    counts: Sequence[int],
    ac: str | None,
    model: nn.Module,
    tp_plan: Mapping[str, str] | None,
    progress: Progress | None,
) -> Candidate:
    modes = _modes(traced, ac)
    one_axis = name in ("data-parallel", "fully-sharded")
    meshes = [spec] if spec is not None else meshes_of(cluster, axes=1 if one_axis else 2)
    if name == "random":
        assert seed is not None
        candidate = search.random(search.run_of(meshes[-1], counts[0], modes[0]), seed)
        if candidate is None:
            raise MeshError("no random assignment was found.", what_to_do="Choose another mesh, batch or seed.")
        return candidate
    styles = tp_plan if tp_plan is not None else getattr(model, "tp_plan", None)

    def restrict(mesh: MeshSpec) -> Restriction | None:
        if name == "data-parallel":
            return baselines.data_parallel(mesh)
        if name == "fully-sharded":
            return baselines.fully_sharded(mesh)
        return baselines.tensor_parallel(mesh, styles, traced.low) if name == "tensor-parallel" else None

    found = search.best(meshes, counts, modes, restrict, progress)
    if found is None:
        raise search.refuse(meshes, counts, modes, restrict)
    return found


def _modes(traced: TracedModel, ac: str | None) -> list[str]:
    if ac is not None and ac != "none" and not traced.blocks.patterns:
        raise JobError(
            f"ac is {ac!r}, but this model has no repeated blocks to checkpoint.", what_to_do="Choose none.", field="ac"
        )
    return [ac] if ac is not None else (["none", "selective", "full"] if traced.blocks.patterns else ["none"])


def _write(
    model: nn.Module, candidate: Candidate, job: Job, cluster: ClusterSpec, name: str, seed: int | None, clock: Clock, memory_bytes: int
) -> ShardingPlan:
    started = time.perf_counter()
    run = candidate.run
    entries = entries_of(candidate.layer, candidate.decision, model)
    solution = candidate.solution
    report = SolverReport(name=name if seed is None else f"{name}:{seed}", status="given")
    if solution is not None:
        gap = (solution.objective_s - solution.bound_s) / solution.objective_s if solution.objective_s else 0.0
        report = SolverReport(
            name=name,
            status=solution.status,
            objective_s=solution.objective_s,
            bound_s=solution.bound_s,
            gap=max(gap, 0.0),
            time_s=solution.time_s,
        )
    blocks = candidate.layer.blocks.patterns if run.ac != "none" else ()
    plan = ShardingPlan(
        mesh=PlanMesh.of(run.mesh, "cpu" if cluster.device.kind == "cpu" else "cuda"),
        plan=dict(entries.plan),
        compute_plan=dict(entries.compute_plan),
        gradient_plan=dict(entries.gradient_plan),
        input_plan=dict(entries.input_plan),
        output_plan=dict(entries.output_plan),
        activation_checkpointing={pattern: run.ac for pattern in blocks},  # type: ignore[misc]
        micro_batches=run.micro_batches,
        estimate=candidate.estimate,
        solver=report,
        job=dataclasses.replace(job, micro_batches=run.micro_batches, ac=run.ac, memory_bytes=memory_bytes),  # type: ignore[arg-type]
        cluster=cluster.to_dict(),
        fingerprint={"model": model_fingerprint(model), "torch": torch_fingerprint()},
    )
    clock.add("write_s", started)
    return dataclasses.replace(plan, timings=dict(clock.spent))


def estimate_plan(
    model: nn.Module, plan: ShardingPlan, *, example_inputs: GivenInputs = None, cluster: ClusterSpec | None = None
) -> ShardingPlan:
    """Return ``plan`` priced anew from the plan alone, on its own cluster or another of the same size.

    Raises:
        PlanMismatchError: the plan is for another model, or its layouts are none that the model runs in.
        MeshError: its mesh is not the whole cluster.
    """
    found = plan.fingerprint.get("model")
    if found is not None and found != model_fingerprint(model):
        raise PlanMismatchError("the plan was made for another model.", what_to_do="Plan this model, or name the one that the plan is for.")
    cluster = cluster or ClusterSpec.from_dict(plan.cluster)
    check_mesh(plan.mesh.spec, cluster)
    inputs = inputs_for(model, batch=plan.job.batch, seq=plan.job.seq) if example_inputs is None else as_inputs(example_inputs)
    batch = plan.job.batch or batch_of(inputs)
    clock = Clock()
    started = time.perf_counter()
    flash = cluster.device.flash_attention if plan.job.flash_attention is None else plan.job.flash_attention
    traced = trace_model(model, inputs, batch_of(inputs), batch // plan.micro_batches, plan.job.dtype, flash)
    clock.add("trace_s", started)
    modes = set(plan.activation_checkpointing.values())
    search = Search(traced, plan.job, cluster, batch, clock)
    run = search.run_of(plan.mesh.spec, plan.micro_batches, next(iter(modes), "none"))
    formulator, layer = search.formulator(run)
    started = time.perf_counter()
    decision = decision_from_plan(layer, formulator, plan, model)
    priced = estimate(formulator, layer, decision)
    clock.add("costs_s", started)
    return dataclasses.replace(plan, estimate=priced, cluster=cluster.to_dict(), timings=dict(clock.spent))
