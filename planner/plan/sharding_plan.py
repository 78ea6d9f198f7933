"""``ShardingPlan``: how a model is split over a mesh, as a value and as a file."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from cost_model.hardware.collective_kinds import CollectiveKind
from cost_model.layouts.layout import Layout, LayoutError, MeshSpec, parse_layout
from planner.errors import MeshError, PlanError, PlannerError
from planner.plan import document as plan_document
from planner.plan import file as plan_file
from planner.plan.checks import check_layout, check_names, check_pipeline, check_ports, check_zigzag_order, wrong_type
from planner.plan.document import FORMAT_VERSION
from planner.plan.estimate import (
    BaselinePrice,
    Breakdown,
    CollectiveEstimate,
    Estimate,
    Phase,
    Pipeline,
    PipelineStage,
    SolverReport,
    Verification,
)
from planner.plan.job import CheckpointingMode, Job
from planner.plan.job_spec import JobPhase
from planner.plan.mesh import UNSTATED, PlanMesh
from planner.plan.patterns import check_pattern
from planner.plan.ports import Port, PortSpec, as_layout, is_layout, normalised, ports_of
from planner.plan.techniques import TechniqueGain
from planner.plan.token_order import ZigzagOrder

__all__ = [
    "FORMAT_VERSION",
    "BaselinePrice",
    "CheckpointingMode",
    "CollectiveEstimate",
    "CollectiveKind",
    "Estimate",
    "Job",
    "JobPhase",
    "Phase",
    "Pipeline",
    "PipelineStage",
    "PlanMesh",
    "Port",
    "PortSpec",
    "ShardingPlan",
    "SolverReport",
    "TechniqueGain",
    "Verification",
]

_MAPPINGS = (
    *("plan", "compute_plan", "gradient_plan", "read_above", "fully_shard", "input_plan", "output_plan"),
    *("activation_checkpointing", "opaque_modules", "local_modules"),
)
"""Fields whose keys are FQN patterns."""
_LISTS = ("keep_gathered", "keep_gathered_for_step", "return_local_tensor")
"""Fields that are lists of FQN patterns."""


@dataclass(frozen=True, slots=True)
class ShardingPlan:
    """How every parameter and every module boundary is laid out, and what a step costs.

    Every field may be left out, so a plan is easily written by hand. Keys are patterns of FQNs
    (`planner.plan.patterns`); ``""`` is the root module. In ``input_plan`` and ``output_plan`` a bare layout, or a list
    or dict of them, may stand for ``Port``s; on a mesh of one axis a bare placement is a layout. ``plan``,
    ``output_plan`` and ``return_local_tensor`` may be given by position and as None, as in
    ``torch.distributed._shard.sharding_plan``; `planner.imported` converts torch's own values in them.

    Attributes:
        plan: parameters -> stored layout; or modules -> the name of a Sharder given to ``shard_module``.
        output_plan: module FQN, or FQN + ".output" ("output" or "" for the root) -> ports of its results.
        return_local_tensor: modules whose results become plain local tensors, after ``output_plan``. A key may end in
            ".output" as those of ``output_plan``.
        mesh: the devices. A ``MeshSpec`` is taken as one of "cuda" devices. Left out: the mesh that ``shard_module`` is
            called with; such a plan can be run, but not saved or priced.
        compute_plan: parameters -> layout at use, where it differs from the stored one.
        gradient_plan: parameters -> the layout that their gradient is redistributed to in the backward of every
            micro-batch. Gradients of other parameters accumulate in the layout that autograd returns, often `Partial`,
            and are reduced once a step.
        read_above: parameters that a module around their own reads -> how many levels above their own it is. The
            compute layout holds during that module's forward.
        fully_shard: modules -> names, relative to the module, of the parameters of its FSDP group (torch's
            ``fully_shard``): one all-gather before its forward and its backward, one reduction of their gradients.
        keep_gathered: modules of ``fully_shard`` whose parameters stay unsharded from forward to backward
            (``reshard_after_forward=False``).
        keep_gathered_for_step: modules of ``fully_shard`` whose parameters stay unsharded for the whole step: one
            all-gather and one reduction of gradients a step, whatever the number of micro-batches.
        input_plan: module FQN + ".input" ("input" or "" for the root) -> ports of its arguments.
        activation_checkpointing: modules -> "full" or "selective".
        local_ops: names of ops (torch functions) that each rank runs on its local tensors, as DTensor has no rule.
        uneven_lengths: lengths of dims (vocabularies) that one axis may shard in uneven pieces, as `torch.chunk` does.
        opaque_modules: modules that run as one op -> how their samples are split (`opaque_op.SampleSplit`); "": not.
        local_modules: modules that ranks run on their local tensors, without DTensor -> `local_module.LocalModule`.
        micro_batches: number of them in a step; gradients accumulate over them.
        zigzag: the zigzag token order that context parallelism uses; None: natural order.
        pipeline: the stages that the model is cut into. The mesh then has an outermost axis "pp", and layouts are on
            the other axes. None: there is no pipeline.
        estimate: seconds and bytes of a step; None: the plan was not priced.
        breakdown: where the estimate's seconds and bytes are spent; None: the planner did not write the plan.
        solver: objective, lower bound and gap of the plan; None: the planner did not write the plan.
        baselines: prices of the plans that people write by hand, for the same job; empty where none was priced.
        verification: the result of running the plan on fake processes; None: the planner did not write the plan.
        techniques: the techniques that the plan uses, and what each gives.
        model: name of the model, for people: a preset, a file, a factory; None: not known.
        job, cluster: the job and the cluster (``ClusterSpec.to_dict()``) that the estimate is for.
        fingerprint: "model": hash of the model's structure; "torch": minor version. A missing entry is not checked.
        timings: planning stage ("trace_s", "solve_s", ...) -> seconds.
        assumed: what the job lacked and the planner assumed, such as "batch 8: one sample for each device".
        notes: remarks for the reader of the plan.
        format_version: version of the file format.
    """

    plan: Mapping[str, Layout | str] = field(default_factory=dict)
    output_plan: Mapping[str, PortSpec] = field(default_factory=dict)
    return_local_tensor: tuple[str, ...] = ()
    _: KW_ONLY
    mesh: PlanMesh = UNSTATED
    compute_plan: Mapping[str, Layout] = field(default_factory=dict)
    gradient_plan: Mapping[str, Layout] = field(default_factory=dict)
    read_above: Mapping[str, int] = field(default_factory=dict)
    fully_shard: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    keep_gathered: tuple[str, ...] = ()
    keep_gathered_for_step: tuple[str, ...] = ()
    input_plan: Mapping[str, PortSpec] = field(default_factory=dict)
    activation_checkpointing: Mapping[str, CheckpointingMode] = field(default_factory=dict)
    local_ops: tuple[str, ...] = ()
    uneven_lengths: tuple[int, ...] = ()
    opaque_modules: Mapping[str, str] = field(default_factory=dict)
    local_modules: Mapping[str, str] = field(default_factory=dict)
    micro_batches: int = 1
    zigzag: ZigzagOrder | None = None
    pipeline: Pipeline | None = None
    estimate: Estimate | None = None
    breakdown: Breakdown | None = None
    solver: SolverReport | None = None
    baselines: tuple[BaselinePrice, ...] = ()
    verification: Verification | None = None
    techniques: tuple[TechniqueGain, ...] = ()
    model: str | None = None
    job: Job = field(default_factory=Job)
    cluster: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    format_version: int = FORMAT_VERSION

    def __post_init__(self) -> None:
        if isinstance(self.mesh, MeshSpec) and not isinstance(self.mesh, PlanMesh):
            object.__setattr__(self, "mesh", PlanMesh.from_mesh(self.mesh))
        for name, empty in (("plan", {}), ("output_plan", {}), ("return_local_tensor", ())):
            if getattr(self, name) is None:
                object.__setattr__(self, name, empty)
        for name in ("plan", "compute_plan", "gradient_plan"):
            entries = getattr(self, name)
            if isinstance(entries, Mapping):
                object.__setattr__(self, name, {key: as_layout(value) for key, value in entries.items()})
        for name in ("input_plan", "output_plan"):
            entries = getattr(self, name)
            if isinstance(entries, Mapping):
                object.__setattr__(self, name, {key: normalised(value) for key, value in entries.items()})
        if isinstance(self.fully_shard, Mapping):
            groups = {key: tuple(v) if isinstance(v, list) else v for key, v in self.fully_shard.items()}
            object.__setattr__(self, "fully_shard", groups)
        for name in (*_LISTS, "local_ops", "uneven_lengths", "assumed", "notes", "baselines", "techniques"):
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    def validate(self) -> None:
        """Raise an error where types, keys, or layouts on the mesh are invalid, without looking at a module.

        Raises:
            PlanTypeError: a value of a wrong type.
            PlanLayoutError: a layout with a wrong number of placements or a negative dim, or a parameter's partial one.
            PlanKeyError: a key with an empty component, or a zigzag order that is impossible on the mesh.
            MeshError: no mesh, fewer than one micro-batch, or a pipeline that contradicts the mesh or its schedule.
        """
        _check_containers(self)
        for key, value in self.plan.items():
            if not (is_layout(value) or (isinstance(value, str) and value)):
                advice = (
                    "Give a layout, one placement per mesh axis, or a Sharder's name (with sharders={name: sharder})."
                )
                raise wrong_type("plan", key, value, advice)
        for name, layouts in (("compute_plan", self.compute_plan), ("gradient_plan", self.gradient_plan)):
            for key, layout in layouts.items():
                if not is_layout(layout):
                    raise wrong_type(name, key, layout, "Give a layout, one placement per mesh axis.")
        for key, levels in self.read_above.items():
            if not isinstance(levels, int) or not 1 <= levels <= key.count("."):
                advice = "Give a number of levels from 1 to the depth of the parameter's module."
                raise wrong_type("read_above", key, levels, advice)
        for key, names in self.fully_shard.items():
            check_names("fully_shard", key, names)
        for name, entries in (("input_plan", self.input_plan), ("output_plan", self.output_plan)):
            for key, spec in entries.items():
                check_ports(name, key, spec)
        if self.zigzag is not None:
            check_zigzag_order(self.zigzag, self.layout_mesh)
        for name, key in self.patterns():
            check_pattern(key, field=name)
        for name, key, layout in self.layouts():
            check_layout(name, key, layout, self.layout_mesh)

    @property
    def layout_mesh(self) -> MeshSpec:
        """The mesh that layouts are on: in a pipeline the mesh of one stage, else the whole mesh."""
        return self.mesh.spec if self.pipeline is None else MeshSpec(axes=self.mesh.axes[1:])

    def check_runs(self) -> None:
        """Raise an error where the executor cannot run the plan.

        Raises:
            PlanError: the plan has a pipeline, or its job assumes async tensor parallelism.
        """
        self.check_priced()
        if self.job.async_tp:
            raise PlanError(
                "The plan assumes async tensor parallelism (async_tp), which the executor does not run.",
                what_to_do="Plan without the technique async-tp; the layouts may differ.",
            )

    def check_priced(self) -> None:
        """Raise an error where the estimator cannot price the plan again.

        Raises:
            PlanError: the plan has a pipeline.
        """
        if self.pipeline is not None:
            raise PlanError(
                f"The plan has a pipeline of {len(self.pipeline.stages)} stages, which cannot be run, verified or "
                "priced again yet.",
                what_to_do="Plan with --executable-only (executable_only=True), which leaves pipelines out.",
            )

    def layouts(self) -> Iterator[tuple[str, str, Layout]]:
        """Yield (field, key, layout) for every layout in the plan."""
        for key, value in self.plan.items():
            if not isinstance(value, str):
                yield "plan", key, value
        for name, layouts in (("compute_plan", self.compute_plan), ("gradient_plan", self.gradient_plan)):
            for key, layout in layouts.items():
                yield name, key, layout
        for name, entries in (("input_plan", self.input_plan), ("output_plan", self.output_plan)):
            for key, spec in entries.items():
                for _, port in ports_of(spec):
                    for layout in port.layouts():
                        yield name, key, layout

    @property
    def reallgathers(self) -> bool:
        """Whether the backward of any module redistributes an argument of the module again."""
        return any(port.reallgather for spec in self.input_plan.values() for _, port in ports_of(spec))

    def patterns(self) -> Iterator[tuple[str, str]]:
        """Yield (field, key) for every FQN pattern in the plan, except those of the zigzag order."""
        for name in (*_MAPPINGS, *_LISTS):
            for key in getattr(self, name):
                yield name, key

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as JSON values, from which ``from_dict`` returns an equal plan."""
        return {
            "format_version": self.format_version,
            "mesh": {"names": list(self.mesh.names), "shape": list(self.mesh.shape), "device": self.mesh.device},
            "plan": {key: plan_document.layout_text(value) for key, value in self.plan.items()},
            "compute_plan": {key: plan_document.layout_text(layout) for key, layout in self.compute_plan.items()},
            "gradient_plan": {key: plan_document.layout_text(layout) for key, layout in self.gradient_plan.items()},
            "read_above": dict(self.read_above),
            "fully_shard": {key: list(names) for key, names in self.fully_shard.items()},
            "input_plan": {key: plan_document.ports_text(spec) for key, spec in self.input_plan.items()},
            "output_plan": {key: plan_document.ports_text(spec) for key, spec in self.output_plan.items()},
            "keep_gathered": list(self.keep_gathered),
            "keep_gathered_for_step": list(self.keep_gathered_for_step),
            "return_local_tensor": list(self.return_local_tensor),
            "activation_checkpointing": dict(self.activation_checkpointing),
            "local_ops": list(self.local_ops),
            "uneven_lengths": list(self.uneven_lengths),
            "opaque_modules": dict(self.opaque_modules),
            "local_modules": dict(self.local_modules),
            "micro_batches": self.micro_batches,
            "zigzag": None if self.zigzag is None else dataclasses.asdict(self.zigzag),
            "pipeline": None if self.pipeline is None else plan_document.pipeline_values(self.pipeline),
            "estimate": None if self.estimate is None else plan_document.json_values(self.estimate),
            "breakdown": None if self.breakdown is None else plan_document.without_defaults(self.breakdown),
            "solver": None if self.solver is None else plan_document.json_values(self.solver),
            "baselines": [plan_document.json_values(price) for price in self.baselines],
            "verification": None if self.verification is None else plan_document.json_values(self.verification),
            "techniques": [plan_document.json_values(technique) for technique in self.techniques],
            "model": self.model,
            "job": plan_document.json_values(self.job),
            "cluster": dict(self.cluster),
            "fingerprint": dict(self.fingerprint),
            "timings": dict(self.timings),
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: object, *, file: str | None = None) -> ShardingPlan:
        """Return the plan in ``data``, JSON values as from ``to_dict``; ``file`` is the file's path, for messages.

        Raises:
            PlanFormatError: ``data`` is not a valid plan.
        """
        parsed = plan_document.parse_document(data, file=file)
        fields = {name: getattr(parsed, name) for name in type(parsed).model_fields if name != "schema_"}
        names, shape = parsed.mesh.names, parsed.mesh.shape
        if len(names) != len(shape):
            raise plan_document.invalid(f"{len(names)} names for {len(shape)} sizes", file=file, where="mesh")
        try:
            fields["mesh"] = PlanMesh(axes=tuple(zip(names, shape, strict=True)), device=parsed.mesh.device)
            for name in ("plan", "compute_plan", "gradient_plan"):
                entries = fields[name].items()
                fields[name] = {key: value if isinstance(value, str) else parse_layout(value) for key, value in entries}
            for name in ("input_plan", "output_plan"):
                fields[name] = {key: plan_document.parse_ports(value) for key, value in fields[name].items()}
            plan = cls(**fields)
            plan.validate()
        except (PlannerError, LayoutError) as error:
            raise plan_document.invalid(str(error), file=file) from error
        return plan

    def to_json(self) -> str:
        """Return the text of the plan's file."""
        return plan_file.dumps(self.to_dict())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to ``path``: the whole file or, on any error, nothing.

        Raises:
            PlannerError: the plan is invalid (see `validate`), so that it could not be read back.
            OSError: the file cannot be written.
        """
        self.validate()
        plan_file.write_atomically(self.to_json(), path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Return the plan in the file at ``path``.

        Raises:
            PlanFormatError: the file does not exist, or is not a valid plan; the message names the file and the place.
        """
        return cls.from_dict(plan_file.read_json(path), file=os.fspath(path))

    def __repr__(self) -> str:
        """Return one line: the fields of a plan, its layouts, figures and collectives, fill hundreds of kilobytes."""
        step = self.estimate
        said = "" if step is None else f", {step.step_time_s:.4g} s, {step.peak_memory_bytes:,} bytes"
        return f"<ShardingPlan: {len(self.plan)} keys, mesh {self.mesh}{said}>"

    def __str__(self) -> str:
        """Return the plan as ``shardplan show`` prints it.

        The functions of ``api`` that print and draw plans are found by their names: this package imports nothing of it.
        """
        return str(importlib.import_module("api.render.plan").plan_text(self))

    def _repr_html_(self) -> str:
        """Return the plan as a table and bars, as Jupyter shows it."""
        return str(importlib.import_module("api.view.notebook").plan_html(self))

    @staticmethod
    def json_schema() -> dict[str, Any]:
        """Return the JSON Schema (draft 2020-12) of a plan's file, as in ``planner/plan/plan.schema.json``."""
        return plan_document.json_schema()


def _check_containers(plan: ShardingPlan) -> None:
    for name in _MAPPINGS:
        entries = getattr(plan, name)
        if not isinstance(entries, Mapping) or not all(isinstance(key, str) for key in entries):
            raise wrong_type(name, "", entries, "Give a mapping from names to values.")
    if not isinstance(plan.mesh, PlanMesh):
        raise wrong_type("mesh", "", plan.mesh, 'Give PlanMesh.parse("dp=2,tp=8").')
    if plan.mesh == UNSTATED:
        advice = "Give mesh=PlanMesh.parse(...), or let shard_module take it from its device mesh."
        raise MeshError("The plan names no mesh.", what_to_do=advice)
    for name in _LISTS:
        names = getattr(plan, name)
        # A string is no list of names: iterating over it would give its letters.
        if not isinstance(names, tuple) or not all(isinstance(key, str) for key in names):
            raise wrong_type(name, "", names, 'Give a list of module names; [""] is the root.')
    for key, mode in plan.activation_checkpointing.items():
        if mode not in ("full", "selective"):
            raise wrong_type("activation_checkpointing", key, mode, 'Give "full" or "selective".')
    if plan.pipeline is not None:
        check_pipeline(plan.pipeline, plan.mesh)
    if plan.micro_batches < 1:
        raise MeshError(f"A plan has {plan.micro_batches} micro-batches.", what_to_do="Give at least 1.")
