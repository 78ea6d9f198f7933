"""The job: what is run, and under which assumptions it is priced. Plain values, no torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from cost_model.hardware.reading import close_matches
from cost_model.kernels.optimizers import OPTIMIZERS
from planner.errors import JobError
from planner.plan.job_spec import JobPhase, JobSpec
from planner.plan.techniques import FIELDS, KERNEL_FIELD, AttentionKernel

CheckpointingMode = Literal["full", "selective"]
"""Activation checkpointing of a block; a block without it has no mode."""

CHECKPOINTING_CHOICES = ("none", "selective", "full")
_AC_FORMS = (
    "none, selective, full, or selective:K or full:K for the first K blocks of each list, or full:K,selective for "
    "selective checkpointing of the others"
)


class Checkpointing(NamedTuple):
    """A job's ``ac``, parsed.

    Attributes:
        mode: the mode of the first blocks of each list.
        first: how many leading blocks of each list have it; None: all blocks.
        others: mode of the other blocks.
    """

    mode: str
    first: int | None = None
    others: str = "none"

    @classmethod
    def parse(cls, text: str) -> Checkpointing:
        """Return ``text``, parsed: "none", "selective", "full", "selective:K", "full:K" or "full:K,selective".

        Raises:
            JobError: ``text`` is none of these.
        """
        leading, comma, others = text.partition(",")
        mode, colon, count = leading.partition(":")
        if mode in CHECKPOINTING_CHOICES and not colon and not comma:
            return cls(mode)
        is_mixed = mode == "full" and others == "selective"
        is_count = count.isascii() and count.isdigit() and int(count) > 0
        if mode in CHECKPOINTING_CHOICES[1:] and is_count and (is_mixed or not comma):
            return cls(mode, int(count), others or "none")
        raise JobError(f"ac is {text!r}.", what_to_do=f"Choose {_AC_FORMS}.", field="ac")

    def __str__(self) -> str:
        others = "" if self.others == "none" else f",{self.others}"
        return self.mode if self.first is None else f"{self.mode}:{self.first}{others}"


ATTENTION_KERNELS: tuple[AttentionKernel, ...] = get_args(AttentionKernel)

PHASES: tuple[JobPhase, ...] = get_args(JobPhase)

BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
"""dtype name in a job -> bytes per element."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One step of a model, with the assumptions that its price depends on.

    Attributes:
        batch: samples in the global batch of one step; None: the first dim of the example inputs.
        seq: tokens in a sequence (both lengths for an encoder-decoder). In decode, the tokens of each sequence that are
            in the cache already. None: the model has no sequences.
        phase: what a step is. Prefill and decode run the batch at once (one micro-batch, no checkpointing), with
            parameters in ``dtype`` and no master copy.
        training: False prices the forward pass only, without gradients and optimizer state. It is False in all phases
            but training.
        optimizer: a name in ``cost_model.kernels.optimizers.OPTIMIZERS``.
        dtype: dtype of activations, and of parameters in compute.
        master_dtype: dtype of the optimizer's master copy of the parameters; None: there is no copy.
        state_dtype: dtype of the optimizer's states. A plan only records it: prices take ``master_dtype`` for states.
        reduce_dtype: dtype in which gradients are reduced, and in which they accumulate over micro-batches.
        expert_imbalance: where experts are spread over ranks, rows of the busiest rank over their mean.
        flash_attention: whether attention runs in a fused kernel; None: if the device has one.
        attention_kernel: kernel of fused attention. "flash3": FlashAttention-3 on Hopper, which is a separate package.
            None: the kernel that torch chooses.
        dropout: always "as-configured": dropout follows the model's config.
        mip_gap: relative gap at which the solver may stop.
        memory_bytes: cap on the peak per device; None: the memory of the device, less the headroom. A plan states the
            cap that it was found under.
        headroom: fraction of the device's memory that the cap leaves free; 0.0 where the user gave the cap.
        micro_batches: micro-batches per step; None: the search chooses.
        ac: activation checkpointing: none, selective or full, or selective:K or full:K for the first K blocks of each
            list. None: the search chooses.
        pins: layouts that the user fixes, such as "lm_head.weight=S(0)@tp".
        data_axes: mesh axes that split the batch only.
        async_tp: whether communication of activations is assumed to run in pieces, overlapped with the GEMM next to it
            (`planner.pricing.async_tp`). `executor.shard_module` cannot run such a plan.
        reallgather: whether linear layers may all-gather their inputs again in the backward, in place of saving them
            (`planner.pricing.reallgather_variants`).
        fused_ops: whether norms, gated activations, rotary embeddings and the loss run as one op each in place of the
            model's own code, where the fused op does the same (`planner.model_rewrites.fuse_ops`). Linear layers that
            read the same tensor then also accumulate its gradient in their GEMMs.
        fused_projections: whether projections that read one tensor become one linear layer before the model is planned
            and run (`planner.model_rewrites.fuse_projections`). Parameters then have the names of the fused layers.
        zigzag: whether the model reads its tokens in zigzag order (`planner.plan.token_order`), where attention's
            sequences are sharded and the model allows it. All ranks then do equal work under a causal mask.
    """

    batch: int | None = None
    seq: int | None = None
    phase: JobPhase = "training"
    training: bool = True
    optimizer: str = "adamw"
    dtype: str = "bf16"
    master_dtype: str | None = "fp32"
    state_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    expert_imbalance: float = 1.0
    flash_attention: bool | None = None
    attention_kernel: AttentionKernel | None = None
    dropout: Literal["as-configured"] = "as-configured"
    mip_gap: float = 1e-3
    memory_bytes: int | None = None
    headroom: float = 0.0
    micro_batches: int | None = None
    ac: str | None = None
    pins: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()
    async_tp: bool = False
    reallgather: bool = False
    fused_ops: bool = False
    fused_projections: bool = False
    zigzag: bool = False

    @property
    def stored_dtype(self) -> str:
        """The dtype in which trained parameters are stored; frozen ones are stored in ``dtype``."""
        return self.master_dtype or self.dtype

    def __post_init__(self) -> None:
        if self.phase != "training":
            object.__setattr__(self, "training", False)
            object.__setattr__(self, "master_dtype", None)
            self._check_inference()
        for field in ("batch", "seq", "memory_bytes", "micro_batches"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise JobError(f"{field} is {value}.", what_to_do="Give a whole number from 1 up.", field=field)
        for field in ("dtype", "master_dtype", "state_dtype", "reduce_dtype"):
            self._check_choice(field, tuple(BYTES_PER_ELEMENT), none_is_fine=field == "master_dtype")
        self._check_choice("attention_kernel", ATTENTION_KERNELS, none_is_fine=True)
        if self.ac is not None:
            Checkpointing.parse(self.ac)
        if not 0 <= self.mip_gap < 1:
            detail = f"mip_gap is {self.mip_gap}."
            raise JobError(detail, what_to_do="Give a fraction from 0 up to 1, for example 0.001.", field="mip_gap")
        if not 0 <= self.headroom < 1:
            detail = f"headroom is {self.headroom}."
            raise JobError(detail, what_to_do="Give a fraction from 0 up to 1, for example 0.08.", field="headroom")
        if self.expert_imbalance < 1:
            detail = f"expert_imbalance is {self.expert_imbalance}."
            raise JobError(detail, what_to_do="Give a ratio to the mean from 1 up.", field="expert_imbalance")
        self._check_micro_batches()
        if self.optimizer not in OPTIMIZERS:
            near = close_matches(self.optimizer.lower(), OPTIMIZERS)
            hint = f"Did you mean {' or '.join(near)}? " if near else ""
            advice = f"{hint}Choose one of {', '.join(OPTIMIZERS)}."
            raise JobError(f"there is no optimizer {self.optimizer!r}.", what_to_do=advice, field="optimizer")

    def cap_bytes(self, capacity_bytes: int) -> int:
        """Return the cap on the peak bytes of a device that has ``capacity_bytes``."""
        return self.memory_bytes or round(capacity_bytes * (1 - self.headroom))

    @property
    def has_peak_candidates(self) -> bool:
        """Whether live bytes are counted at peak candidates: in training, and in the phases of inference."""
        return self.training or self.phase != "training"

    @property
    def items(self) -> tuple[int, str]:
        """(number, "tokens") that a step reads, or generates in decode; (number, "samples") where ``seq`` is None."""
        batch = self.batch or 0
        if self.seq is None:
            return batch, "samples"
        return (batch if self.phase == "decode" else batch * self.seq), "tokens"

    def _check_inference(self) -> None:
        self._check_choice("phase", PHASES)
        advice = "Leave it out: inference saves nothing for a backward pass."
        if self.micro_batches not in (None, 1):
            detail = f"{self.phase} in {self.micro_batches} micro-batches: a batch is run at once."
            raise JobError(detail, what_to_do=advice, field="micro_batches")
        if self.ac not in (None, "none"):
            detail = f"{self.phase} with activation checkpointing {self.ac!r}."
            raise JobError(detail, what_to_do=advice, field="ac")

    def _check_choice(self, field: str, choices: tuple[str, ...], *, none_is_fine: bool = False) -> None:
        value = getattr(self, field)
        if value not in choices and not (none_is_fine and value is None):
            raise JobError(f"{field} is {value!r}.", what_to_do=f"Choose one of {', '.join(choices)}.", field=field)

    def _check_micro_batches(self) -> None:
        if self.batch is None or self.micro_batches is None or self.batch % self.micro_batches == 0:
            return
        raise JobError(
            f"a batch of {self.batch} does not divide into {self.micro_batches} micro-batches.",
            what_to_do=f"Choose a number of micro-batches that divides {self.batch}.",
            field="micro_batches",
        )


def job_of(spec: JobSpec, *, batch: int | None, flash_attention: bool | None) -> Job:
    """Return the job of ``spec``, as a plan records it.

    Args:
        batch: samples in the global batch, from the spec or the example inputs; None: not known yet.
        flash_attention: whether the device has a fused attention kernel.

    Raises:
        JobError: a value is invalid.
    """
    one_pass = spec.phase != "training"  # inference runs its batch at once, without checkpointing
    of_spec = {*(item.name for item in dataclasses.fields(spec)), *FIELDS.values(), KERNEL_FIELD}
    shared = {item.name for item in dataclasses.fields(Job)} & of_spec
    values = {name: getattr(spec, name) for name in shared}
    values |= {
        "batch": batch,
        "micro_batches": (spec.micro_batches or 1) if one_pass else spec.micro_batches,
        "ac": (spec.ac or "none") if one_pass else spec.ac,
        "pins": tuple(spec.pins),
        "data_axes": tuple(spec.data_axes),
    }
    if spec.memory_gb is not None:
        values |= {"memory_bytes": int(spec.memory_gb * 1e9), "headroom": 0.0}
    return Job(**values, flash_attention=flash_attention)
