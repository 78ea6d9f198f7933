"""What may be asked, and what is answered: the request of the command line and of HTTP alike, and HTTP's answers."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

PLANNERS = ("ilp", "data-parallel", "fully-sharded", "tensor-parallel")
"""And ``random:SEED``."""
Count = Annotated[int, Field(strict=True, ge=1, le=2**31)]
JobStatus = Literal["queued", "running", "succeeded", "failed", "cancelled"]


class HuggingFaceModel(BaseModel):
    """A model given as the contents of its Hugging Face ``config.json``: data only, no code of the client's is run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hf_config: dict[str, Any]


class TracedGraph(BaseModel):
    """A model that the client traced itself, given as its graph of ops: no code, no weights (``docs/graph-format.md``).

    ``graph`` is what ``planner.graph_json.write_graph`` returns: ``{"format": "shardplan-graph", "zlib": "..."}``, or
    the document that is compressed there, as it is.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    graph: dict[str, Any]


class PlanRequest(BaseModel):
    """A plan to be made. The names are those of the command line's options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, Field(min_length=1, max_length=1000)] | HuggingFaceModel | TracedGraph
    """A preset's name, a Hugging Face config, or a graph that the client traced.

    The command line also takes paths and ``package.module:factory``.
    """
    cluster: Annotated[str, Field(min_length=1, max_length=1000)] | dict[str, Any]
    """``2x8xh100-sxm-80gb``, or an object with nodes, devices_per_node, device and the links that differ from usual."""
    mesh: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    """``dp=2,tp=8``, outermost axis first; without it all meshes of one and two axes are tried."""
    batch: Count | None = None
    """Samples in the global batch."""
    seq: Count | None = None
    """Tokens in a sequence; both lengths of an encoder-decoder; ignored, with a note, where it has no meaning."""
    micro_batches: Count | None = None
    """Micro-batches per step; without it several are tried."""
    ac: Literal["none", "selective", "full"] | None = None
    """Activation checkpointing of all blocks; without it each is tried."""
    memory_gb: Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = None
    """Cap on the peak per device, in GB of 1e9 bytes; without it the device's own memory."""
    optimizer: Annotated[str, Field(max_length=50)] = "adamw"
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Of parameters and activations."""
    pins: Annotated[tuple[Annotated[str, Field(max_length=1000)], ...], Field(max_length=100)] = ()
    """Layouts decided already, such as ``lm_head.weight=S(0)@tp``; ``!=`` forbids, ``:used=`` is the compute layout."""
    data_axes: Annotated[tuple[Annotated[str, Field(max_length=100)], ...], Field(max_length=10)] = ()
    """Mesh axes that split the batch alone."""
    planner: Annotated[str, Field(pattern=rf"^({'|'.join(PLANNERS)}|random:\d{{1,18}})$")] = "ilp"

    @property
    def model_spec(self) -> str | dict[str, Any]:
        """The model in the form that ``load_model`` takes; it takes no graph."""
        if isinstance(self.model, TracedGraph):
            raise TypeError("a graph is no model to be loaded")
        return self.model if isinstance(self.model, str) else {"hf_config": self.model.hf_config}

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
    """A request and what became of it. ``plan`` follows the published ``planner/plan.schema.json``."""

    id: str
    status: JobStatus
    plan: dict[str, Any] | None = None
    error: Problem | None = None


class Health(BaseModel):
    """That the server answers, its version, and how many jobs wait and run."""

    status: Literal["ok"] = "ok"
    version: str
    queued: int
    running: int
