"""The document of a traced graph: its fields, its JSON Schema, and its compressed form. Data only, bounded in size.

The document is sent as it is, or compressed as ``{"format": "shardplan-graph", "zlib": "<base64>"}``.
"""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.json_schema import GenerateJsonSchema, WithJsonSchema

from planner.errors import GraphFormatError
from planner.plan.former_names import with_current_names

FORMAT: Final = "shardplan-graph"
FORMAT_VERSION: Final = 1
SCHEMA_FILE: Final = Path(__file__).with_name("graph.schema.json")
_SCHEMA_ID: Final = f"urn:shardplan:graph:{FORMAT_VERSION}"

MAX_NBYTES: Final = 16 * 2**20
"""Most bytes of an uncompressed document. The document of Llama-3.1 405B has 2 million."""
MAX_ITEMS: Final = 1_000_000
"""Most JSON values in a document, which determine the memory that it takes."""
MAX_OPS: Final = 50_000
MAX_VALUES: Final = 200_000
MAX_CALLS: Final = 100_000
MAX_CROSSINGS: Final = 200_000
MAX_NAMES: Final = 200_000
MAX_RANK: Final = 16
MAX_DIM: Final = 2**40

_MESSAGES: Final = {"extra_forbidden": "there is no such field", "missing": "the field is missing"}
_WHOLE: Final = "Send a document as `planner.wire.codec.write_graph` writes it."

Name = Annotated[str, Field(min_length=1, max_length=500)]
Fqn = Annotated[str, Field(max_length=1000)]
Path_ = Annotated[str, Field(max_length=500)]
Index = Annotated[int, Field(ge=0, lt=2**31)]
Batch = Annotated[int, Field(ge=1, le=2**31)]
Row = Annotated[list[Index], Field(max_length=5000, fail_fast=True)]
Argument = Annotated[
    Any,
    WithJsonSchema(
        {
            "description": "null, a boolean, a number, a text, a list of arguments, or an object of one member: value "
            "(a value's name), tuple, dtype, device, layout, memory_format, or float (inf, -inf, nan)."
        }
    ),
]
Arguments = Annotated[list[Argument], Field(max_length=100)]
KeywordArguments = Annotated[dict[Name, Argument], Field(max_length=100)]


class _Document(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ModelDocument(_Document):
    """What planning needs to know of the module besides its graph."""

    name: Name
    """Its class."""
    fingerprint: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Structural hash."""
    parameters: Annotated[list[Name], Field(max_length=MAX_NAMES, fail_fast=True)]
    """Every FQN of every parameter, in the module's order."""
    modules: Annotated[list[Fqn], Field(max_length=MAX_NAMES, fail_fast=True)]
    """Every FQN of every submodule, the root's "" first."""
    tp_plan: Annotated[dict[Name, Name], Field(max_length=10_000)] | None = None
    """FQN pattern of modules -> Hugging Face style, where the model carries an expert's plan."""


class TraceDocument(_Document):
    """At which sizes the module was traced."""

    dtype: Literal["bf16", "fp16", "fp32"]
    """Of parameters and activations."""
    samples: Batch
    """First dim of the example inputs: the global batch, unless a request says another."""
    batch: Batch
    """First dim that the graph has."""
    any_batch: bool
    """Whether it stands for any batch: `batch` is then 99991, and what is a multiple of it goes with the batch."""
    fused_ops: bool = False
    """Whether fused ops (`shardplan.rms_norm` and others) are in the place of the module's own code."""
    fused_projections: bool = False
    """Whether projections that read one tensor are one linear layer."""

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, values: Any) -> Any:
        return with_current_names(values) if isinstance(values, Mapping) else values


class ValueDocument(_Document):
    """One tensor."""

    name: Name
    shape: Annotated[list[Annotated[int, Field(ge=0, le=MAX_DIM)]], Field(max_length=MAX_RANK)]
    dtype: Name
    kind: Literal["input", "parameter", "plain"] | None = None
    """Of a tensor that no op makes; a plain one depends on no input and no parameter."""
    requires_grad: bool | None = None
    """Of a tensor that no op makes."""


class CrossingDocument(_Document):
    """A module boundary that values pass."""

    call: Index
    direction: Literal["input", "output"]
    path: Path_
    """Of the argument or result, as in `hidden_states` or `0`."""


class InputDocument(_Document):
    """An argument of the model."""

    value: Name
    path: Path_


class ParameterDocument(_Document):
    """A parameter that ops read."""

    value: Name
    names: Annotated[list[Name], Field(min_length=1, max_length=1000)]
    """Every FQN that it goes by: more than one where it is tied."""


class OutputDocument(_Document):
    """A result of the model."""

    value: Name
    path: Path_
    crossings: Row = []
    is_loss: bool = False


class NestedOpDocument(_Document):
    """One op of a body."""

    name: Name
    op: Name | None = None
    """None takes an item of what an earlier step returned."""
    args: Arguments = []
    kwargs: KeywordArguments = {}


class NestedGraphDocument(_Document):
    """Ops that run as one, without gradients."""

    inputs: Annotated[list[Name], Field(max_length=1000)]
    steps: Annotated[list[NestedOpDocument], Field(max_length=10_000, fail_fast=True)]
    outputs: Argument


class CacheDocument(_Document):
    """What a layer of a decoder keeps of earlier tokens."""

    window: Annotated[int, Field(ge=0, le=2**40)] | None = None
    """Of attention, the most tokens; null: all."""
    latents: Annotated[list[Annotated[int, Field(ge=1, le=2**20)]], Field(min_length=2, max_length=2)] | None = None
    """Of attention, the widths of latents and of rotary keys that it keeps in place of keys and values."""
    state_nbytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Of a recurrent layer, the bytes of its states for one sequence."""
    kv_nbytes: Annotated[int, Field(ge=0, le=2**50)] = 0
    """Of attention that is no single op, the bytes of its keys and values for one sequence."""


class OpDocument(_Document):
    """One op."""

    name: Name
    op: Name | None = None
    """As in `aten.linear.default`."""
    body: Index | None = None
    """Which of the bodies it is, where it is none of torch's ops."""
    args: Arguments = []
    kwargs: KeywordArguments = {}
    call: Index
    """The module call that it is part of."""
    crossings: Annotated[list[Row], Field(max_length=10_000, fail_fast=True)] | None = None
    """Of each value among the arguments, in order, the boundaries between where it is made and here; None: none."""
    outputs: Annotated[list[Name], Field(min_length=1, max_length=10_000)]
    no_grad: bool = False
    cache: CacheDocument | None = None


class GraphDocument(_Document):
    """A traced PyTorch model: what a plan is made from, without code and without weights."""

    format: Literal["shardplan-graph"]
    format_version: Literal[1]
    torch: Annotated[str, Field(pattern=r"^\d+\.\d+$")]
    """Minor version of torch that traced it."""
    model: ModelDocument
    trace: TraceDocument
    values: Annotated[list[ValueDocument], Field(max_length=MAX_VALUES, fail_fast=True)]
    calls: Annotated[list[tuple[Index, Index | None]], Field(min_length=1, max_length=MAX_CALLS, fail_fast=True)]
    """Module calls in the order in which they begin: (position among the modules, the call around it)."""
    crossings: Annotated[list[CrossingDocument], Field(max_length=MAX_CROSSINGS, fail_fast=True)]
    inputs: Annotated[list[InputDocument], Field(max_length=10_000, fail_fast=True)]
    outputs: Annotated[list[OutputDocument], Field(max_length=10_000, fail_fast=True)]
    parameters: Annotated[list[ParameterDocument], Field(max_length=MAX_VALUES, fail_fast=True)]
    bodies: Annotated[list[NestedGraphDocument], Field(max_length=1000, fail_fast=True)] = []
    ops: Annotated[list[OpDocument], Field(max_length=MAX_OPS, fail_fast=True)]
    """In the order of execution."""


class _Draft202012(GenerateJsonSchema):
    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        generated = super().generate(schema, mode=mode)
        return {"$schema": self.schema_dialect, "$id": _SCHEMA_ID, **generated}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a graph's document."""
    return GraphDocument.model_json_schema(schema_generator=_Draft202012)


def compressed(document: GraphDocument) -> dict[str, str]:
    """Return the compressed form of ``document``. Equal documents have equal forms."""
    text = document.model_dump_json(exclude_defaults=True).encode()
    return {"format": FORMAT, "zlib": base64.b64encode(zlib.compress(text, 9)).decode()}


def text_of(data: object) -> bytes:
    """Return the JSON text of the document in ``data``, compressed or not.

    Raises:
        GraphFormatError: ``data`` is no form of a document, or too large.
    """
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise GraphFormatError(f'the graph is no object with "format": "{FORMAT}".', what_to_do=_WHOLE)
    if "zlib" not in data:
        try:
            text = json.dumps(data, allow_nan=False).encode()
        except (ValueError, TypeError, RecursionError) as error:
            raise GraphFormatError(f"the graph is no JSON ({error}).", what_to_do=_WHOLE) from error
    elif set(data) == {"format", "zlib"} and isinstance(data["zlib"], str):
        text = _inflated(data["zlib"])
    else:
        detail = 'a compressed graph has "format" and "zlib", a text, and nothing else.'
        raise GraphFormatError(detail, what_to_do=_WHOLE, where="zlib")
    if len(text) > MAX_NBYTES or sum(map(text.count, (b",", b"[", b"{"))) > MAX_ITEMS:
        detail = f"the graph has more than {MAX_NBYTES} bytes or {MAX_ITEMS} values."
        raise GraphFormatError(detail, what_to_do="Plan it on this machine: planner.build_plan has no such limit.")
    return text


def _inflated(text: str) -> bytes:
    try:
        packed = base64.b64decode(text, validate=True)
        inflater = zlib.decompressobj()
        inflated = inflater.decompress(packed, MAX_NBYTES + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        detail = f"what is compressed cannot be read ({error})."
        raise GraphFormatError(detail, what_to_do=_WHOLE, where="zlib") from error
    if len(inflated) <= MAX_NBYTES and (not inflater.eof or inflater.unused_data):
        detail = "what is compressed is cut off, or something follows it."
        raise GraphFormatError(detail, what_to_do=_WHOLE, where="zlib")
    return inflated


def parse_document(data: object) -> GraphDocument:
    """Return the document in ``data``, a JSON value, compressed or not.

    Raises:
        GraphFormatError: ``data`` is no valid document. The message names the place that is wrong.
    """
    text = text_of(data)
    try:
        return GraphDocument.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:200]
        if where == "format_version" and first["type"] == "literal_error":
            advice = "Use the same version of shardplan on both sides."
            raise GraphFormatError.at(where, f"we read {FORMAT_VERSION}", what_to_do=advice) from error
        what = _MESSAGES.get(first["type"], first["msg"])
        raise GraphFormatError.at(where, what, what_to_do=_WHOLE) from error


if __name__ == "__main__":
    print(json.dumps(json_schema(), indent=2))
