"""Bytes on one device over a training step, by role, and their peak: allocated, reserved, and as the device shows them.

Moments of a step at which memory peaks: the loss (all activations and the logits alive), backward of the last layer
(gathered weights, recomputed activations, first gradients), backward of the first (all gradients), and the optimizer's
step. Of a pipeline, the first and the last rank are looked at; the larger peak counts.

Known error (2026-11, benchmarks/accuracy.py, sources that no constant was fitted to): 3 % on average, 2 % in the
median, 12 % too low at worst. Layers are taken to be spread evenly over a pipeline. Fixed buffers of DeepSpeed are not
counted (half of what an 8B model holds on 8 devices at 8,192 tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.configuration.activations import layer_bytes
from cost_model.configuration.allocator import FullBytes, fragments, stream_pools
from cost_model.configuration.parallelism import ParallelSpec
from cost_model.configuration.pipeline_schedules import micro_batches_in_flight
from cost_model.configuration.transformer import TransformerSpec
from cost_model.hardware.cluster import ClusterSpec
from cost_model.kernels.optimizer_memory import CONTEXT_BYTES
from cost_model.kernels.step_constants import StepConstants, shipped_constants

ROLES = ("parameters", "gradients", "optimizer_state", "activations", "logits", "gathered", "workspace")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes by role at one moment of a step.

    Attributes:
        holes: bytes of free blocks that are too small for what is allocated at this moment; in no role.
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
        """All roles together."""
        return float(sum(getattr(self, role) for role in ROLES))


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The moments of a step on the fullest rank, in order, and what lies around them.

    Attributes:
        pools: bytes that the allocator holds for streams of their own beyond what is allocated there at the peak; no
            other stream can use them.
        fragmentation: bytes that the caching allocator holds beyond the peak: holes, and split segments.
        context: CUDA context and NCCL's buffers, outside the allocator.
    """

    rank: int
    timeline: tuple[Moment, ...]
    pools: float
    fragmentation: float
    context: float

    @property
    def peak(self) -> Moment:
        """The moment at which most is allocated."""
        return max(self.timeline, key=lambda moment: moment.allocated)

    @property
    def allocated(self) -> float:
        """Peak of ``torch.cuda.max_memory_allocated``."""
        return self.peak.allocated

    @property
    def reserved(self) -> float:
        """Peak of ``torch.cuda.max_memory_reserved``."""
        return self.allocated + self.pools + self.fragmentation

    @property
    def device(self) -> float:
        """What ``nvidia-smi`` shows."""
        return self.reserved + self.context


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """Parameters of one pipeline rank on one tensor rank, before anything is split over the data axis.

    ``shared`` (experts) are a part of ``plain``.
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


def step_memory(
    spec: TransformerSpec,
    parallel: ParallelSpec,
    cluster: ClusterSpec,
    constants: StepConstants | None = None,
    *,
    rank: int | None = None,
) -> StepMemory:
    """Return the bytes of a step on pipeline rank ``rank``, or on the fuller of the first and the last."""
    fitted = constants or shipped_constants()
    ranks = {0, parallel.pipeline - 1} if rank is None else {rank}
    found = [_on_rank(spec, parallel, cluster, fitted, one) for one in sorted(ranks)]
    return max(found, key=lambda memory: memory.allocated)


def _on_rank(
    spec: TransformerSpec, parallel: ParallelSpec, cluster: ClusterSpec, fitted: StepConstants, rank: int
) -> StepMemory:
    share = _rank_share(spec, parallel, rank)
    states = _states(spec, parallel, share)
    timeline = _timeline(spec, parallel, share, states, rank)
    peak = max(moment.allocated for moment in timeline)
    if cluster.device.kind == "cpu":
        return StepMemory(rank=rank, timeline=timeline, pools=0.0, fragmentation=0.0, context=0.0)
    context = CONTEXT_BYTES + _nccl_bytes(parallel)
    room = max(0.0, cluster.device.memory_bytes * VISIBLE_SHARE - context - peak)
    pools = min(stream_pools(parallel, timeline, _full(share)), room)
    fragmentation = min(fragments(parallel, timeline, fitted), room - pools)
    return StepMemory(rank=rank, timeline=timeline, pools=pools, fragmentation=fragmentation, context=context)


def _full(share: _Rank) -> FullBytes:
    layer = 2.0 * (share.plain + share.experts) / max(1.0, share.layers)
    return FullBytes(layer=layer, embedding=2.0 * share.embedding, head=2.0 * share.head)


VISIBLE_SHARE = 1.063
"""Bytes that the driver shows over the label's: 79.19 GiB on an 80 GB H100 (devices.csv, mem_gib_visible)."""

NCCL_COMMUNICATOR_BYTES = 250_000_000
"""Buffers of one communicator; see ``memory.NCCL_BYTES``."""


def _nccl_bytes(parallel: ParallelSpec) -> float:
    axes = (parallel.data * parallel.context, parallel.tensor, parallel.pipeline, parallel.context, parallel.expert)
    return float(NCCL_COMMUNICATOR_BYTES * sum(1 for size in axes if size > 1))


def _rank_share(spec: TransformerSpec, parallel: ParallelSpec, rank: int) -> _Rank:
    stages = parallel.pipeline
    layers, sparse = spec.layers / stages, spec.sparse_layers / stages
    plain = layers * (spec.attention_parameters + spec.norm_parameters)
    plain += (layers - sparse) * spec.dense_mlp_parameters + sparse * spec.shared_mlp_parameters
    last = rank == stages - 1
    return _Rank(
        layers=layers,
        sparse=sparse,
        plain=plain / parallel.tensor,
        shared=sparse * spec.shared_expert_parameters / parallel.tensor,
        experts=sparse * spec.expert_parameters / (parallel.expert * parallel.expert_tensor),
        embedding=spec.embedding_parameters / parallel.tensor if rank == 0 else 0.0,
        head=spec.vocab * spec.hidden / parallel.tensor if last and not (spec.tied and stages == 1) else 0.0,
    )


def _states(spec: TransformerSpec, parallel: ParallelSpec, share: _Rank) -> Moment:
    """Return parameters, whole gradients and optimizer state of the rank, as the data axis splits them."""
    implementation = parallel.implementation
    shards = (parallel.shard if parallel.zero == 3 else parallel.data) * parallel.context
    expert_shards = max(1.0, shards * parallel.tensor / (parallel.expert * parallel.expert_tensor))
    plain = share.plain + share.ends
    if not implementation.shards_shared_experts:
        plain += (shards - 1) * share.shared

    def held(nbytes: float, level: int) -> float:
        if parallel.zero >= level:
            return nbytes * (plain / shards + share.experts / expert_shards)
        return nbytes * (plain + share.experts)

    if implementation.lora:
        return Moment(name="states", parameters=held(2, 3), workspace=0.0)
    state = implementation.master_nbytes + implementation.state_nbytes
    return Moment(
        name="states",
        parameters=held(implementation.parameter_nbytes, 3),
        gradients=held(implementation.gradient_nbytes, 2),
        optimizer_state=0.0 if implementation.optimizer_on_host else held(state, 1),
    )


def _timeline(
    spec: TransformerSpec, parallel: ParallelSpec, share: _Rank, states: Moment, rank: int
) -> tuple[Moment, ...]:
    implementation = parallel.implementation
    dense, sparse = layer_bytes(spec, parallel, sparse=False), layer_bytes(spec, parallel, sparse=share.sparse > 0)
    flight = micro_batches_in_flight(parallel, rank)
    one = (share.layers - share.sparse) * dense.saved + share.sparse * sparse.saved
    residual = 2.0 * parallel.tokens * spec.hidden / (parallel.tensor if parallel.sequence_parallel else 1)
    activations = flight * (one + residual) + _receive_buffers(parallel, residual, flight)
    transient = max(dense.transient if share.layers > share.sparse else 0.0, sparse.transient)
    persistent = implementation.gradients_persist or parallel.micro_batches > 1
    whole = _unsharded_gradients(parallel, share)
    early = (states.gradients + whole) if persistent else 0.0
    full, sharded = _full(share), parallel.zero == 3 and parallel.shard * parallel.context > 1
    gathered = _gathered(parallel, share, full) if sharded else (0.0, 0.0, 0.0)
    if sharded and implementation.keeps_cast_shards:
        casts = 2.0 * states.parameters / implementation.parameter_nbytes
        left = 0.0 if implementation.releases_saved else casts
        gathered = gathered[0] + casts, gathered[1] + casts, gathered[2] + left
    reduced = _reduced(parallel, full, accumulated=whole > 0) if sharded else (0.0, 0.0)
    remaining = activations - one + one / max(1.0, share.layers) if implementation.releases_saved else activations
    logits = head = holes = returned = 0.0
    if rank == parallel.pipeline - 1:
        values = parallel.tokens * spec.vocab / implementation.loss_chunks
        values /= parallel.tensor if implementation.loss_parallel else 1
        logits, holes = implementation.loss_nbytes * values, implementation.loss_hole_nbytes * values
        if parallel.pipeline > 1 and implementation.keeps_outputs:
            returned = 2.0 * values * (parallel.micro_batches - 1)
        head = implementation.loss_hidden_nbytes * parallel.tokens * spec.hidden
        if sharded and implementation.loss_chunks > 1:  # the head's gradient of one piece, and the sum of all
            head += (1 + implementation.reduce_nbytes / 2) * full.head
    base = {"parameters": states.parameters, "optimizer_state": states.optimizer_state}
    return (
        Moment(
            name="loss", gradients=early, activations=activations, logits=logits + returned,
            gathered=gathered[0],
            workspace=head, holes=holes, **base,
        ),
        Moment(
            name="backward of the last layer", gradients=max(early, _head_gradient(parallel, share)),
            activations=activations + transient, logits=returned, gathered=gathered[1], workspace=reduced[0], **base,
        ),
        Moment(
            name="backward of the first layer", gradients=states.gradients + whole,
            activations=remaining + transient, logits=returned,
            gathered=gathered[2], workspace=reduced[1], **base,
        ),
        Moment(
            name="optimizer", gradients=states.gradients, workspace=_optimizer_workspace(parallel, states), **base
        ),
    )  # fmt: skip


def _receive_buffers(parallel: ParallelSpec, residual: float, flight: float) -> float:
    """Return the bytes of buffers that micro-batches are received in and that hold nothing yet, or nothing any more.

    Of activations those of micro-batches that are not in flight; of gradients all (torch's
    distributed/pipelining/stage.py, 2.13: ``args_recv_info`` and ``grad_recv_info`` have a buffer for every micro-batch
    and stage). What one end of the pipeline does not receive is not left out.
    """
    if parallel.pipeline == 1 or not parallel.implementation.receives_ahead:
        return 0.0
    count = float(parallel.micro_batches)
    return parallel.virtual_stages * residual * (max(0.0, count - flight) + count)


def _gathered(parallel: ParallelSpec, share: _Rank, full: FullBytes) -> tuple[float, float, float]:
    """Return the bytes of gathered parameters at the loss, in the last layer's backward and in the first's.

    Backward gathers the next layer ahead. A head that is gathered by itself is dropped when its backward is done.
    """
    implementation = parallel.implementation
    if not implementation.reshards:
        return (full.ends + full.layer * share.layers,) * 3
    if implementation.root_holds_ends:
        return full.ends + full.layer, full.ends + 2 * full.layer, full.ends + 2 * full.layer
    return full.head, 2 * full.layer, full.layer + max(full.layer, full.embedding)


def _reduced(parallel: ParallelSpec, full: FullBytes, *, accumulated: bool) -> tuple[float, float]:
    """Return the bytes of whole gradients and of their reduction, in the last layer's backward and in the first's.

    A layer's gradients are copied to be reduced; the copy of what was reduced before is there until then. The root's
    are whole until backward ends, where they are not ``accumulated`` over micro-batches anyway.
    """
    implementation = parallel.implementation
    ratio = implementation.reduce_nbytes / 2
    layer = (1 + ratio) * full.layer
    if implementation.root_holds_ends:
        head = 0.0 if accumulated or implementation.lora else full.head
        return layer + head, layer + head
    return max(layer, full.layer + ratio * full.head), layer


def _unsharded_gradients(parallel: ParallelSpec, share: _Rank) -> float:
    """Return the gradients that a sharded rank adds up whole over micro-batches, in the dtype that reduces them."""
    implementation = parallel.implementation
    each = implementation.reduce_each_micro_batch or (implementation.reshards and not implementation.defers_reduce)
    if parallel.zero != 3 or parallel.micro_batches == 1 or each:
        return 0.0
    return parallel.implementation.reduce_nbytes * (share.plain + share.ends + share.experts)


def _head_gradient(parallel: ParallelSpec, share: _Rank) -> float:
    shards = parallel.shard * parallel.context if parallel.zero >= 2 else 1
    if parallel.implementation.root_holds_ends and parallel.zero == 3 and shards > 1:
        return 0.0  # whole, among what is reduced
    return share.head * parallel.implementation.gradient_nbytes / shards


def _optimizer_workspace(parallel: ParallelSpec, states: Moment) -> float:
    """Return what an unfused optimizer allocates beside its states: about two copies of the gradients."""
    return 2.0 * states.gradients if parallel.implementation.optimizer_passes > 1 else 0.0
