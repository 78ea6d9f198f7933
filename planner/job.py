"""The job: what is run, and under which assumptions it is priced. Plain values, no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cost_model.memory import OPTIMIZERS
from planner.errors import JobError

CheckpointingMode = Literal["full", "selective"]
"""How a block is recomputed in the backward pass; a block that is not recomputed has no mode."""

CHECKPOINTING_CHOICES = ("none", "selective", "full")
BYTES_PER_ELEMENT = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes of one element, by the dtype names that a job knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One training step (or inference call) of a model, with the assumptions that its price depends on.

    Attributes:
        batch: samples in the global batch of one step; None takes the example inputs' first dim.
        seq: tokens in a sequence (both lengths for an encoder-decoder); None where it has no meaning.
        training: False prices the forward pass alone, without gradients and optimizer state.
        optimizer: a name in ``cost_model.memory.OPTIMIZERS``.
        dtype: of parameters and activations.
        master_dtype: of the optimizer's own copy of the parameters; None keeps no copy.
        state_dtype: of the optimizer's states.
        reduce_dtype: in which gradients are reduced.
        flash_attention: None: where the device has it.
        dropout: always as the model's config says; here so that a plan states it.
        mip_gap: relative gap at which the solver may stop.
        memory_bytes: cap on the peak per device; None takes the device's own memory.
        micro_batches: per step; None lets the search choose.
        ac: activation checkpointing of all blocks: none, selective or full; None lets the search choose.
        pins: layouts that were decided beforehand, such as "lm_head.weight=S(0)@tp".
        data_axes: mesh axes that split the batch alone.
    """

    batch: int | None = None
    seq: int | None = None
    training: bool = True
    optimizer: str = "adamw"
    dtype: str = "bf16"
    master_dtype: str | None = "fp32"
    state_dtype: str = "fp32"
    reduce_dtype: str = "fp32"
    flash_attention: bool | None = None
    dropout: Literal["as-configured"] = "as-configured"
    mip_gap: float = 1e-3
    memory_bytes: int | None = None
    micro_batches: int | None = None
    ac: Literal["none", "selective", "full"] | None = None
    pins: tuple[str, ...] = ()
    data_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in ("batch", "seq", "memory_bytes", "micro_batches"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise JobError(f"{field} is {value}.", what_to_do="Give a whole number from 1 up.", field=field)
        for field in ("dtype", "master_dtype", "state_dtype", "reduce_dtype"):
            self._check_choice(field, tuple(BYTES_PER_ELEMENT), none_is_fine=field == "master_dtype")
        self._check_choice("ac", CHECKPOINTING_CHOICES, none_is_fine=True)
        if not 0 <= self.mip_gap < 1:
            detail = f"mip_gap is {self.mip_gap}."
            raise JobError(detail, what_to_do="Give a fraction from 0 up to 1, for example 0.001.", field="mip_gap")
        self._check_micro_batches()
        if self.optimizer not in OPTIMIZERS:
            advice = f"Choose one of {', '.join(OPTIMIZERS)}."
            raise JobError(f"optimizer is {self.optimizer!r}.", what_to_do=advice, field="optimizer")

    def _check_choice(self, field: str, choices: tuple[str, ...], *, none_is_fine: bool) -> None:
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
