"""What may be asked, and what is answered: the request of the command line and of HTTP alike, and HTTP's answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from planner.plan.former_names import with_current_names

PLANNERS = ("ilp", "data-parallel", "fully-sharded", "tensor-parallel")
"""And ``random:SEED``."""
Count = Annotated[int, Field(strict=True, ge=1, le=2**31)]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class _Request(BaseModel):
    """A client's data, whose fields may have their former names."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _with_current_names(cls, values: Any) -> Any:
        return with_current_names(values) if isinstance(values, Mapping) else values


class HuggingFaceModel(_Request):
    """A model given as the contents of its Hugging Face ``config.json``: data only, no code of the client's is run."""

    hf_config: dict[str, Any]
    fused_projections: bool = False
    """Whether projections of one tensor are one layer, as ``+fused-projections`` behind a preset's name says."""

    @property
    def spec(self) -> dict[str, Any]:
        """The model in the form that ``load_model`` and ``price_configuration`` take."""
        return {"hf_config": self.hf_config, "fused_projections": self.fused_projections}


class TracedGraph(_Request):
    """A model that the client traced itself, given as its graph of ops: no code, no weights (``docs/graph-format.md``).

    ``graph`` is what ``planner.wire.codec.write_graph`` returns: ``{"format": "shardplan-graph", "zlib": "..."}``, or
    the document that is compressed there, as it is.
    """

    graph: dict[str, Any]


class PlanRequest(_Request):
    """A plan to be made. The names are those of the command line's options."""

    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel | TracedGraph
    """A preset's name, a Hugging Face config, or a graph that the client traced.

    The command line also takes paths and ``package.module:factory``.
    """
    cluster: Annotated[str, Field(min_length=1, max_length=1000)] | dict[str, Any]
    """``2x8xh100-sxm-80gb``, or an object with nodes, devices_per_node, device and the links that differ from usual."""
    mesh: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """``dp=2,tp=8``, outermost axis first; without it all meshes with up to ``axes`` axes are tried."""
    phase: Literal["training", "prefill", "decode"] = "training"
    """What a step is: prefill is one forward over the batch, decode that of one more token of each sequence."""
    batch: Count | None = None
    """Samples in the global batch."""
    seq: Count | None = None
    """Tokens in a sequence, in decode those in the cache; both lengths of an encoder-decoder; ignored, with a note,
    where it has no meaning."""
    micro_batches: Count | None = None
    """Micro-batches per step; without it several are tried."""
    ac: Annotated[str, Field(pattern=r"^(none|(selective|full)(:[1-9][0-9]{0,3})?)$")] | None = None
    """Activation checkpointing: ``none``, ``selective`` or ``full`` of all blocks, ``full:8`` of the first 8 of each
    list; without it, it is chosen."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Cap on the peak per device, in GB of 1e9 bytes; without it the device's own memory."""
    optimizer: Annotated[str, Field(max_length=50)] = "adamw"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of parameters and activations."""
    reduce_dtype: Literal["bf16", "fp16", "fp32"] = "fp32"
    """In which gradients are reduced, and add up over micro-batches until they are."""
    pins: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)] = ()
    """Layouts decided already, such as ``lm_head.weight=S(0)@tp``; ``!=`` forbids, ``:used=`` is the compute layout."""
    data_axes: Annotated[tuple[Annotated[str, Field(max_length=100)], ...], Field(max_length=10)] = ()
    """Mesh axes that split the batch alone."""
    axes: Annotated[int, Field(ge=1, le=3)] = 2
    """The most axes of a mesh, where none is given; of three the outermost splits the batch alone. With 2, interleaved
    stages have one mesh of three as well where devices outnumber samples."""
    heterogeneous_blocks: bool = False
    """Whether the first of equal blocks may be laid out and checkpointed apart from the rest; planning takes longer."""
    executable_only: bool = True
    """Whether only plans are wanted that ``executor.shard_module`` can run; false tries pipelines as well."""
    async_tp: bool = False
    """Whether tensor-parallel communication inside a node is taken to run in pieces beside matrix products; such a plan
    cannot be run, so it needs ``executable_only`` to be false."""
    reallgather: bool = False
    """Whether linear layers may have what was gathered for them gathered again for their backward; planning takes
    longer."""
    fused_ops: bool = False
    """Whether norms, gated activations, rotary embeddings and the loss run as one op each where the model's own code
    does the same: what ``executor.shard_module`` then puts in its place."""
    zigzag: bool = False
    """Whether, where attention's sequences are split, the model has its tokens in an order that makes work under a
    causal mask even: no queries are exchanged, and logits come in that order."""
    attention_kernel: Literal["flash3"] | None = None
    """``flash3``: attention in FlashAttention-3, on Hopper; without it, in the kernel that torch chooses."""
    planner: Annotated[str, Field(pattern=rf"^({'|'.join(PLANNERS)}|random:\d{{1,18}})$")] = "ilp"

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``load_model`` takes; it takes no graph."""
        if isinstance(self.model, TracedGraph):
            raise TypeError("a graph is no model to be loaded")
        if isinstance(self.model, str):
            return self.model
        return self.model.spec

    @property
    def graph(self) -> dict[str, Any] | None:
        """The graph that the client traced, None where it names a model."""
        return self.model.graph if isinstance(self.model, TracedGraph) else None


class Problem(BaseModel):
    """What went wrong, as problem details (RFC 9457); more members carry its data, such as ``least_bytes``."""

    model_config = ConfigDict(extra="allow")

    type: str = "about:blank"
    title: str
    status: int
    detail: str = ""


class PlanJob(BaseModel):
    """A request and what became of it. ``plan`` follows the published ``planner/plan/plan.schema.json``."""

    id: str
    status: JobStatus
    plan: dict[str, Any] | None = None
    error: Problem | None = None


class JobSummary(BaseModel):
    """A job in a list. Times are in seconds since 1970; ``label`` is its model and cluster, ``error`` a title."""

    id: str
    status: JobStatus
    label: str
    queued_at: float
    started_at: float | None
    finished_at: float | None
    error: str | None


class PlanPage(BaseModel):
    """Some jobs, the newest first; ``next`` is the ``before`` of the next page, null at the end."""

    jobs: list[JobSummary]
    next: int | None


class EstimateRequest(_Request):
    """A parallel configuration to be priced. The names are those of the command line's options."""

    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel
    cluster: Annotated[str, Field(min_length=1, max_length=1000)] | dict[str, Any]
    mesh: Annotated[str, Field(min_length=1, max_length=200)]
    """``dp=2,fsdp=8,tp=4,pp=2,cp=1,ep=1``; what is left out is 1."""
    micro_batch: Annotated[int, Field(strict=True, ge=1, le=2**20)] = 1
    """Samples per rank and micro-batch."""
    batch: Annotated[int, Field(strict=True, ge=1, le=2**24)] | None = None
    """Samples in the global batch; without it one micro-batch for each data-parallel rank."""
    seq: Annotated[int, Field(strict=True, ge=1, le=2**24)] = 4096
    ac: Annotated[str, Field(max_length=50)] = "none"
    sequence_parallel: bool = False
    virtual_stages: Annotated[int, Field(strict=True, ge=1, le=1000)] = 1
    schedule: Annotated[str, Field(max_length=50)] = "1f1b"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    optimizer: Annotated[str, Field(max_length=50)] = "adamw"
    compiled: bool = True

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``price_configuration`` takes."""
        if isinstance(self.model, str):
            return self.model
        return self.model.spec


class PricedEstimate(BaseModel):
    """What a step of a configuration costs, in seconds and bytes, by part."""

    model: str
    cluster: str
    parameters: int
    step_time_s: float
    parts_s: dict[str, float]
    tokens_per_s_per_device: float
    model_flops_share: float
    fits: bool
    memory_bytes: dict[str, float | str]
    timeline_bytes: dict[str, float]


class DiffRequest(BaseModel):
    """Two plans, each as it is or as the id of the job that made it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    left: Annotated[str, Field(max_length=64)] | dict[str, Any]
    right: Annotated[str, Field(max_length=64)] | dict[str, Any]


class Difference(BaseModel):
    """One thing that two plans have differently; null where one of them does not have it."""

    field: str
    key: str
    left: Any
    right: Any


class Differences(BaseModel):
    """Where two plans differ."""

    equal: bool
    settings: list[Difference]
    seconds: list[Difference]
    bytes: list[Difference]
    layouts: list[Difference]


class DeviceSummary(BaseModel):
    """A device that a cluster can be made of, with its usual links."""

    name: str
    kind: str
    memory_bytes: int
    peak_flops: dict[str, float]
    memory_bandwidth_bytes_per_s: float
    intra_node: str
    inter_node: str


class DeviceList(BaseModel):
    """The devices that are known."""

    devices: list[DeviceSummary]


class ModelSummary(BaseModel):
    """A model that can be named; ``max_seq`` is the longest sequence that it was made for, where it says so."""

    name: str
    model_type: str
    max_seq: int | None


class ModelList(BaseModel):
    """The models that are known."""

    models: list[ModelSummary]


class Health(BaseModel):
    """That the server answers, and its version."""

    status: Literal["ok"] = "ok"
    version: str


class Readiness(BaseModel):
    """That jobs can be taken, and where they are kept."""

    status: Literal["ready"] = "ready"
    database: Literal["sqlite", "postgresql"]
