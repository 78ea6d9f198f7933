"""The JSON document of a plan and its JSON Schema. A document is data: reading it runs no code from the file."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema

from cost_model.layouts.layout import Layout, format_layout, parse_layout
from planner.errors import JobError, PlanFormatError
from planner.plan.estimate import BaselinePrice, Breakdown, Estimate, Pipeline, SolverReport, Verification
from planner.plan.former_names import with_current_names
from planner.plan.job import CheckpointingMode, Job
from planner.plan.ports import Port, PortSpec
from planner.plan.techniques import TechniqueGain
from planner.plan.token_order import ZigzagOrder

FORMAT_VERSION = 1
SCHEMA_FILE = Path(__file__).with_name("plan.schema.json")
_SCHEMA_ID = f"urn:shardplan:plan:{FORMAT_VERSION}"
NOT_A_PLAN = (
    "Check that it was written by `shardplan plan` or ShardingPlan.save() and copied whole; otherwise plan again."
)

_MESSAGES = {
    "string_pattern_mismatch": "{value!r} is no placement; write S(0), R, P(sum), P(avg) or SS(0,8)",
    "extra_forbidden": "there is no such field",
    "unexpected_keyword_argument": "there is no such field",
    "missing": "the field is missing",
    "missing_argument": "the field is missing",
}
"""pydantic's error type -> message, where pydantic's own message would not help the reader of a plan."""

PlacementText = Annotated[str, Field(pattern=r"^(R|S\(\d+\)|P\((sum|avg)\)|SS\(\d+,\d+\))$")]
LayoutText = Annotated[list[PlacementText], Field(min_length=1)]
# At a boundary, dims may count from the last one.
PortPlacementText = Annotated[str, Field(pattern=r"^(R|S\(-?\d+\)|P\((sum|avg)\)|SS\(\d+,\d+\))$")]
PortLayoutText = Annotated[list[PortPlacementText], Field(min_length=1)]


class _Document(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class MeshDocument(_Document):
    """The devices as a grid."""

    names: Annotated[list[str], Field(min_length=1)]
    """Axis names, outermost first."""
    shape: Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1)]
    """Axis sizes, in the order of ``names``."""
    device: str
    """Device type, as torch names it."""


class PortDocument(_Document):
    """One tensor at a module boundary, where more than its layout is given."""

    layout: PortLayoutText
    """Layout of the tensor after the boundary."""
    grad: PortLayoutText | None = None
    """Layout of the gradient after the boundary."""
    source: PortLayoutText | None = None
    """Layout of the tensor before the boundary."""
    source_grad: PortLayoutText | None = None
    """Layout of the gradient before the boundary."""
    reallgather: bool = False
    """Whether a module's input is redistributed again in the module's backward, in place of being saved for it."""
    from_local: PortLayoutText | None = None
    """Layout in which a plain tensor before the boundary is this rank's shard."""
    to_local: bool = False
    """Whether the tensor becomes the plain local tensor after the boundary."""

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, values: Any) -> Any:
        return with_current_names(values) if isinstance(values, Mapping) else values


PortText = Annotated[PortLayoutText | PortDocument, Field(union_mode="left_to_right")]
# Ports come before names: {"layout": ["R"]} is a port; an argument called layout is {"layout": {"layout": ["R"]}}.
PortsText = Annotated[
    PortLayoutText | PortDocument | Annotated[list[PortText | None], Field(min_length=1)] | dict[str, PortText],
    Field(union_mode="left_to_right"),
]


class PlanDocument(_Document):
    """How a PyTorch model is split over a mesh of devices, and what a step of it costs."""

    schema_: Annotated[str | None, Field(alias="$schema")] = None
    """Reference to this schema, for editors."""
    format_version: Literal[1]
    """Version of this format."""
    mesh: MeshDocument
    plan: dict[str, LayoutText | str] = {}
    """FQN pattern of parameters -> stored layout; or FQN pattern of modules -> name of a registered Sharder."""
    compute_plan: dict[str, LayoutText] = {}
    """FQN pattern of parameters -> layout at use, where it differs from the stored one."""
    gradient_plan: dict[str, LayoutText] = {}
    """FQN pattern of parameters -> layout that their gradient is redistributed to in every micro-batch's backward."""
    read_above: dict[str, Annotated[int, Field(ge=1)]] = {}
    """FQN pattern of parameters that a module around their own reads -> how many levels above their own it is."""
    fully_shard: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """FQN pattern of modules -> names, relative to the module, of the parameters of its FSDP group."""
    keep_gathered: list[str] = []
    """FQN patterns of modules in fully_shard whose parameters stay unsharded from forward to backward."""
    keep_gathered_for_step: list[str] = []
    """FQN patterns of modules in fully_shard whose parameters stay unsharded, and gradients unreduced, for the step."""
    input_plan: dict[str, PortsText] = {}
    """FQN pattern of modules + ".input" -> ports of their arguments."""
    output_plan: dict[str, PortsText] = {}
    """FQN pattern of modules (+ ".output") -> ports of their results; "" is the root."""
    return_local_tensor: list[str] = []
    """FQN patterns of modules whose output becomes a plain local tensor; "" is the root."""
    activation_checkpointing: dict[str, CheckpointingMode] = {}
    """FQN pattern of modules -> activation checkpointing mode."""
    local_ops: list[str] = []
    """Names of ops that each rank runs on its local tensors, because DTensor has no rule for them."""
    uneven_lengths: list[Annotated[int, Field(ge=1)]] = []
    """Lengths of dims that one mesh axis may shard in uneven pieces."""
    opaque_modules: dict[str, Annotated[str, Field(pattern=r"^(([^ ;=]+=[-0]( [^ ;=]+=[-0])*)?;[0a-z ]+)?$")]] = {}
    """FQN pattern of modules that run as one op -> how their arguments and results are split by samples, such as
    "0=0 mask=-;0 mean"; "" where they run on whole tensors only."""
    local_modules: dict[str, Annotated[str, Field(pattern=r"^[^;]*;[^;]*(;random)?$")]] = {}
    """FQN pattern of modules that run on local tensors -> layouts of their arguments and results, such as
    "hidden_states=S(0),R;S(0),R", with ";random" where they draw random numbers."""
    micro_batches: Annotated[int, Field(ge=1)] = 1
    """Micro-batches per step; gradients accumulate over them."""
    zigzag: ZigzagOrder | None = None
    """The zigzag token order that context parallelism uses; null: natural order."""
    pipeline: Pipeline | None = None
    """The pipeline stages that the model is cut into, along the mesh's outermost axis; null: no pipeline."""
    estimate: Estimate | None = None
    breakdown: Breakdown | None = None
    """Where the estimate's seconds and bytes are spent, by parts of the model; null: not known."""
    solver: SolverReport | None = None
    baselines: list[BaselinePrice] = []
    """Prices of the plans that people write by hand, for the same job."""
    verification: Verification | None = None
    """Result of running the plan on fake processes; null: it was not written by the planner."""
    techniques: list[TechniqueGain] = []
    """The techniques that the plan uses, and the seconds of a step that each saves; null: not measured."""
    model: str | None = None
    """Name of the model, for people; null: not known."""
    job: Job = Job()
    cluster: dict[str, Any] = {}
    """ClusterSpec.to_dict()."""
    fingerprint: dict[str, str] = {}
    """Fingerprints of what the plan is for: "model", a structural hash, and "torch", the minor version."""
    timings: dict[str, float] = {}
    """Seconds of each planning stage."""
    assumed: list[str] = []
    """What the job lacked and the planner assumed, with the reason of each."""
    notes: list[str] = []
    """Remarks for the reader of the plan."""


class _Draft202012(GenerateJsonSchema):
    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        generated = super().generate(schema, mode=mode)
        return {"$schema": self.schema_dialect, "$id": _SCHEMA_ID, **generated}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a plan's document."""
    return PlanDocument.model_json_schema(schema_generator=_Draft202012)


def parse_document(data: object, *, file: str | None = None) -> PlanDocument:
    """Return ``data`` (JSON values) as a validated document.

    Raises:
        PlanFormatError: ``data`` is not a plan's document; the message names the file and the invalid place.
    """
    source = "The document" if file is None else repr(file)
    if not isinstance(data, Mapping) or "format_version" not in data or "mesh" not in data:
        detail = f"{source} is not a plan: a plan is a JSON object with format_version, mesh and more."
        raise PlanFormatError(detail, file=file, what_to_do=NOT_A_PLAN)
    if data["format_version"] != FORMAT_VERSION:
        raise PlanFormatError(
            f"{source} has format version {data['format_version']!r}; we read {FORMAT_VERSION}.",
            file=file,
            where="format_version",
            what_to_do="Plan again with this version, or use the version that wrote it.",
        )
    try:
        data = _with_current_names(data)
    except ValueError as error:
        raise invalid(str(error), file=file) from error
    try:
        # Validation of JSON text: strict mode then accepts arrays for tuples and integers for floats, and no more.
        return PlanDocument.model_validate_json(json.dumps(data))
    except ValidationError as error:
        where, message = _worst(error, data)
        raise invalid(message, file=file, where=where) from error
    except JobError as error:
        raise invalid(error.detail, file=file, where="job") from error
    except (TypeError, ValueError) as error:
        raise invalid(f"it is no JSON ({error})", file=file) from error


def _with_current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return a plan's document with the current names of its fields and of its job's fields."""
    current = with_current_names(data)
    if isinstance(current.get("job"), Mapping):
        current["job"] = with_current_names(current["job"])
    return current


def invalid(message: str, *, file: str | None, where: str = "") -> PlanFormatError:
    """Return the error for a plan's document that is invalid at ``where``; "": the message states no place."""
    source = "The document" if file is None else repr(file)
    place = f" at {where}" if where else ""
    detail = f"{source} is not a valid plan{place}: {message.rstrip('.')}."
    return PlanFormatError(detail, file=file, where=where, what_to_do="Correct that place, or plan again.")


def _worst(error: ValidationError, data: Mapping[str, object]) -> tuple[str, str]:
    """Return place and message of the error that lies deepest in ``data``.

    pydantic reports errors of every branch of a union. The deepest error belongs to the branch that fits best.
    """
    problems = []
    for item in error.errors(include_url=False, include_context=False):
        path, value = _path_within(item["loc"], data)
        message = _MESSAGES.get(item["type"], item["msg"]).format(value=value)
        problems.append((path, message))
    path, message = max(problems, key=lambda place: len(place[0]))
    return "/".join(path), message


def _path_within(loc: tuple[int | str, ...], data: object) -> tuple[tuple[str, ...], object]:
    # pydantic's location also has names of union branches. Only keys and indices that exist in ``data`` stay, and a
    # missing or unknown key, which is the last item.
    path: list[str] = []
    value: Any = data
    for index, step in enumerate(loc):
        inside = (isinstance(value, Mapping) and step in value) or (
            isinstance(value, list) and isinstance(step, int) and step < len(value)
        )
        if inside:
            path.append(str(step))
            value = value[step]
        elif index == len(loc) - 1 and isinstance(value, Mapping) and isinstance(step, str) and step.isidentifier():
            path.append(step)
    return tuple(path), value


def layout_text(value: Layout | str) -> list[str] | str:
    """Return the JSON value of a layout, or of a Sharder's name."""
    return value if isinstance(value, str) else list(format_layout(value))


def port_text(port: Port, *, full: bool = False) -> Any:
    """Return the JSON value of a port: a list, its layout, where nothing else is given; an object if ``full``."""
    if not full and port == Port(layout=port.layout):
        return list(format_layout(port.layout))
    layouts = {name: getattr(port, name) for name in ("layout", "grad", "source", "source_grad", "from_local")}
    texts = {name: list(format_layout(layout)) for name, layout in layouts.items() if layout is not None}
    return texts | {name: True for name in ("reallgather", "to_local") if getattr(port, name)}


def ports_text(spec: PortSpec) -> Any:
    """Return the JSON value of a module's ports."""
    if isinstance(spec, Port):
        return port_text(spec)
    if isinstance(spec, Mapping):
        # An argument called "layout" would look like the field of a port. Objects as values tell the two apart.
        full = "layout" in spec
        return {name: port_text(port, full=full) for name, port in spec.items()}
    return [None if port is None else port_text(port) for port in spec]


def pipeline_values(pipeline: Pipeline) -> dict[str, Any]:
    """Return a pipeline as JSON values."""
    stages = [{**json_values(stage)} for stage in pipeline.stages]
    return {**json_values(pipeline), "stages": stages}


def json_values(value: Any) -> dict[str, Any]:
    """Return a dataclass as JSON values."""
    values = dataclasses.asdict(value)
    return {name: list(item) if isinstance(item, tuple) else item for name, item in values.items()}


def without_defaults(value: Any) -> Any:
    """Return a value of dataclasses, tuples and mappings as JSON values, without the fields that have their default."""
    if dataclasses.is_dataclass(value):
        fields = ((item.name, getattr(value, item.name), item.default) for item in dataclasses.fields(value))
        return {name: without_defaults(own) for name, own, default in fields if own != default}
    if isinstance(value, Mapping):
        return {key: without_defaults(item) for key, item in value.items()}
    return [without_defaults(item) for item in value] if isinstance(value, tuple) else value


def _port(text: list[str] | PortDocument) -> Port:
    if isinstance(text, list):
        return Port(layout=parse_layout(text, from_last=True))

    def layout(part: list[str] | None) -> Layout | None:
        return None if part is None else parse_layout(part, from_last=True)

    return Port(
        layout=parse_layout(text.layout, from_last=True),
        grad=layout(text.grad),
        source=layout(text.source),
        source_grad=layout(text.source_grad),
        reallgather=text.reallgather,
        from_local=layout(text.from_local),
        to_local=text.to_local,
    )


def parse_ports(text: Any) -> PortSpec:
    """Return the ports in a validated ``PortsText``."""
    if isinstance(text, dict):
        return {name: _port(item) for name, item in text.items()}
    if isinstance(text, PortDocument) or isinstance(text[0], str):
        return _port(text)
    return tuple(None if item is None else _port(item) for item in text)


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
