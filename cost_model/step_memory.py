"""Bytes on one device over a training step, by role, and their peak: allocated, reserved, and as the device shows them.

Moments of a step at which memory peaks: the loss (all activations and the logits alive), backward of the last layer
(gathered weights, recomputed activations, first gradients), backward of the first (all gradients), and the optimizer's
step. Of a pipeline, the first and the last rank are looked at; the larger peak counts.

Known error (2026-11, benchmarks/accuracy.py, sources that no constant was fitted to): 9 % on average, 7 % in the
median; too low by up to 37 % where a framework holds what is not counted, and by 10 to 31 % for experts whose load is
not forced to be even; too high by up to 25 % for small models beside tensor parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass

from cost_model.activations import layer_bytes
from cost_model.cluster import ClusterSpec
from cost_model.memory import CONTEXT_BYTES
from cost_model.parallelism import ParallelSpec
from cost_model.pipeline import micro_batches_in_flight
from cost_model.step_constants import StepConstants, shipped_constants
from cost_model.transformer import TransformerSpec

ROLES = ("parameters", "gradients", "optimizer_state", "activations", "logits", "gathered", "workspace")


@dataclass(frozen=True, kw_only=True)
class Moment:
    """Bytes by role at one moment of a step."""

    name: str
    parameters: float = 0.0
    gradients: float = 0.0
    optimizer_state: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    gathered: float = 0.0
    workspace: float = 0.0

    @property
    def allocated(self) -> float:
        """All roles together."""
        return float(sum(getattr(self, role) for role in ROLES))


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The moments of a step on the fullest rank, in order, and what lies around them.

    Attributes:
        pools: bytes that the allocator holds for streams of their own, which no other stream can use.
        fragmentation: bytes that the caching allocator holds beyond the peak.
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
    """Parameters of one pipeline rank on one tensor rank, before anything is split over the data axis."""

    layers: float
    sparse: float
    plain: float
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
    context = 0.0 if cluster.device.kind == "cpu" else CONTEXT_BYTES + _nccl_bytes(parallel)
    room = max(0.0, cluster.device.memory_bytes * VISIBLE_SHARE - context - peak)
    pools = min(_gather_pool(parallel, share), room)
    room -= pools
    fragmentation = 0.0 if cluster.device.kind == "cpu" else min(fitted.fragmentation_bytes, room)
    return StepMemory(rank=rank, timeline=timeline, pools=pools, fragmentation=fragmentation, context=context)


def _gather_pool(parallel: ParallelSpec, share: _Rank) -> float:
    """Return what the stream that gathers parameters keeps for the results of its collectives.

    They are allocated on that stream and copied out into parameters of the compute stream's (torch's
    _fsdp_collectives.py, foreach_all_gather): the largest group's and the next one's at once, never lent elsewhere.
    """
    if not parallel.implementation.gather_stream or parallel.zero != 3 or parallel.shard * parallel.context == 1:
        return 0.0
    layer = 2.0 * (share.plain + share.experts) / max(1.0, share.layers)
    return layer + max(layer, 2.0 * share.embedding, 2.0 * share.head)


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
    activations = flight * (one + residual)
    transient = max(dense.transient if share.layers > share.sparse else 0.0, sparse.transient)
    persistent = implementation.gradients_persist or parallel.micro_batches > 1
    whole = _unsharded_gradients(parallel, share)
    early = (states.gradients + whole) if persistent else 0.0
    layer_full = 2.0 * (share.plain + share.experts) / max(1.0, share.layers)
    ends_full = 2.0 * share.ends
    gathered_loss = gathered_layer = layer_reduce = 0.0
    if parallel.zero == 3 and parallel.shard * parallel.context > 1:
        gathered_loss = ends_full + layer_full if implementation.reshards else ends_full + layer_full * share.layers
        gathered_layer = ends_full + (2 * layer_full if implementation.reshards else layer_full * share.layers)
        layer_reduce = layer_full * (1 + implementation.reduce_nbytes / 2)
    logits = head = 0.0
    if rank == parallel.pipeline - 1:
        values = parallel.tokens * spec.vocab / implementation.loss_chunks
        values /= parallel.tensor if implementation.loss_parallel else 1
        logits = implementation.loss_nbytes * values
        head = 2 * 2.0 * parallel.tokens * spec.hidden  # the projection's input, gathered, and its gradient
    base = {"parameters": states.parameters, "optimizer_state": states.optimizer_state}
    return (
        Moment(
            name="loss", gradients=early, activations=activations, logits=logits, gathered=gathered_loss,
            workspace=head, **base,
        ),
        Moment(
            name="backward of the last layer", gradients=max(early, _head_gradient(parallel, share)),
            activations=activations + transient, gathered=gathered_layer, workspace=layer_reduce, **base,
        ),
        Moment(
            name="backward of the first layer", gradients=states.gradients + whole,
            activations=activations - one + transient + one / max(1.0, share.layers), gathered=gathered_layer,
            workspace=layer_reduce, **base,
        ),
        Moment(
            name="optimizer", gradients=states.gradients, workspace=_optimizer_workspace(parallel, states), **base
        ),
    )  # fmt: skip


def _unsharded_gradients(parallel: ParallelSpec, share: _Rank) -> float:
    """Return the gradients that a sharded rank adds up whole over micro-batches, in the dtype that reduces them."""
    implementation = parallel.implementation
    each = implementation.reduce_each_micro_batch or (implementation.reshards and not implementation.defers_reduce)
    if parallel.zero != 3 or parallel.micro_batches == 1 or each:
        return 0.0
    return parallel.implementation.reduce_nbytes * (share.plain + share.ends + share.experts)


def _head_gradient(parallel: ParallelSpec, share: _Rank) -> float:
    shards = parallel.shard * parallel.context if parallel.zero >= 2 else 1
    return share.head * parallel.implementation.gradient_nbytes / shards


def _optimizer_workspace(parallel: ParallelSpec, states: Moment) -> float:
    """Return what an unfused optimizer allocates beside its states: about two copies of the gradients."""
    return 2.0 * states.gradients if parallel.implementation.optimizer_passes > 1 else 0.0
