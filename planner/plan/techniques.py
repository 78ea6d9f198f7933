"""Techniques: optional changes to how a model runs, the list of a job, and what each gives in a plan.

A job's ``techniques`` is a list of names. A `planner.plan.job.Job` records each as a field of its own (`FIELDS`), and
these fields are accepted as keywords too.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar, get_args

from planner.errors import JobError
from planner.plan.former_names import FORMER_NAMES, with_current_names

if TYPE_CHECKING:
    from cost_model.hardware.devices import DeviceSpec

Technique = Literal[
    "fused-ops", "fused-projections", "zigzag", "reallgather", "async-tp", "flash3", "heterogeneous-blocks"
]
AUTO: Literal["auto"] = "auto"
NONE = "none"
TechniqueChoice = Literal[Technique, "auto"]
"""An item of a job's list: a technique, or "auto", which lets the planner add those that pay."""

AttentionKernel = Literal["flash3"]
"""Attention kernels that are not torch's own."""

TECHNIQUES: tuple[Technique, ...] = get_args(Technique)

FIELDS: Mapping[Technique, str] = {name: name.replace("-", "_") for name in TECHNIQUES if name != "flash3"}
"""Technique -> field of `Job` (and keyword) that turns it on. For flash3 that is ``attention_kernel="flash3"``."""

KERNEL_FIELD = "attention_kernel"


@dataclass(frozen=True, slots=True, kw_only=True)
class TechniqueGain:
    """A technique that a plan uses.

    Attributes:
        name: name of the technique.
        gain_s: seconds by which a step without this technique, and with all others of the plan, would be longer; None:
            not measured, because the user chose the technique, or because no plan without it fits the memory.
    """

    name: Technique
    gain_s: float | None = None


class TechniqueFlags:
    """Properties that tell of each technique whether it is in ``techniques``."""

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def techniques(self) -> tuple[TechniqueChoice, ...]: ...

    @property
    def fused_ops(self) -> bool:
        """Whether norms, gated activations, rotary embeddings and the loss run as one op each."""
        return "fused-ops" in self.techniques

    @property
    def fused_projections(self) -> bool:
        """Whether projections that read one tensor are one linear layer."""
        return "fused-projections" in self.techniques

    @property
    def zigzag(self) -> bool:
        """Whether sharded sequences are in zigzag token order."""
        return "zigzag" in self.techniques

    @property
    def reallgather(self) -> bool:
        """Whether linear layers may all-gather their inputs again in the backward."""
        return "reallgather" in self.techniques

    @property
    def async_tp(self) -> bool:
        """Whether tensor-parallel communication is assumed to overlap with the GEMM next to it."""
        return "async-tp" in self.techniques

    @property
    def heterogeneous_blocks(self) -> bool:
        """Whether the first of equal blocks may differ from the rest."""
        return "heterogeneous-blocks" in self.techniques

    @property
    def attention_kernel(self) -> AttentionKernel | None:
        """The kernel of fused attention; None: the kernel that torch chooses."""
        return "flash3" if "flash3" in self.techniques else None

    @property
    def is_auto(self) -> bool:
        """Whether the planner adds the techniques that pay."""
        return AUTO in self.techniques

    @property
    def listed_techniques(self) -> tuple[Technique, ...]:
        """The techniques that were asked for by name."""
        return tuple(name for name in TECHNIQUES if name in self.techniques)


class Fault(NamedTuple):
    """A reason why a list of techniques cannot be used: the field at fault, what is wrong, and what to do."""

    field: str
    detail: str
    advice: str


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise one `JobError` that names all ``faults``; do nothing where there are none."""
    if faults:
        fields = {fault.field for fault in faults}
        raise JobError(
            " ".join(fault.detail for fault in faults),
            what_to_do=" ".join(dict.fromkeys(fault.advice for fault in faults)),
            field=fields.pop() if len(fields) == 1 else "techniques",
        )


def technique_names(value: str | Iterable[str] | None) -> tuple[TechniqueChoice, ...]:
    """Return a list of techniques without repetitions, in the order of `TECHNIQUES`, "auto" first.

    Args:
        value: names, one text with names separated by commas, or a mix of both; "none" alone or None: no technique.

    Raises:
        JobError: names that do not exist (all of them are listed), or "none" next to other names.
    """
    names, faults = _read(value)
    raise_faults(faults)
    return names


def _read(value: str | Iterable[str] | None) -> tuple[tuple[TechniqueChoice, ...], list[Fault]]:
    """Return the techniques in ``value`` that exist, and the faults of the rest."""
    texts = list(value or ()) if isinstance(value, Iterable | None) and not isinstance(value, str) else [value]
    if not all(isinstance(text, str) for text in texts):
        advice = f"Give names of {', '.join(TECHNIQUES)}, or auto, or none."
        return (), [Fault("techniques", f"techniques is {value!r}.", advice)]
    words = [word.strip() for text in texts for word in text.split(",") if word.strip()]
    names = {_current_name(word): word for word in words}
    known = tuple(name for name in (AUTO, *TECHNIQUES) if name in names)
    faults = [_unknown(word) for name, word in names.items() if name not in (*TECHNIQUES, AUTO, NONE)]
    if NONE in names and len(names) > 1:
        others = ", ".join(word for name, word in names.items() if name != NONE)
        faults.append(Fault("techniques", f"techniques has none and {others}.", "Leave none out, or give it alone."))
    return known, faults


def _current_name(word: str) -> str:
    """Return the name of a technique that is written with underscores, in capitals, or under its former name."""
    field = word.lower().replace("-", "_")
    return FORMER_NAMES.get(field, field).replace("_", "-")


def _unknown(word: str) -> Fault:
    close = difflib.get_close_matches(_current_name(word), (*TECHNIQUES, AUTO, NONE), n=1, cutoff=0.5)
    hint = f" (did you mean {close[0]}?)" if close else ""
    advice = f"Techniques are {', '.join(TECHNIQUES)}; or give auto, or none."
    return Fault("techniques", f"there is no technique {word!r}{hint}.", advice)


def kernel_fault(kernel: AttentionKernel, device: DeviceSpec, dtype: str) -> Fault | None:
    """Return why an attention kernel cannot run on ``device`` in ``dtype``; None: it can."""
    from cost_model.kernels.attention import runs_kernel

    if not runs_kernel(kernel, device):
        return no_kernel(kernel, f"{device.name} does not run")
    return no_kernel(kernel, "does not run in fp32") if dtype == "fp32" else None


def no_kernel(kernel: str, reason: str) -> Fault:
    """Return the fault of an attention kernel that does not run for ``reason``."""
    advice = f"Leave {kernel} out of the techniques: torch then chooses a kernel that runs."
    return Fault(KERNEL_FIELD, f"attention_kernel is {kernel!r}, which {reason}.", advice)


def check_techniques(
    value: str | Iterable[str] | None, *, executable_only: bool, device: DeviceSpec | None, dtype: str
) -> tuple[TechniqueChoice, ...]:
    """Return `technique_names` of ``value``, checked against the job.

    Args:
        value: as for `technique_names`.
        executable_only: whether only plans that shard_module runs are asked for.
        device: the cluster's devices; None: not known yet.
        dtype: dtype of activations.

    Raises:
        JobError: with all faults at once.
    """
    names, faults = _read(value)
    if "async-tp" in names and executable_only:
        detail = "async-tp (async_tp) is for plans that cannot be run, and only executable ones are asked for."
        advice = "Add --no-executable-only (executable_only=False), or leave async-tp out."
        faults.append(Fault("async_tp", detail, advice))
    kernel = kernel_fault("flash3", device, dtype) if "flash3" in names and device is not None else None
    raise_faults([*faults, *([] if kernel is None else [kernel])])
    return names


def with_technique_list(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a job's options under their current names, with fields of single techniques put into ``techniques``.

    ``{"fused": True, "techniques": "zigzag"}`` becomes ``{"techniques": ("zigzag", "fused-ops")}``.

    Raises:
        JobError: a field of a technique has a value that it cannot have, or "none" stands next to other names.
        ValueError: an option is given under two names.
    """
    values = with_current_names(options)
    flags = [name for name, field in FIELDS.items() if _is_on(field, values.pop(field, None))]
    kernel = values.pop(KERNEL_FIELD, None)
    if kernel not in (None, *get_args(AttentionKernel)):
        advice = f"Choose one of {', '.join(get_args(AttentionKernel))}."
        raise JobError(f"{KERNEL_FIELD} is {kernel!r}.", what_to_do=advice, field=KERNEL_FIELD)
    added = [*flags, *([] if kernel is None else [kernel])]
    if added:
        given = values.get("techniques") or ()
        values["techniques"] = (*([given] if isinstance(given, str) else given), *added)
    return values


def _is_on(field: str, value: Any) -> bool:
    if value not in (None, False, True):
        raise JobError(f"{field} is {value!r}.", what_to_do="Give true or false.", field=field)
    return bool(value)


Spec = TypeVar("Spec", bound=type)


def takes_single_techniques(cls: Spec) -> Spec:
    """Return ``cls``, whose constructor also takes techniques one by one (``fused_ops=True``), and former names."""
    init = cls.__init__  # type: ignore[misc]  # of this class, which has no subclass

    @functools.wraps(init)
    def with_list(self: Any, **options: Any) -> None:
        init(self, **with_technique_list(options))

    cls.__init__ = with_list  # type: ignore[misc]
    return cls
