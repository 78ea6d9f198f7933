"""Bytes on one device over a training step, by role, and their peak: allocated, reserved, and shown by the device.

Memory is computed in four phases of a step, one of which is the peak: the loss (all activations and the logits are
live), backward of the last layer (all-gathered weights, recomputed activations, first gradients), backward of the first
layer (all gradients), and the optimizer's step. In a pipeline, the first and the last rank are computed; the larger
peak counts.

Known error (2026-11, benchmarks/accuracy.py, sources that no constant was fitted to): mean 3 %, median 2 %, at worst
12 % too low. Layers are assumed to be spread evenly over a pipeline. Fixed buffers of DeepSpeed are not counted (half
of the memory of an 8B model on 8 devices at 8,192 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.activations import layer_bytes
from cost_model.configuration.allocator import FullBytes, fragmentation_bytes, stream_pool_bytes
from cost_model.configuration.implementation import StateOptions
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import micro_batches_in_flight
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.optimizer_memory import CONTEXT_BYTES
from cost_model.kernels.step_constants import StepConstants, shipped_constants

ROLES = ("parameters", "gradients", "optimizer_state", "activations", "logits", "gathered", "workspace")

NCCL_COMMUNICATOR_BYTES = 250_000_000
"""Bytes of the buffers of one communicator. Assumed; see ``optimizer_memory.NCCL_BYTES``."""


@dataclass(frozen=True, kw_only=True)
class MemoryPhase:
    """Bytes by role in one phase of a step.

    Attributes:
        gathered: all-gathered parameters.
        workspace: buffers of gradient reduction, of the vocabulary projection, or of the optimizer.
        holes: free blocks that are too small for the allocations of this phase; they belong to no role.
    """

    name: str
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer_state: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    workspace: float = 0.0
    holes: float = 0.0

    @property
    def allocated(self) -> float:
        """Bytes of all roles."""
        return float(sum(getattr(self, role) for role in ROLES))


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The phases of a step on one pipeline rank, in order, and the bytes that belong to no phase.

    Attributes:
        rank: the pipeline rank.
        pools: bytes that the allocator holds for other streams, beyond their allocated bytes at the peak; the default
            stream cannot use them.
        fragmentation: bytes that the caching allocator holds beyond the peak: holes, and split segments.
        context: bytes of the CUDA context and of NCCL's buffers, outside the allocator.
    """

    rank: int
    phases: tuple[MemoryPhase, ...]
    pools: float
    fragmentation: float
    context: float

    @property
    def peak(self) -> MemoryPhase:
        """The phase with the most allocated bytes."""
        return max(self.phases, key=lambda phase: phase.allocated)

    @property
    def allocated(self) -> float:
        """Peak of ``torch.cuda.max_memory_allocated``, in bytes."""
        return self.peak.allocated

    @property
    def reserved(self) -> float:
        """Peak of ``torch.cuda.max_memory_reserved``, in bytes."""
        return self.allocated + self.pools + self.fragmentation

    @property
    def device(self) -> float:
        """Bytes that ``nvidia-smi`` shows."""
        return self.reserved + self.context


@dataclass(frozen=True, kw_only=True)
class _RankParameters:
    """Numbers of layers and parameters of one pipeline rank on one tensor rank, not divided by the data axis.

    Attributes:
        layers, sparse: layers, and layers with experts.
        plain: parameters of the layers without routed experts.
        shared: parameters of shared experts, which ``plain`` includes.
        experts: parameters of routed experts.
        embedding, head: parameters of the embedding and of the vocabulary projection; 0 on ranks without it. A head
            tied to the embedding of the same rank is 0.
    """

    layers: float
    sparse: float
    plain: float
    shared: float
    experts: float
    embedding: float
    head: float

    @property
    def ends(self) -> float:
        return self.embedding + self.head

    @property
    def full_bytes(self) -> FullBytes:
        layer = 2.0 * (self.plain + self.experts) / max(1.0, self.layers)
        return FullBytes(layer=layer, embedding=2.0 * self.embedding, head=2.0 * self.head)


def step_memory(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    constants: StepConstants | None = None,
    *,
    rank: int | None = None,
) -> StepMemory:
    """Return the bytes of a step on pipeline rank ``rank``; None: on the first or the last rank, whichever has more."""
    constants = constants or shipped_constants()
    spec = spec.on_tensor_ranks(parallel.tensor)
    ranks = {0, parallel.pipeline - 1} if rank is None else {rank}
    memories = [_rank_memory(spec, parallel, cluster, constants, one) for one in sorted(ranks)]
    return max(memories, key=lambda memory: memory.allocated)


def _rank_memory(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, constants: StepConstants, rank: int
) -> StepMemory:
    owned = _rank_parameters(spec, parallel, rank)
    phases = _phases(spec, parallel, owned, _states(parallel, owned), rank)
    peak = max(phase.allocated for phase in phases)
    if cluster.device.kind == "cpu":
        return StepMemory(rank=rank, phases=phases, pools=0.0, fragmentation=0.0, context=0.0)
    context = CONTEXT_BYTES + _nccl_bytes(parallel)
    room = max(0.0, cluster.device.memory_bytes - context - peak)
    pools = min(stream_pool_bytes(parallel, phases, owned.full_bytes), room)
    fragmentation = min(fragmentation_bytes(parallel, phases, constants), room - pools)
    return StepMemory(rank=rank, phases=phases, pools=pools, fragmentation=fragmentation, context=context)


def _nccl_bytes(parallel: ParallelSpec) -> float:
    axes = (parallel.data * parallel.context, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    return float(NCCL_COMMUNICATOR_BYTES * sum(1 for size in axes if size > 1))


def _rank_parameters(spec: TransformerSpec, parallel: ParallelSpec, rank: int) -> _RankParameters:
    stages = parallel.pipeline
    layers, sparse = spec.layers / stages, spec.sparse_layers / stages
    plain = layers * (spec.attention_parameters + spec.norm_parameters)
    plain += (layers - sparse) * spec.dense_mlp_parameters + sparse * spec.shared_mlp_parameters
    last = rank == stages - 1
    return _RankParameters(
        layers=layers,
        sparse=sparse,
        plain=plain / parallel.tensor,
        shared=sparse * spec.shared_expert_parameters / parallel.tensor,
        experts=sparse * spec.expert_parameters / (parallel.expert * parallel.expert_tensor),
        embedding=spec.embedding_parameters / parallel.tensor if rank == 0 else 0.0,
        head=spec.vocab * spec.hidden / parallel.tensor if last and not (spec.tied and stages == 1) else 0.0,
    )


def _states(parallel: ParallelSpec, owned: _RankParameters) -> MemoryPhase:
    """Return the bytes of parameters, reduced gradients and optimizer state, sharded over the data axis."""
    state = parallel.implementation.state
    shards = (parallel.shard if parallel.zero == 3 else parallel.data) * parallel.context
    expert_shards = max(1.0, shards * parallel.tensor / (parallel.expert * parallel.expert_tensor))
    plain = owned.plain + owned.ends
    if not parallel.implementation.experts.shards_shared_experts:
        plain += (shards - 1) * owned.shared

    def sharded_from(level: int, nbytes: float) -> float:
        if parallel.zero >= level:
            return nbytes * (plain / shards + owned.experts / expert_shards)
        return nbytes * (plain + owned.experts)

    if parallel.implementation.lora:
        return MemoryPhase(name="states", parameters=sharded_from(3, 2))
    optimizer_state = sharded_from(1, state.master_nbytes + state.optimizer_nbytes)
    return MemoryPhase(
        name="states",
        parameters=sharded_from(3, state.parameter_nbytes),
        gradients=sharded_from(2, state.gradient_nbytes),
        optimizer_state=0.0 if state.optimizer_on_host else optimizer_state,
    )


def _phases(
    spec: TransformerSpec, parallel: ParallelSpec, owned: _RankParameters, states: MemoryPhase, rank: int
) -> tuple[MemoryPhase, ...]:
    implementation = parallel.implementation
    saving, state = implementation.saving, implementation.state
    dense, sparse = layer_bytes(spec, parallel, sparse=False), layer_bytes(spec, parallel, sparse=owned.sparse > 0)
    in_flight = micro_batches_in_flight(parallel, rank)
    one = (owned.layers - owned.sparse) * dense.saved + owned.sparse * sparse.saved
    residual = 2.0 * parallel.tokens * spec.hidden / parallel.sequence_shards
    activations = in_flight * (one + residual) + _receive_buffers(parallel, residual, in_flight)
    transient = max(dense.transient if owned.layers > owned.sparse else 0.0, sparse.transient)
    unsharded = _unsharded_gradients(parallel, owned)
    early = states.gradients + unsharded if state.gradients_persist or parallel.micro_batches > 1 else 0.0
    gathered = _gathered(parallel, owned, states) if parallel.fully_sharded else (0.0, 0.0, 0.0)
    reducing = _reducing(parallel, owned.full_bytes, accumulated=unsharded > 0)
    remaining = activations - one + one / max(1.0, owned.layers) if saving.frees_in_backward else activations
    logits, head, holes, outputs = _loss_bytes(spec, parallel, owned) if rank == parallel.pipeline - 1 else (0.0,) * 4
    base = {"parameters": states.parameters, "optimizer_state": states.optimizer_state}
    return (
        MemoryPhase(
            name="loss", gradients=early, activations=activations, logits=logits + outputs, gathered=gathered[0],
            workspace=head, holes=holes, **base,
        ),
        MemoryPhase(
            name="backward of the last layer", gradients=max(early, _head_gradient(parallel, owned)),
            activations=activations + transient, logits=outputs, gathered=gathered[1], workspace=reducing[0], **base,
        ),
        MemoryPhase(
            name="backward of the first layer", gradients=states.gradients + unsharded,
            activations=remaining + transient, logits=outputs, gathered=gathered[2], workspace=reducing[1], **base,
        ),
        MemoryPhase(
            name="optimizer", gradients=states.gradients, workspace=_optimizer_workspace(state, states), **base
        ),
    )  # fmt: skip


def _receive_buffers(parallel: ParallelSpec, residual: float, in_flight: float) -> float:
    """Return the bytes of preallocated receive buffers that hold no live tensor.

    Buffers of activations count for micro-batches that are not in flight. Buffers of gradients count for all. torch's
    distributed/pipelining/stage.py (2.13) has a buffer for every micro-batch and stage in ``args_recv_info`` and
    ``grad_recv_info``. The ends of the pipeline, which receive in one direction only, are counted alike.
    """
    if parallel.pipeline == 1 or not parallel.implementation.pipeline.preallocates_receives:
        return 0.0
    count = float(parallel.micro_batches)
    return parallel.virtual_stages * residual * (max(0.0, count - in_flight) + count)


def _gathered(parallel: ParallelSpec, owned: _RankParameters, states: MemoryPhase) -> tuple[float, float, float]:
    """Return the bytes of all-gathered parameters at the loss, in the last layer's backward, and in the first layer's.

    Backward prefetches the next layer. A head that is its own FSDP group is freed when its backward is done. Saved
    shards in the compute dtype are included.
    """
    implementation, full = parallel.implementation, owned.full_bytes
    options = implementation.data_parallel
    if not options.reshard_after_forward:
        gathered = ((full.ends + full.layer * owned.layers),) * 3
    elif options.root_holds_ends:
        gathered = (full.ends + full.layer, full.ends + 2 * full.layer, full.ends + 2 * full.layer)
    else:
        gathered = (full.head, 2 * full.layer, full.layer + max(full.layer, full.embedding))
    if not options.saves_cast_shards:
        return gathered
    casts = 2.0 * states.parameters / implementation.state.parameter_nbytes
    casts_at_end = 0.0 if implementation.saving.frees_in_backward else casts
    return gathered[0] + casts, gathered[1] + casts, gathered[2] + casts_at_end


def _reducing(parallel: ParallelSpec, full: FullBytes, *, accumulated: bool) -> tuple[float, float]:
    """Return the bytes of unsharded gradients and their reduction, in the last layer's backward and in the first's.

    A layer's gradients are live together with the reduction buffer, a copy, of the previous layer's gradients. The
    root's gradients are unsharded until backward ends. With ``accumulated`` gradients, `_unsharded_gradients` counts
    the root's.
    """
    if not parallel.fully_sharded:
        return 0.0, 0.0
    options = parallel.implementation.data_parallel
    ratio = options.reduce_nbytes / 2
    layer = (1 + ratio) * full.layer
    if options.root_holds_ends:
        head = 0.0 if accumulated or parallel.implementation.lora else full.head
        return layer + head, layer + head
    return max(layer, full.layer + ratio * full.head), layer


def _loss_bytes(
    spec: TransformerSpec, parallel: ParallelSpec, owned: _RankParameters
) -> tuple[float, float, float, float]:
    """Return the bytes of logits, projection workspace, holes and retained outputs on the last pipeline rank."""
    loss = parallel.implementation.loss
    values = parallel.tokens * spec.vocab / loss.chunks
    values /= parallel.tensor if loss.vocabulary_parallel else 1
    outputs = 0.0
    if parallel.pipeline > 1 and parallel.implementation.pipeline.retains_outputs:
        outputs = 2.0 * values * (parallel.micro_batches - 1)
    head = loss.input_nbytes * parallel.tokens * spec.hidden
    if parallel.fully_sharded and loss.chunks > 1:  # the head's gradient of one chunk, and the sum over chunks
        head += (1 + parallel.implementation.data_parallel.reduce_nbytes / 2) * owned.full_bytes.head
    return loss.logit_nbytes * values, head, loss.logit_hole_nbytes * values, outputs


def _unsharded_gradients(parallel: ParallelSpec, owned: _RankParameters) -> float:
    """Return the bytes of gradients that ZeRO-3 accumulates unsharded over micro-batches; 0 where it reduces each."""
    options = parallel.implementation.data_parallel
    each = options.reduces_each_micro_batch or (options.reshard_after_forward and not options.defers_reduction)
    if parallel.zero != 3 or parallel.micro_batches == 1 or each:
        return 0.0
    return options.reduce_nbytes * (owned.plain + owned.ends + owned.experts)


def _head_gradient(parallel: ParallelSpec, owned: _RankParameters) -> float:
    shards = parallel.parameter_shards if parallel.zero >= 2 else 1
    if parallel.implementation.data_parallel.root_holds_ends and parallel.zero == 3 and shards > 1:
        return 0.0  # unsharded: `_reducing` counts it
    return owned.head * parallel.implementation.state.gradient_nbytes / shards


def _optimizer_workspace(state: StateOptions, states: MemoryPhase) -> float:
    """Return the bytes that an unfused optimizer allocates: about two copies of the gradients."""
    return 2.0 * states.gradients if state.optimizer_passes > 1 else 0.0
