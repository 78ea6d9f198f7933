"""One parallel configuration of a training step: degrees, batches, checkpointing and precision. It prices nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cost_model.configuration.implementation import Implementation

Checkpointing = Literal["none", "selective", "attention", "full"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
TrainingDtype = Literal["bf16", "fp16", "fp32", "fp8", "fp4"]


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """One parallel configuration, and the framework's choices.

    Ranks are numbered with tensor parallelism innermost, then context, data (sharded, then replicated), and pipeline
    outermost, as in Megatron and torchtitan. Experts are spread over context and data ranks.

    Attributes:
        micro_batch: sequences per data-parallel rank and micro-batch.
        micro_batches: micro-batches per step.
        seq: tokens of a sequence.
        document: tokens of each document packed into a sequence; documents do not attend to each other. 0: a sequence
            is one document.
        replicate, shard: data-parallel ranks that hold the same parameters, and that shard them.
        zero: 0 replicated states, 1 states sharded, 2 gradients too, 3 parameters too (FSDP).
        sequence_parallel: whether activations between tensor-parallel blocks are split over the sequence.
        virtual_stages: model chunks per pipeline rank.
        tensor, pipeline, context: degrees of tensor, pipeline and context parallelism.
        expert, expert_tensor: ranks that experts are spread over, and ranks that split each expert.
    """

    micro_batch: int
    micro_batches: int = 1
    seq: int
    document: int = 0
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
    checkpointing: Checkpointing = "none"
    dtype: TrainingDtype = "bf16"
    implementation: Implementation = field(default_factory=Implementation)

    def __post_init__(self) -> None:
        batches = (self.micro_batch, self.micro_batches, self.seq, self.virtual_stages)
        degrees = (self.replicate, self.shard, self.tensor, self.pipeline, self.context)
        if min(*batches, *degrees, self.expert, self.expert_tensor) < 1:
            raise ValueError(f"{self} has a degree or a batch below 1; all are 1 or more")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"zero is {self.zero}; it is 0, 1, 2 or 3")

    @property
    def data(self) -> int:
        """Data-parallel ranks: replicas times shards."""
        return self.replicate * self.shard

    @property
    def ranks(self) -> int:
        """All ranks."""
        return self.data * self.context * self.tensor * self.pipeline

    @property
    def global_batch(self) -> int:
        """Sequences per step."""
        return self.micro_batch * self.micro_batches * self.data

    @property
    def tokens(self) -> int:
        """Tokens of one micro-batch on one rank, after context parallelism."""
        return max(1, self.micro_batch * self.seq // self.context)

    @property
    def sequence_shards(self) -> int:
        """Pieces of the sequence between tensor-parallel blocks."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def parameter_shards(self) -> int:
        """Ranks that shard the parameters of an FSDP group: data shards times context ranks."""
        return self.shard * self.context

    @property
    def fully_sharded(self) -> bool:
        """Whether parameters are sharded over more than one rank and all-gathered before use."""
        return self.zero == 3 and self.parameter_shards > 1

    @property
    def low_precision(self) -> bool:
        """Whether linears run in 8 or 4 bits."""
        return self.dtype in ("fp8", "fp4")
