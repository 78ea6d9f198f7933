"""How one training step is spread over ranks and time, and what a framework adds: values only, nothing is priced."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Checkpointing = Literal["none", "selective", "attention", "full"]
Schedule = Literal["1f1b", "gpipe", "interleaved", "zero-bubble"]
AttentionKernel = Literal["flash1", "flash2", "flash3", "flash4", "cudnn", "efficient", "unfused", "dense"]
TrainingDtype = Literal["bf16", "fp16", "fp32", "fp8", "fp4"]
KeptProducts = Literal["none", "alternate", "all"]


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """What a framework decides beside the parallel degrees.

    Attributes:
        attention: the kernel that computes attention; ``dense`` is FlexAttention that nobody compiled: unfused, in
            float32.
        fused: whether element-wise chains run as one kernel each (torch.compile, Transformer Engine, Apex).
        float32_norm: whether RMSNorm is a chain of kernels in float32 (torch before its fused one of August 2025).
        separate_linears: whether queries, keys and values, and gate and up, are products of their own.
        attention_copies: values copied around attention for each value of its queries, each way: repeated keys and
            values, transposed or unpadded tensors.
        host_ops_per_layer: kernels that Python launches for one layer's forward; 0 with CUDA graphs, which hide it.
        expert_host_ops: the same for a mixture of experts, on top.
        cast_nbytes: bytes moved to scale and cast one operand's value to 8 bits: read (twice where the scale is found
            first), written (twice where its transpose is, too).
        shares_casts: whether linears that read the same tensor share its cast to 8 bits (a compiler merges equal ops).
        gathers_cast: whether inputs are cast to 8 bits before tensor parallelism gathers them, and gradients likewise
            (torchao's float8 tensor parallelism): half the bytes, and a rank casts its own tokens alone.
        shards_cast: whether parameters are cast to 8 bits before they are gathered.
        rescale_nbytes: bytes moved per value of backward's results to scale them after their product.
        tensor_overlap: whether tensor-parallel gathers and reductions run in pieces beside their matrix products.
        tensor_copies: whether tensors are copied around tensor-parallel collectives, as they cut the sequence dim
            (DTensor).
        backward_gather_hidden: whether parameters are gathered for backward before they are needed (FSDP1's
            BACKWARD_PRE, FSDP2); else after the layer before is done.
        context_merges: whether context parallelism is torch's own: every head has keys and values of its own, and what
            a block of them gives is added up kernel by kernel in float32.
        data_overlap: whether gathers of parameters and reductions of gradients run beside compute.
        expert_bias_kernels: whether biases of experts are weighed and added kernel by kernel in float32 (Megatron).
        expert_overlap: whether the all-to-all of one micro-batch runs beside another's compute.
        expert_once: whether a token is sent once to a node that holds several of its experts (DeepEP, HybridEP).
        reduce_each_micro_batch: whether gradients are reduced after every micro-batch, else once a step.
        defers_reduce: whether a sharded model's gradients are reduced with the last micro-batch alone, though its
            parameters are gathered for each.
        reduce_nbytes, gradient_nbytes, parameter_nbytes: bytes of one value of a gradient on the wire, of the
            accumulated gradient (0 where it shares the parameter's dtype and lives only in backward), of the stored
            parameter.
        master_nbytes: bytes of a float32 copy kept beside the parameter; 0 where the parameter is float32 or none is.
        state_nbytes: bytes of the optimizer's states per parameter.
        optimizer_passes: how often an unfused optimizer reads and writes what it keeps; 1 where it is fused.
        optimizer_on_host: whether states and step are in host memory.
        loss_nbytes: bytes of memory that the loss holds per logit at its peak: in eager torch three float32 tensors in
            backward (log-softmax, its gradient, that of the logits).
        loss_hole_nbytes: bytes per logit of blocks that are free at that peak and that it cannot use: in eager torch
            those of the 16-bit logits, which no float32 tensor fits in.
        loss_hidden_nbytes: bytes that the loss holds per value of the projection's input: that, gathered, and its
            gradient.
        loss_traffic_nbytes: bytes that the loss reads and writes per logit, forward and backward.
        loss_chunks: into how many pieces the logits are cut, one alive at a time.
        loss_parallel: whether tensor-parallel logits stay split over the vocabulary in the loss.
        norm_saved_nbytes: bytes that a norm keeps per value beside its input.
        recomputes_cheap: whether results of norms and of the gate's activation are computed again (torch.compile).
        keeps_gathered: whether what tensor parallelism gathered is kept, else gathered again (Megatron).
        kept_products: of which products selective checkpointing keeps the results: none, every other, or all.
        keeps_unread: whether it keeps results that backward never reads, too (eager; a compiler drops them).
        cast_share: share of the layers whose linears run in the low precision, the last ones do not.
        cast_kept_products: of which products in low precision selective checkpointing keeps the results.
        keeps_attention: whether selective checkpointing keeps what attention returns, else it runs again.
        keeps_exchanged: whether selective checkpointing keeps what all-to-alls between experts return.
        kept_weight_nbytes: bytes per parameter of a layer's linears that it keeps (a defect of torchtitan's before
            #820: absolute values of gathered weights).
        saves_cast: whether 8-bit products keep their inputs in 8 bits (Transformer Engine).
        gradients_persist: whether gradients have a buffer of their own (Megatron), else none between steps.
        reshards: whether gathered parameters are dropped after forward.
        gather_stream: whether parameters are gathered into buffers of another stream and copied out (FSDP2).
        gradient_holes: whether gradients leave free blocks between the optimizer's states, which were allocated while
            the first gradients were there: in one pool, without a CUDA graph's own.
        reduce_stream: whether reduced gradients are in buffers of another stream, which keeps them when gradients are
            dropped (FSDP2).
        root_holds_ends: whether embedding and head are gathered together and held until backward ends, as the root of
            fully_shard holds what no other module has; else each by itself, the embedding dropped after use.
        expandable_segments: whether the allocator maps pages as it needs them, so that no segment is split for good.
        gather_pieces: collectives in which one layer's parameters are gathered, and its gradients reduced.
        shards_shared_experts: whether shared experts are split over the data axis; else the first rank holds all of
            them (torchtitan's were one expert of a stack that fully_shard splits by experts, until #1561).
        keeps_outputs: whether a pipeline's last rank keeps what it returned for each micro-batch until the step ends
            (torch's pipelining, but where its caller declines with return_outputs=False).
        receives_ahead: whether buffers to receive in are there for all micro-batches during the whole step (torch's
            pipelining).
        full_keeps_attention: whether full checkpointing keeps what attention returns.
        releases_saved: whether backward drops what forward kept as it goes; else the caller's list of arguments holds
            all of it until backward returns (a graph of aot_autograd whose callable takes no boxed arguments).
        keeps_cast_shards: whether shards of parameters, cast to the compute dtype, are kept from forward to backward.
        unsorts_whole: whether experts' results are put back in float32 into a tensor of all of a token's experts, which
            is not split over tensor ranks.
        router_nbytes: bytes that the router keeps per value of its input, beside the norm's result.
        reuse_numel: parameters of a layer above which they are dropped between its recomputation and its backward
            (DeepSpeed's ``stage3_max_reuse_distance``).
        lora: whether only small adapters are trained.
    """

    attention: AttentionKernel = "flash2"
    fused: bool = False
    float32_norm: bool = False
    separate_linears: bool = False
    attention_copies: float = 0.0
    host_ops_per_layer: int = 40
    expert_host_ops: int = 60
    cast_nbytes: float = 7.0
    shares_casts: bool = False
    gathers_cast: bool = False
    shards_cast: bool = False
    rescale_nbytes: float = 0.0
    tensor_overlap: bool = False
    tensor_copies: bool = False
    context_merges: bool = False
    data_overlap: bool = True
    backward_gather_hidden: bool = True
    expert_bias_kernels: bool = False
    expert_overlap: bool = False
    expert_once: bool = False
    reduce_each_micro_batch: bool = False
    defers_reduce: bool = False
    reduce_nbytes: int = 4
    gradient_nbytes: int = 4
    parameter_nbytes: int = 4
    master_nbytes: int = 0
    state_nbytes: float = 8.0
    optimizer_passes: float = 1.0
    optimizer_on_host: bool = False
    loss_nbytes: float = 12.0
    loss_hole_nbytes: float = 0.0
    loss_hidden_nbytes: float = 4.0
    loss_traffic_nbytes: float = 36.0
    loss_chunks: int = 1
    loss_parallel: bool = True
    norm_saved_nbytes: int = 0
    recomputes_cheap: bool = False
    keeps_gathered: bool = True
    kept_products: KeptProducts = "alternate"
    keeps_unread: bool = True
    cast_share: float = 1.0
    cast_kept_products: KeptProducts = "alternate"
    keeps_attention: bool = True
    keeps_exchanged: bool = False
    kept_weight_nbytes: float = 0.0
    saves_cast: bool = False
    gradients_persist: bool = False
    reshards: bool = True
    gather_stream: bool = False
    gradient_holes: bool = False
    reduce_stream: bool = False
    root_holds_ends: bool = True
    expandable_segments: bool = False
    shards_shared_experts: bool = True
    keeps_outputs: bool = False
    receives_ahead: bool = False
    full_keeps_attention: bool = False
    releases_saved: bool = True
    keeps_cast_shards: bool = False
    unsorts_whole: bool = False
    router_nbytes: int = 0
    gather_pieces: int = 1
    reuse_numel: float = math.inf
    lora: bool = False


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """One configuration: degrees, batches, recomputation, precision, and the framework's part.

    Ranks are numbered with tensor parallelism innermost, then context, data (sharded, then replicated), and pipeline
    outermost, as Megatron and torchtitan do. Experts are spread over context and data ranks.

    Attributes:
        replicate, shard: data-parallel ranks that hold the same, and that share, parameters.
        zero: 0 replicated states, 1 states sharded, 2 gradients too, 3 parameters too (FSDP).
        sequence_parallel: whether activations between tensor-parallel blocks are split over the sequence.
        expert, expert_tensor: ranks over which experts are spread, and over which each is cut.
        virtual_stages: model chunks per pipeline rank.
        micro_batch: sequences per data-parallel rank and micro-batch.
        micro_batches: of them per step.
        document: tokens of the documents that are packed into a sequence and do not attend to each other; 0 for one.
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
    implementation: Implementation = Implementation()

    def __post_init__(self) -> None:
        batches = (self.micro_batch, self.micro_batches, self.seq, self.virtual_stages)
        degrees = (self.replicate, self.shard, self.tensor, self.pipeline, self.context)
        if min(*batches, *degrees, self.expert, self.expert_tensor) < 1:
            raise ValueError(f"{self} has a degree or a batch below 1")
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
