"""The arguments of training scripts on transformers' Trainer that complete a parallel configuration.

They are ``TrainingArguments``, and ``max_length`` of TRL. Files of accelerate and DeepSpeed have no place for them:
written files carry them as a comment or a key that the framework ignores, and read files may.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from api.frameworks.configurations.documents import Section, shown
from api.frameworks.launch import Launch
from cost_model.configuration.parallelism import Checkpointing

MICRO_BATCH = "per_device_train_batch_size"
STEPS = "gradient_accumulation_steps"
CHECKPOINTING = "activation_checkpointing"
OLD_CHECKPOINTING = "gradient_checkpointing"
"""The name of `CHECKPOINTING` before transformers 5.24, which is still taken."""
CHECKPOINTING_MODES: tuple[Checkpointing, ...] = ("none", "full")
LENGTHS = ("max_length", "max_seq_length", "model_max_length")

OPTIMIZERS = {
    "adamw_torch_fused": "adamw",
    "adamw_torch": "adamw",
    "adamw_anyprecision": "adamw",
    "adamw_torch_8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit-bnb",
    "adamw_8bit": "adamw-8bit-bnb",
    "adafactor": "adafactor",
    "adagrad": "adagrad",
    "sgd": "sgd",
}
"""``optim`` -> optimizer of a job. For writing, the first name of each holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """What the arguments of a script say; ``batch`` is None where no number of accumulation steps is given."""

    micro_batch: int
    batch: int | None
    seq: int | None
    checkpointing: Checkpointing
    optimizer: str


def read_script(section: Section, data: int, *, usual: int, why: str, steps: int | None = None) -> Script:
    """Return what the arguments in ``section`` say for a number of data-parallel ranks.

    Args:
        section: the arguments by their names.
        data: data-parallel ranks.
        usual: sequences of a micro-batch where none are given.
        why: why that is assumed.
        steps: micro-batches where none are given; None: one, and no batch is said.
    """
    if MICRO_BATCH not in section:
        section.notes.assumed.append(f"{MICRO_BATCH} {usual}: {why}")
    micro_batch = section.number(MICRO_BATCH, usual)
    if STEPS in section:
        steps = section.number(STEPS, 1)
    lengths = [section.number(name, 1) for name in LENGTHS if name in section]
    checkpointing = CHECKPOINTING if CHECKPOINTING in section else OLD_CHECKPOINTING
    optimizer = "adamw"
    if "optim" in section:
        written = str(section.values["optim"])
        if written not in OPTIMIZERS:
            section.notes.unpriced.append(f"{section.name('optim')} {written}: its states are priced as those of AdamW")
        optimizer = OPTIMIZERS.get(written, "adamw")
    return Script(
        micro_batch=micro_batch,
        batch=None if steps is None else micro_batch * steps * data,
        seq=lengths[0] if lengths else None,
        checkpointing="full" if section.switch(checkpointing, False) else "none",
        optimizer=optimizer,
    )


def script_arguments(launch: Launch, *names: str) -> dict[str, int | bool | str]:
    """Return the arguments of the script by name; with ``names``, those of them only."""
    values: dict[str, int | bool | str] = {MICRO_BATCH: launch.micro_batch}
    if launch.batch is not None:
        values[STEPS] = accumulation_steps(launch)
    if launch.checkpointing == "full":
        values[CHECKPOINTING] = True
    if launch.seq is not None:
        values[LENGTHS[0]] = launch.seq
    if launch.optimizer != "adamw" and "optim" in (names or ("optim",)):
        values["optim"] = optimizer_name(launch.optimizer)
    return {name: value for name, value in values.items() if not names or name in names}


def accumulation_steps(launch: Launch) -> int:
    """Return the micro-batches of a step."""
    return max(1, launch.global_batch // (launch.micro_batch * launch.data))


def optimizer_name(optimizer: str) -> str:
    """Return ``optim`` of a job's optimizer."""
    return next(name for name, own in OPTIMIZERS.items() if own == optimizer)


def script_reasons(launch: Launch) -> list[str]:
    """Return why the arguments of a script cannot say a launch, as clauses."""
    together = launch.micro_batch * launch.data
    checks = {
        f"a batch of {launch.batch}, no multiple of {together}": launch.global_batch % together > 0,
        f"{launch.checkpointing} checkpointing": launch.checkpointing not in CHECKPOINTING_MODES,
    }
    return [reason for reason, holds in checks.items() if holds]


def _says_optimizer(launch: Launch) -> tuple[str, ...]:
    return (f"optim: {optimizer_name(launch.optimizer)}",) if launch.optimizer in OPTIMIZERS.values() else ()


SCRIPT_SAYS: Mapping[str, Callable[[Launch], tuple[str, ...]]] = {
    "micro_batch": lambda launch: (f"{MICRO_BATCH}: {launch.micro_batch}",),
    "batch": lambda launch: (f"{STEPS}: {accumulation_steps(launch)}",),
    "checkpointing": lambda launch: (f"{CHECKPOINTING}: {shown(launch.checkpointing == 'full')}",),
    "seq": lambda launch: () if launch.seq is None else (f"{LENGTHS[0]}: {launch.seq}",),
    "optimizer": _says_optimizer,
}
"""Field of `Launch` -> how the arguments of a script say it."""
