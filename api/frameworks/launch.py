"""`Launch`: a parallel configuration in shardplan's terms, and `Framework`: how one framework says it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cost_model.configuration.divisibility import Stages
from cost_model.configuration.implementation import Implementation
from cost_model.configuration.parallelism import Checkpointing, ParallelSpec, Schedule, TrainingDtype
from planner.errors import JobError
from planner.plan.job_spec import JobPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A configuration that a framework is launched with.

    Attributes:
        replicate, shard: data-parallel ranks that hold the same parameters, and that shard states by ``zero``.
        zero: 0 replicated states, 1 states sharded, 2 gradients too, 3 parameters too (FSDP).
        sequence_parallel: whether activations between tensor-parallel blocks are split over the sequence.
        virtual_stages: model chunks per pipeline rank.
        expert, expert_tensor: ranks that experts are spread over, and ranks that split each expert.
        micro_batch: sequences per data-parallel rank and micro-batch.
        batch: sequences of the global batch, of all data-parallel ranks and micro-batches; None: one micro-batch.
        seq: tokens of a sequence; None: not said.
        optimizer: as in `planner.plan.job_spec.JobSpec`.
        compiled: whether torch.compile, or kernels of the framework's own, fuse element-wise ops.
        reshard_after_forward: with ``zero`` 3, whether parameters are gathered again in backward.
        offload: whether optimizer states or parameters are held on the host; that is not priced.
        gpu_memory_share: of a server of models, the share of a device's memory that it may use.
        tp_plan: FQN pattern of modules -> style, as in transformers; None: the model's own.
    """

    phase: JobPhase = "training"
    replicate: int = 1
    shard: int = 1
    zero: int = 0
    tensor: int = 1
    sequence_parallel: bool = False
    pipeline: int = 1
    virtual_stages: int = 1
    schedule: Schedule = "1f1b"
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batch: int = 1
    batch: int | None = None
    seq: int | None = None
    checkpointing: Checkpointing = "none"
    dtype: TrainingDtype = "bf16"
    optimizer: str = "adamw"
    compiled: bool = False
    reshard_after_forward: bool = True
    offload: bool = False
    gpu_memory_share: float | None = None
    tp_plan: Mapping[str, str] | None = field(default=None, hash=False)

    @property
    def data(self) -> int:
        """Data-parallel ranks."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro_batch if self.batch is None else self.batch

    def parallel(self, seq: int, implementation: Implementation) -> ParallelSpec:
        """Return the configuration as the cost model has it; a batch that does not divide is rounded up.

        Raises:
            ValueError: a degree or a batch is below 1.
        """
        together = max(1, self.data * self.micro_batch)
        return ParallelSpec(
            micro_batch=self.micro_batch,
            micro_batches=max(1, -(-self.global_batch // together)),
            seq=seq,
            replicate=self.replicate,
            shard=self.shard,
            zero=self.zero,
            tensor=self.tensor,
            sequence_parallel=self.sequence_parallel and self.tensor > 1,
            pipeline=self.pipeline,
            virtual_stages=self.virtual_stages,
            schedule="interleaved" if self.virtual_stages > 1 and self.schedule == "1f1b" else self.schedule,
            context=self.context,
            expert=self.expert,
            expert_tensor=self.expert_tensor,
            checkpointing=self.checkpointing,
            dtype=self.dtype,
            implementation=implementation,
        )


FIELDS = tuple(item.name for item in dataclasses.fields(Launch))
"""Names of the fields of `Launch`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A configuration as it was read.

    Attributes:
        launch: what it says. At a fault: degrees as they are said, on at least one data-parallel rank; else the nearest
            legal value.
        faults: what the framework would refuse, or what contradicts itself, as clauses that name the framework's own
            keys and give legal values: "--expert-model-parallel-size 3 does not divide 8 experts (1, 2, 4 or 8 would
            do)". Those that need the model or the batch are found by `check`.
        unpriced: keys that are known to the framework, and that change time or memory in ways that are not priced.
        sizes: field of `TransformerSpec` ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab") -> what the
            configuration says of the model, and the key that says it.
        stages: how layers may split into pipeline stages, where the configuration says it; None: as the framework does.
        ulysses: how the configuration says the degree of Ulysses, which is context parallelism that splits heads inside
            attention; "": there is none.
        assumed: what the configuration lacks, and what was taken, such as "training.seq_len 2048: the default".
        version: of the framework that the file names; None: it names none.
        styles: FQN pattern of modules, from the model or from any module in it -> style of tensor parallelism.
    """

    launch: Launch
    faults: tuple[str, ...] = ()
    unpriced: tuple[str, ...] = ()
    sizes: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    stages: Stages | None = None
    ulysses: str = ""
    assumed: tuple[str, ...] = ()
    version: str | None = None
    styles: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """One framework: how its configurations are read and written, and what they can say.

    Attributes:
        name: on the command line.
        title: as people write it.
        version: the release that `read` and `write` are for.
        file: name of the exported file.
        recognises: text -> whether it looks like a configuration of this framework.
        read: (text, devices) -> `Reading`. Degrees that the framework derives from the number of devices are derived.
        write: (launch, model name) -> text of the file, which names the version; a `JobError` where it cannot say it.
        says: field of `Launch` -> launch -> how the framework says the field's value, in flags or lines, such as
            ``("--tensor-model-parallel-size 8",)``. Fields that are missing cannot be said.
        limits: field of `Launch` -> the values that can be said; a field that is missing can have any.
        implementation: (launch, architecture of the device, such as "sm90") -> what the price depends on beside the
            degrees.
        key_value_heads: whether tensor parallelism has to divide the key-value heads, or copies them ("copied").
        vocabulary: whether tensor parallelism has to divide the vocabulary, or pads it ("padded"; "padded to 64": to a
            multiple of 64, which it has to divide), or splits it unevenly ("uneven").
        stages: how layers may split into pipeline stages.
        experts_need_sequence_parallel: whether tensor parallelism of a model with experts needs sequence parallelism.
        planners: baselines (`planner.run.baselines.LAUNCHED`) whose layouts a configuration can say in full.
    """

    name: str
    title: str
    version: str
    file: str
    recognises: Callable[[str], bool]
    read: Callable[[str, int], Reading]
    write: Callable[[Launch, str], str]
    says: Mapping[str, Callable[[Launch], tuple[str, ...]]]
    implementation: Callable[[Launch, str], Implementation]
    key_value_heads: str = "divided"
    vocabulary: str = "padded"
    stages: Stages = "even"
    experts_need_sequence_parallel: bool = False
    planners: tuple[str, ...] = ()
    limits: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def can_say(self, launch: Launch, name: str) -> bool:
        """Return whether the framework can say the value of a field."""
        return name in self.says and getattr(launch, name) in self.limits.get(name, (getattr(launch, name),))

    def can_write(self, launch: Launch, model: str = "model") -> bool:
        """Return whether a configuration can say all of ``launch``."""
        return not self.refusal(launch, model)

    def refusal(self, launch: Launch, model: str = "model") -> str:
        """Return why no configuration can say all of ``launch``; "" where one can."""
        try:
            self.write(launch, model)
        except JobError as error:
            return error.detail
        return ""

    def changes(self, before: Launch, after: Launch) -> tuple[str, ...]:
        """Return what the framework says of ``after`` and not of ``before``, with what follows from a change.

        Raises:
            KeyError: a field that differs cannot be said.
        """
        for name in FIELDS:
            if getattr(before, name) != getattr(after, name) and name not in self.says:
                raise KeyError(name)
        known = {text for say in self.says.values() for text in say(before)}
        return tuple(dict.fromkeys(text for say in self.says.values() for text in say(after) if text not in known))


def flag(text: str, name: str) -> Callable[[Launch], tuple[str, ...]]:
    """Return how a framework says a field by one flag or line: ``text`` with ``{}`` for the field's value."""

    def say(launch: Launch) -> tuple[str, ...]:
        value: Any = getattr(launch, name)
        return (text.format(str(value).lower() if isinstance(value, bool) else value),)

    return say
