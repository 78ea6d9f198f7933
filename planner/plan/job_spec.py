"""`JobSpec`: the job as a user states it, with the name, type, default, limits and help text of each field.

`build_plan`'s keywords, the command line's options and the HTTP request are derived from these fields.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from planner.errors import JobError
from planner.plan.techniques import TechniqueChoice, TechniqueFlags, check_techniques, takes_single_techniques

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from cost_model import ClusterSpec
    from cost_model.hardware.devices import DeviceSpec
    from cost_model.layouts.layout import MeshSpec

JobPhase = Literal["training", "prefill", "decode"]
"""What a step is: a training step, the prompt's forward, or the forward of one more token of each sequence."""

Dtype = Literal["bf16", "fp16", "fp32"]

PLANNERS = ("ilp", "ddp", "fsdp", "hsdp", "fsdp-tp", "tp", "data-parallel", "fully-sharded", "tensor-parallel")
"""Names of the planners; ``random:SEED`` is one more, and the first five baselines may be joined by "+"."""
_PLANNER = "|".join((*PLANNERS, rf"(\+?({'|'.join(PLANNERS[1:6])}|keep-gathered)\b){{2,}}", r"random:\d{1,18}"))

JOB, MESH, SEARCH, TECHNIQUES = "Job", "Mesh and layouts", "Search", "Techniques"
"""Headings of the command line's help. Options without a heading come first."""

_BOUNDS = {"gt": "above", "ge": "at least", "le": "at most"}
"""Name of a bound, in pydantic and as a function of `operator` -> the bound in words."""
_KINDS: Mapping[Any, Callable[[Any], bool]] = {
    int: lambda value: isinstance(value, int) and not isinstance(value, bool),
    float: lambda value: isinstance(value, (int, float)) and not isinstance(value, bool),
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
}
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "True or False"}
_COUNT = {"strict": True, "ge": 1, "le": 2**31}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What the command line and HTTP requests need of a field beyond its name, type and default.

    Attributes:
        help: one or two sentences; they name options as the command line does.
        heading: heading of the option in the command line's help; None: the option comes before all headings.
        flag: the option on the command line, given once per item of a list; None: it follows from the field's name.
        limits: constraints on the value, in pydantic's terms (``ge``, ``pattern``, ``max_length``, ...).
        item_limits: constraints on each item of a list, in pydantic's terms.
        text: type in a request, for a field that takes objects in Python; None: the field's own type.
        in_requests: whether an HTTP request may set the field.
    """

    help: str
    heading: str | None = None
    flag: str | None = None
    limits: Mapping[str, Any] = field(default_factory=dict)
    item_limits: Mapping[str, Any] = field(default_factory=dict)
    text: Any = None
    in_requests: bool = True


def _about(help: str, **rest: Any) -> dict[str, Option]:
    """Return the metadata of a dataclass field, its `Option`."""
    return {"option": Option(help=help, **rest)}


@takes_single_techniques
@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(TechniqueFlags):
    """A job, the cluster that it is planned for, and the search. It is independent of the model.

    Raises:
        JobError: a number is outside its limits, a choice does not exist, or a technique does not exist or cannot be
            used in this job.
    """

    cluster: str | ClusterSpec | Mapping[str, Any] = field(
        metadata=_about(
            "NODESxDEVICESxDEVICE_TYPE such as 4x8xh100-sxm-80gb, several of these joined by +, or a YAML file.",
            limits={"min_length": 1, "max_length": 1000},
            text=str | dict[str, Any],
        )
    )
    batch: int | None = field(default=None, metadata=_about("Samples in the global batch.", limits=_COUNT))
    seq: int | None = field(
        default=None,
        metadata=_about(
            "Tokens in a sequence; in decode, tokens of each sequence that are in the cache.", limits=_COUNT
        ),
    )
    mesh: str | MeshSpec | None = field(
        default=None,
        metadata=_about(
            "Such as dp=2,tp=8, outermost axis first (pp: pipeline stages). Default: all meshes are tried.",
            limits={"min_length": 1, "max_length": 200},
            text=str | None,
        ),
    )
    memory_gb: float | None = field(
        default=None,
        metadata=_about(
            "Cap on the peak per device, in GB of 1e9 bytes. Default: the device's memory, less --headroom.",
            limits={"gt": 0, "le": 10**6, "allow_inf_nan": False},
        ),
    )

    headroom: float = field(
        default=0.08,
        metadata=_about(
            "Fraction of the device's memory that stays free where no --memory-gb is given.",
            heading=JOB,
            limits={"ge": 0, "le": 0.9, "allow_inf_nan": False},
        ),
    )

    phase: JobPhase = field(
        default="training",
        metadata=_about(
            "What a step is: a training step; prefill, one forward over the batch; decode, the forward of one "
            "more token of each sequence.",
            heading=JOB,
        ),
    )
    micro_batches: int | None = field(
        default=None, metadata=_about("Micro-batches per step. Default: chosen.", heading=JOB, limits=_COUNT)
    )
    ac: str | None = field(
        default=None,
        metadata=_about(
            "Activation checkpointing: none, selective or full; full:8 for the first 8 blocks of each list only; "
            "full:8,selective for selective checkpointing of the others. Default: chosen.",
            heading=JOB,
            limits={"pattern": r"^(none|(selective|full)(:[1-9][0-9]{0,3})?|full:[1-9][0-9]{0,3},selective)$"},
        ),
    )
    optimizer: str = field(
        default="adamw",
        metadata=_about(
            "adamw, adam, sgd, sgd-momentum, adagrad, muon, or adamw-8bit of torchao; with --no-executable-only also "
            "adafactor, or adamw-8bit-bnb of bitsandbytes.",
            heading=JOB,
            limits={"max_length": 50},
        ),
    )
    dtype: Dtype = field(default="bf16", metadata=_about("Of parameters in compute and of activations.", heading=JOB))
    reduce_dtype: Dtype = field(
        default="fp32",
        metadata=_about("In which gradients are reduced, and accumulate over micro-batches.", heading=JOB),
    )

    expert_imbalance: float = field(
        default=1.0,
        metadata=_about(
            "Tokens of the busiest rank's experts over the mean of all ranks, where experts are spread over ranks.",
            heading=JOB,
            limits={"ge": 1, "le": 1000, "allow_inf_nan": False},
        ),
    )

    planner: str = field(
        default="ilp",
        metadata=_about(
            "ilp, a baseline (ddp, fsdp, hsdp, fsdp-tp, tp, the best of ddp+fsdp; data-parallel, fully-sharded, "
            "tensor-parallel on any mesh), or random:SEED.",
            heading=MESH,
            limits={"pattern": f"^({_PLANNER})$"},
        ),
    )
    pins: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "A layout that is decided already, such as 'lm_head.weight=S(0)@tp'; != forbids it; 'NAME:used=R@dp' is "
            "the compute layout. Repeat for more.",
            heading=MESH,
            flag="--pin",
            limits={"max_length": 100},
            item_limits={"max_length": 1000},
        ),
    )
    data_axes: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "A mesh axis that splits the batch only. Repeat for more.",
            heading=MESH,
            flag="--data-axis",
            limits={"max_length": 10},
            item_limits={"max_length": 100},
        ),
    )
    axes: int = field(
        default=2,
        metadata=_about(
            "The most axes of a mesh that is tried, 1 to 3; of three the outermost splits the batch only.",
            heading=MESH,
            limits={"ge": 1, "le": 3},
        ),
    )
    opaque_modules: tuple[str, ...] = field(
        default=(),
        metadata=_about(
            "A module that runs as one op, on whole tensors or on each rank's samples. Modules that cannot be traced "
            "do so without being named. Repeat for more.",
            heading=MESH,
            flag="--opaque",
            limits={"max_length": 100},
            item_limits={"max_length": 1000},
        ),
    )
    executable_only: bool = field(
        default=True,
        metadata=_about(
            "Only plans that shard_module can run; --no-executable-only searches pipelines as well.", heading=SEARCH
        ),
    )
    tolerance: float = field(
        default=0.02,
        metadata=_about(
            "Relative step time that a simpler plan may cost more than the fastest; 0: the fastest plan.",
            heading=SEARCH,
            limits={"ge": 0, "le": 1, "allow_inf_nan": False},
        ),
    )
    time_limit_s: float | None = field(
        default=None,
        metadata=_about(
            "Seconds for the search; then the incumbent is returned, with its gap.",
            heading=SEARCH,
            flag="--time-limit",
            limits={"gt": 0},
            in_requests=False,
        ),
    )
    jobs: int = field(
        default=1,
        metadata=_about(
            "Tasks of the search that run at once, in processes of this machine or where "
            "joblib.parallel_config says; -1: one per core.",
            heading=SEARCH,
            in_requests=False,
        ),
    )

    techniques: tuple[TechniqueChoice, ...] = field(
        default=(),
        metadata=_about(
            "fused-ops, fused-projections, zigzag, reallgather, async-tp, flash3 and heterogeneous-blocks, separated "
            "by commas; auto: those that pay and that shard_module runs, which takes about twice as long. Default: "
            "none.",
            heading=TECHNIQUES,
        ),
    )

    def __post_init__(self) -> None:
        for item in spec_fields():
            _check(item, getattr(self, item.name))
        names = check_techniques(
            self.techniques, executable_only=self.executable_only, device=_device_of(self.cluster), dtype=self.dtype
        )
        object.__setattr__(self, "techniques", names)
        self._check_optimizer()

    def _check_optimizer(self) -> None:
        """Raise a JobError if plans are to be run whose optimizer the executor does not run."""
        from cost_model.kernels.optimizers import OPTIMIZERS

        optimizer = OPTIMIZERS.get(self.optimizer)
        if optimizer is None or optimizer.not_on_dtensor is None:
            return
        if not (self.executable_only and self.phase == "training"):
            return
        raise JobError(
            f"shard_module does not run {optimizer.title}: {optimizer.not_on_dtensor}.",
            what_to_do="Choose another optimizer, or add --no-executable-only (executable_only=False) to price it.",
            field="optimizer",
        )


def _device_of(cluster: Any) -> DeviceSpec | None:
    """Return the devices of a cluster that is read already, or given by name; None: they are in a file, or unknown."""
    from cost_model.hardware.cluster import ClusterError, ClusterSpec

    if isinstance(cluster, str) and not cluster.strip().lower().endswith((".yaml", ".yml")):
        with contextlib.suppress(ClusterError):
            return ClusterSpec.parse(cluster).device
    return cluster.device if isinstance(cluster, ClusterSpec) else None


class JobOptions(TypedDict, total=False):
    """The fields of `JobSpec` as keywords, for type checkers; a test compares the two."""

    cluster: str | ClusterSpec | Mapping[str, Any]
    batch: int | None
    seq: int | None
    mesh: str | MeshSpec | DeviceMesh | None
    memory_gb: float | None
    headroom: float
    phase: JobPhase
    micro_batches: int | None
    ac: str | None
    optimizer: str
    dtype: str
    reduce_dtype: str
    expert_imbalance: float
    planner: str
    pins: Sequence[str]
    data_axes: Sequence[str]
    axes: int
    opaque_modules: Sequence[str]
    executable_only: bool
    tolerance: float
    time_limit_s: float | None
    jobs: int
    techniques: str | Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecField:
    """A field of `JobSpec`: its name, type and default, and its `Option`."""

    name: str
    type: Any
    default: Any
    option: Option

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that the field's `Literal` type allows; empty for other types."""
        kinds = (self.type, *typing.get_args(self.type))
        return next((typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is Literal), ())

    @property
    def required(self) -> bool:
        """Whether the field has no default."""
        return self.default is dataclasses.MISSING

    @property
    def text_type(self) -> Any:
        """The field's type in an HTTP request."""
        return self.type if self.option.text is None else self.option.text

    @property
    def flag(self) -> str:
        """The field's option on the command line, such as ``--micro-batches``."""
        return self.option.flag or f"--{self.name.replace('_', '-')}"


@functools.cache
def spec_fields() -> tuple[SpecField, ...]:
    """Return the fields of `JobSpec`, in their order."""
    types = typing.get_type_hints(JobSpec, localns={"ClusterSpec": Any, "MeshSpec": Any})
    return tuple(
        SpecField(name=item.name, type=types[item.name], default=item.default, option=item.metadata["option"])
        for item in dataclasses.fields(JobSpec)
    )


def _check(item: SpecField, value: Any) -> None:
    """Raise a `JobError` where a value is of another type, a number outside its limits, or a choice does not exist."""

    def refuse(advice: str) -> None:
        raise JobError(f"{item.name} is {value!r}.", what_to_do=advice, field=item.name)

    limits, is_list = item.option.limits, typing.get_origin(item.type) is tuple
    kinds = [kind for kind in (item.type, *typing.get_args(item.type)) if kind in _KINDS]
    if item.choices:
        # `check_techniques` checks the list of choices.
        if not is_list and value not in item.choices and not (value is None and item.default is None):
            refuse(f"Choose one of {', '.join(item.choices)}.")
    elif is_list:
        if isinstance(value, str) or not isinstance(value, Collection) or not all(isinstance(x, str) for x in value):
            refuse(f"Give a list of texts{f', such as [{value!r}]' if isinstance(value, str) else ''}.")
    elif not {Any, type(value)}.intersection(typing.get_args(item.type)) and not any(_KINDS[x](value) for x in kinds):
        refuse(f"Give {_WORDS[kinds[0]]}.")
    bounds = [f"{text} {limits[key]}" for key, text in _BOUNDS.items() if key in limits]
    if value is not None and not all(getattr(operator, key)(value, limits[key]) for key in _BOUNDS if key in limits):
        refuse(f"Give a number {', '.join(bounds)}.")


def spec_of(options: Mapping[str, Any]) -> JobSpec:
    """Return the `JobSpec` with the fields ``options``, whose keys may be former names or single techniques.

    Raises:
        TypeError: there is no such field, or ``cluster`` is missing.
    """
    return JobSpec(**options)
