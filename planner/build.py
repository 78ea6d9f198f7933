"""`build_plan`: one model, one plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cost_model import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.graph.example_inputs import GivenInputs
from planner.graph.trace_module import TracedModule
from planner.plan.former_names import accepts_former_names
from planner.plan.job import AttentionKernel, JobPhase
from planner.plan.sharding_plan import ShardingPlan
from planner.run import baselines
from planner.run.mesh_space import check_mesh
from planner.search.mesh_search import Progress
from planner.session import PlanningSession


@accepts_former_names
def build_plan(
    model: nn.Module | TracedModule,
    *,
    cluster: str | ClusterSpec | Mapping[str, Any],
    example_inputs: GivenInputs = None,
    phase: JobPhase = "training",
    mesh: str | MeshSpec | None = None,
    batch: int | None = None,
    seq: int | None = None,
    micro_batches: int | None = None,
    ac: str | None = None,
    memory_gb: float | None = None,
    optimizer: str = "adamw",
    dtype: str = "bf16",
    reduce_dtype: str = "fp32",
    planner: str = "ilp",
    tp_plan: Mapping[str, str] | None = None,
    pins: Sequence[str] = (),
    data_axes: Sequence[str] = (),
    async_tp: bool = False,
    reallgather: bool = False,
    fused_ops: bool = False,
    zigzag: bool = False,
    attention_kernel: AttentionKernel | None = None,
    axes: int = 2,
    heterogeneous_blocks: bool = False,
    executable_only: bool = True,
    time_limit_s: float | None = None,
    jobs: int = 1,
    progress: Progress | None = None,
) -> ShardingPlan:
    """Return the fastest plan for a step of ``model`` on ``cluster`` within its memory.

    Args:
        model: any module; stays as it is, and may be on the meta device. Or what `trace_module` made of one.
        cluster: for example "4x8xh100-sxm-80gb".
        example_inputs: arguments of one call with the global batch (tuple or dict); None: made from a Hugging Face
        config.
        phase: what a step is: "training"; "prefill", one forward over the batch that fills a key-value cache; "decode",
            the forward of one more token of each sequence, of which ``seq`` are in the cache. The latter two are for
            latency: ``planner.tradeoffs.batches`` looks for throughput.
        mesh: for example "dp=4,tp=8"; None: all meshes of the cluster with up to ``axes`` axes are tried.
        batch: samples per step in all; None takes the example inputs'.
        seq: tokens per sample, for models that read tokens.
        micro_batches: None: chosen.
        ac: activation checkpointing, "none", "selective" or "full", "selective:K" or "full:K" for the first K blocks of
            each list alone; None: chosen.
        memory_gb: cap on the peak per device in 1e9 bytes; None: the device's memory.
        optimizer: a name of ``cost_model.kernels.optimizer_memory.OPTIMIZERS``.
        dtype: of computing: "bf16", "fp16" or "fp32"; parameters rest in fp32.
        reduce_dtype: in which gradients are reduced, and add up over micro-batches until they are: likewise.
        planner: "ilp", a baseline's name, or "random:SEED".
        tp_plan: the expert plan for "tensor-parallel"; None takes the model's own.
        pins: layouts decided already, such as "lm_head.weight=S(0)@tp"; see `planner.run.pins`.
        data_axes: mesh axes that are to split the batch alone.
        async_tp: whether tensor-parallel communication inside a node is taken to run in pieces beside the matrix
            products next to it, as userbuffers and async tensor parallelism do; `executor.shard_module` cannot, so it
            needs ``executable_only=False``.
        reallgather: whether linear layers may have what was gathered for them gathered again for their backward, in
            place of keeping it; planning takes longer.
        fused_ops: whether norms, gated activations, rotary embeddings and the loss run as one op each where the model's
            own code does the same: `executor.shard_module` puts them in its place, compiled on a GPU. Linear layers
            that read the same tensor add up its gradient in their products then.
        zigzag: whether, where attention's sequences are split, the model has its tokens in an order that makes work
            under a causal mask even, so that ranks exchange no queries; what the model returns beside its loss then
            comes in that order (`executor.natural_order` undoes it).
        attention_kernel: "flash3": attention runs in FlashAttention-3, which `executor.shard_module` has torch use, in
            place of what torch chooses; on Hopper, with the package flash_attn_interface.
        axes: the most that a mesh has where none is given: 1, 2 or 3. Of three the outermost splits the batch alone.
        heterogeneous_blocks: whether the first of equal blocks may be laid out and checkpointed apart from the rest;
            planning then takes up to three times as long, or far longer where a cap on memory binds.
        executable_only: whether only plans are wanted that `executor.shard_module` can run; False tries pipelines too,
            where no mesh is given.
        time_limit_s: of the search, tracing left out; then the best plan so far is returned, with its gap.
        jobs: candidates looked at at once: 1 in this process, more in others beside it, -1 on all cores, or where
            `joblib.parallel_config` says. The plan costs the same.
        progress: told of each stage.

    Raises:
        PlannerError: the request cannot be planned; `InfeasibleError` where nothing fits, `SolverError` where the time
        was up before any plan was found.
    """
    baselines.parse_planner(planner)
    cluster = cluster if isinstance(cluster, ClusterSpec) else ClusterSpec.parse(cluster)
    spec = MeshSpec.parse(mesh) if isinstance(mesh, str) else mesh
    if spec is not None:
        check_mesh(spec, cluster)
    session = PlanningSession(
        model,
        cluster=cluster,
        example_inputs=example_inputs,
        phase=phase,
        batch=batch,
        seq=seq,
        micro_batches=baselines.micro_batches_for(planner, micro_batches),
        ac=ac,
        memory_gb=memory_gb,
        optimizer=optimizer,
        dtype=dtype,
        reduce_dtype=reduce_dtype,
        tp_plan=tp_plan,
        pins=pins,
        data_axes=data_axes,
        async_tp=async_tp,
        reallgather=reallgather,
        fused_ops=fused_ops,
        zigzag=zigzag,
        attention_kernel=attention_kernel,
        axes=axes,
        heterogeneous_blocks=heterogeneous_blocks,
        executable_only=executable_only,
        time_limit_s=time_limit_s,
        jobs=jobs,
        progress=progress,
    )
    return session.plan(planner=planner, mesh=spec)
