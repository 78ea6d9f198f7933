"""The choices of a training framework that the parallel degrees leave open, as one record per concern.

The defaults are those of eager FSDP2 with float32 parameters. ``benchmarks/published/frameworks`` holds the values of
published frameworks, each with its source.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["flash1", "flash2", "flash3", "flash4", "cudnn", "efficient", "unfused", "dense"]
"""``efficient`` is torch's memory-efficient kernel. ``dense`` is an uncompiled FlexAttention: unfused, in float32."""
SavedGemms = Literal["none", "alternate", "all"]

EAGER_LOGIT_NBYTES = 12.0
"""Bytes per logit at the peak of eager torch's cross-entropy: three float32 tensors in its backward (the log-softmax,
its gradient, and the gradient of the logits)."""
EAGER_LOSS_TRAFFIC_NBYTES = 36.0
"""Bytes per logit that the kernels of eager torch's cross-entropy read and write, forward and backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelOptions:
    """The kernels of one layer, and how many of them the host launches.

    Attributes:
        attention: the kernel of scaled dot-product attention.
        fused_ops: whether each chain of element-wise ops is one kernel (torch.compile, Transformer Engine, Apex).
        float32_norm: whether RMSNorm is a chain of float32 kernels (torch before its fused kernel of August 2025).
        separate_linears: whether q, k, v and gate, up are separate GEMMs; else fused QKV and fused gate-up.
        attention_copies: values copied around attention per value of its queries, in each pass: repeated keys and
            values, transposed or unpadded tensors.
        torch_ring_attention: whether context parallelism is torch's own: keys and values are repeated for every query
            head, and the results of the blocks are merged by float32 kernels.
        host_ops_per_layer: kernels that Python launches for one layer's forward; 0 with CUDA graphs.
        expert_host_ops: additional launches of a layer with experts.
    """

    attention: AttentionKernel = "flash2"
    fused_ops: bool = False
    float32_norm: bool = False
    separate_linears: bool = False
    attention_copies: float = 0.0
    torch_ring_attention: bool = False
    host_ops_per_layer: int = 40
    expert_host_ops: int = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class LowPrecisionOptions:
    """How linears run in 8 or 4 bits.

    Attributes:
        cast_nbytes: bytes moved to scale and cast one value of an operand: it is read once or twice (one read finds the
            scale) and written once or twice (one write is of the transpose).
        rescale_nbytes: bytes moved per result value of a backward GEMM to rescale it afterwards.
        layer_share: share of the layers whose linears run in low precision; the others run in 16 bits.
        shares_casts: whether linears that read the same tensor share its cast (a compiler merges equal ops).
        casts_before_gather: whether inputs are cast before tensor parallelism all-gathers them, and gradients likewise
            (torchao's float8 tensor parallelism): half the bytes, and each rank casts its own tokens only.
        casts_shards: whether FSDP casts parameter shards before it all-gathers them.
        saves_cast_inputs: whether GEMMs save their inputs in 8 bits (Transformer Engine).
    """

    cast_nbytes: float = 7.0
    rescale_nbytes: float = 0.0
    layer_share: float = 1.0
    shares_casts: bool = False
    casts_before_gather: bool = False
    casts_shards: bool = False
    saves_cast_inputs: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorParallelOptions:
    """How tensor parallelism communicates.

    Attributes:
        async_tp: whether its all-gathers and reduce-scatters run in pieces, overlapped with their GEMMs.
        copies: whether tensors are copied before or after the collectives, which split the sequence dim (DTensor).
        saves_gathered_inputs: whether the all-gathered inputs of linears are saved for backward; else backward
            all-gathers them again (Megatron).
    """

    async_tp: bool = False
    copies: bool = False
    saves_gathered_inputs: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertOptions:
    """How experts run and exchange tokens.

    Attributes:
        overlaps_all_to_all: whether the all-to-all of one micro-batch overlaps with the compute of another.
        sends_once_per_node: whether a token is sent once to a node that holds several of its experts (DeepEP,
            HybridEP).
        bias_kernels: whether biases of experts are weighted and added by separate float32 kernels (Megatron).
        float32_combine: whether the results of experts are put back in token order as one float32 tensor of all experts
            of each token, which is not split over tensor ranks.
        router_nbytes: bytes that the router saves per value of its input, in addition to the norm's result.
        shards_shared_experts: whether shared experts are sharded over the data axis; else the first rank holds all of
            them (torchtitan before #1561: one expert of a stack that fully_shard splits by experts).
    """

    overlaps_all_to_all: bool = False
    sends_once_per_node: bool = False
    bias_kernels: bool = False
    float32_combine: bool = False
    router_nbytes: int = 0
    shards_shared_experts: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DataParallelOptions:
    """How parameters are all-gathered and gradients reduced over the data axis.

    Attributes:
        overlaps: whether both overlap with compute.
        prefetches_backward: whether backward prefetches the all-gather of the next layer (FSDP1's BACKWARD_PRE,
            FSDP2); else the all-gather starts when the layer before is done.
        reduces_each_micro_batch: whether gradients are reduced after every micro-batch; else once a step.
        defers_reduction: whether a sharded model reduces gradients with the last micro-batch only, although it
            all-gathers parameters in every micro-batch.
        reduce_nbytes: bytes of one gradient value on the wire.
        reshard_after_forward: whether all-gathered parameters are freed after forward.
        root_holds_ends: whether embedding and head are in the FSDP group of the root, which stays all-gathered until
            backward ends; else each is a group of its own, and the embedding is freed after use.
        collectives_per_layer: all-gathers of one layer's parameters, and reductions of its gradients.
        max_reuse_numel: number of parameters above which a layer's parameters are freed between its recomputation and
            its backward (DeepSpeed's ``stage3_max_reuse_distance``).
        saves_cast_shards: whether parameter shards, cast to the compute dtype, are saved from forward to backward.
    """

    overlaps: bool = True
    prefetches_backward: bool = True
    reduces_each_micro_batch: bool = False
    defers_reduction: bool = False
    reduce_nbytes: int = 4
    reshard_after_forward: bool = True
    root_holds_ends: bool = True
    collectives_per_layer: int = 1
    max_reuse_numel: float = math.inf
    saves_cast_shards: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StateOptions:
    """The bytes of parameters, gradients and optimizer states, and the optimizer's step.

    Attributes:
        parameter_nbytes: bytes of one stored parameter.
        gradient_nbytes: bytes of one accumulated gradient value; 0 where the gradient has the parameter's dtype and
            exists in backward only.
        gradients_persist: whether gradients have a permanent buffer (Megatron); else none exist between steps.
        master_nbytes: bytes of a parameter's float32 copy; 0 where there is none.
        optimizer_nbytes: bytes of the optimizer's states per parameter.
        optimizer_passes: how often the optimizer reads and writes its states; 1 for a fused optimizer.
        optimizer_on_host: whether states and step are in host memory.
    """

    parameter_nbytes: int = 4
    gradient_nbytes: int = 4
    gradients_persist: bool = False
    master_nbytes: int = 0
    optimizer_nbytes: float = 8.0
    optimizer_passes: float = 1.0
    optimizer_on_host: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The memory and the traffic of the vocabulary projection and the loss.

    Attributes:
        logit_nbytes: bytes per logit at the loss's peak.
        logit_hole_nbytes: bytes per logit of free blocks that the peak cannot use: in eager torch the freed blocks of
            the 16-bit logits, which are too small for a float32 tensor.
        input_nbytes: bytes per value of the projection's input: of the input itself, all-gathered, and of its gradient.
        traffic_nbytes: bytes read and written per logit, forward and backward.
        chunks: pieces that the logits are computed in, one live at a time.
        vocabulary_parallel: whether tensor-parallel logits stay split over the vocabulary.
    """

    logit_nbytes: float = EAGER_LOGIT_NBYTES
    logit_hole_nbytes: float = 0.0
    input_nbytes: float = 4.0
    traffic_nbytes: float = EAGER_LOSS_TRAFFIC_NBYTES
    chunks: int = 1
    vocabulary_parallel: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class SavingOptions:
    """What is saved for backward, without and with activation checkpointing.

    Attributes:
        norm_nbytes: bytes that a norm saves per value in addition to its input.
        recomputes_elementwise: whether backward recomputes norms and the gate's activation (torch.compile).
        frees_in_backward: whether backward frees saved tensors as it goes; else the caller's list of arguments holds
            all of them until backward returns (a graph of aot_autograd whose callable takes no boxed arguments).
        selective_gemms: the GEMMs whose results selective checkpointing saves: none, every other one, or all.
        selective_cast_gemms: the same for GEMMs in 8 or 4 bits.
        selective_unread: whether selective checkpointing also saves results that backward never reads (eager torch; a
            compiler drops them).
        selective_attention: whether selective checkpointing saves the result of attention; else it is recomputed.
        selective_all_to_all: whether selective checkpointing saves the results of the experts' all-to-alls.
        selective_weight_nbytes: bytes that selective checkpointing saves per parameter of a layer's linears (a defect
            of torchtitan before #820: absolute values of all-gathered weights).
        full_attention: whether full checkpointing saves the result of attention.
    """

    norm_nbytes: int = 0
    recomputes_elementwise: bool = False
    frees_in_backward: bool = True
    selective_gemms: SavedGemms = "alternate"
    selective_cast_gemms: SavedGemms = "alternate"
    selective_unread: bool = True
    selective_attention: bool = True
    selective_all_to_all: bool = False
    selective_weight_nbytes: float = 0.0
    full_attention: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorOptions:
    """The streams and the settings of torch's caching allocator.

    Attributes:
        gather_stream: whether parameters are all-gathered into buffers of another stream and copied out (FSDP2).
        reduce_stream: whether reduced gradients are in buffers of another stream, which stay reserved for that stream
            when gradients are freed (FSDP2).
        gradient_holes: whether freed gradients leave free blocks between the optimizer's states, which were allocated
            while the first gradients were live. So where neither another stream nor a CUDA graph has its own pool.
        expandable_segments: whether the allocator maps pages on demand, so that no segment stays split.
    """

    gather_stream: bool = False
    reduce_stream: bool = False
    gradient_holes: bool = False
    expandable_segments: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The buffers of pipeline parallelism.

    Attributes:
        retains_outputs: whether the last rank retains its output of each micro-batch until the step ends (torch's
            pipelining, unless its caller passes return_outputs=False).
        preallocates_receives: whether receive buffers of all micro-batches exist during the whole step (torch's
            pipelining).
    """

    retains_outputs: bool = False
    preallocates_receives: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """All choices of a framework. ``lora``: whether only LoRA adapters are trained."""

    kernels: KernelOptions = KernelOptions()
    low_precision: LowPrecisionOptions = LowPrecisionOptions()
    tensor_parallel: TensorParallelOptions = TensorParallelOptions()
    experts: ExpertOptions = ExpertOptions()
    data_parallel: DataParallelOptions = DataParallelOptions()
    state: StateOptions = StateOptions()
    loss: LossOptions = LossOptions()
    saving: SavingOptions = SavingOptions()
    allocator: AllocatorOptions = AllocatorOptions()
    pipeline: PipelineOptions = PipelineOptions()
    lora: bool = False
