"""Plans written by hand, of the kinds that are printed differently."""

from __future__ import annotations

import dataclasses

from cost_model.hardware.cluster import ClusterSpec
from cost_model.layouts.layout import MeshSpec, parse_layout
from planner.plan.estimate import (
    BaselinePrice,
    CollectiveEstimate,
    Estimate,
    MeshReport,
    Pipeline,
    PipelineStage,
    SolverReport,
    Verification,
)
from planner.plan.sharding_plan import Job, PlanMesh, ShardingPlan

BLOCK = "model.layers.*"
WEIGHTS = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "input_layernorm.weight",
    "post_attention_layernorm.weight",
)
OUTSIDE = ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
S0, R = parse_layout(["S(0)"]), parse_layout(["R"])
MODEL_FLOPS = 5.0e16


def fsdp_plan() -> ShardingPlan:
    """Return FSDP of an 8B Llama on 16 H100s, with everything that a planner writes."""
    cluster = ClusterSpec.parse("2x8xh100-sxm-80gb")
    keys = [*(f"{BLOCK}.{name}" for name in WEIGHTS), *OUTSIDE]
    estimate = Estimate(
        step_time_s=7.34,
        forward_s=2.43,
        backward_s=4.87,
        grad_reduce_s=0.02,
        optimizer_s=0.02,
        compute_s=6.95,
        communication_s=1.49,
        exposed_communication_s=0.37,
        model_flops=MODEL_FLOPS,
        host_s=1.2,
        peak_memory_bytes=70_000_000_000,
        memory={
            "activations": 53_000_000_000,
            "optimizer_state": 4_020_000_000,
            "parameters": 2_140_000_000,
            "gradients": 2_010_000_000,
            "transient": 4_330_000_000,
            "allocator": 2_700_000_000,
            "context": 1_800_000_000,
        },
        collectives=(
            CollectiveEstimate(
                kind="all_gather", axis="fsdp", phase="forward", count=264, bytes=436_000_000, time_s=0.384
            ),
            CollectiveEstimate(
                kind="reduce_scatter", axis="fsdp", phase="backward", count=264, bytes=872_000_000, time_s=0.701
            ),
        ),
    )
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse("fsdp=16")),
        plan=dict.fromkeys(keys, S0) | {"model.norm.weight": R},
        compute_plan=dict.fromkeys([key for key in keys if key != "model.norm.weight"], R),
        fully_shard={BLOCK: WEIGHTS, "": ("model.embed_tokens.weight",)},
        input_plan={"input": {"input_ids": S0, "labels": S0}},  # type: ignore[dict-item]
        output_plan={f"{BLOCK}.mlp": S0},  # type: ignore[dict-item]
        micro_batches=8,
        estimate=estimate,
        solver=SolverReport(
            name="ilp",
            status="optimal",
            objective_s=7.34,
            bound_s=7.304,
            gap=0.0049,
            time_s=1.5,
            meshes=(
                MeshReport(mesh="fsdp=16", outcome="chosen", at_least_s=7.3, step_time_s=7.34),
                MeshReport(mesh="dp=2,fsdp=8", outcome="slower", at_least_s=7.41),
                MeshReport(mesh="fsdp=2,tp=8", outcome="does-not-fit"),
            ),
            fastest_s=7.31,
            fastest_mesh="dp=2,tp=8",
        ),
        baselines=(
            BaselinePrice(name="hsdp", mesh="dp=2,fsdp=8", step_time_s=7.41, peak_memory_bytes=77_000_000_000),
            BaselinePrice(name="fsdp-tp", mesh="fsdp=8,tp=2", step_time_s=8.72, peak_memory_bytes=63_000_000_000),
            BaselinePrice(name="ddp", mesh="dp=16", peak_memory_bytes=152_300_000_000),
        ),
        verification=Verification(outcome="as-planned", kinds=10),
        model="llama-3.1-8b",
        job=Job(batch=128, seq=8192, memory_bytes=int(0.92 * cluster.memory_bytes), headroom=0.08, ac="none"),
        cluster=cluster.to_dict(),
        timings={"trace_s": 1.0, "solve_s": 1.5},
        notes=("a note for people",),
    )


def decoding_plan() -> ShardingPlan:
    """Return tensor parallelism for decoding, whose host is slower than its kernels, in memory without headroom."""
    plan = fsdp_plan()
    assert plan.estimate is not None
    column = parse_layout(["S(0)"])
    estimate = dataclasses.replace(
        plan.estimate,
        step_time_s=0.018,
        forward_s=0.018,
        backward_s=0.0,
        grad_reduce_s=0.0,
        optimizer_s=0.0,
        compute_s=0.016,
        communication_s=0.002,
        exposed_communication_s=0.002,
        model_flops=2.3e12,
        host_s=0.18,
        peak_memory_bytes=84_900_000_000,
        memory={"parameters": 17_600_000_000, "kv_cache": 62_000_000_000, "transient": 300_000_000},
        collectives=(),
    )
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse("tp=8")),
        plan=dict.fromkeys([f"{BLOCK}.{name}" for name in WEIGHTS[:7]], column),
        output_plan={f"{BLOCK}.mlp": parse_layout(["S(1)"])},  # type: ignore[dict-item]
        input_plan={"input": R},  # type: ignore[dict-item]
        estimate=estimate,
        solver=SolverReport(name="ilp", status="time-limit", objective_s=0.018, bound_s=0.017, gap=0.055),
        verification=Verification(outcome="not-run", reason="the model has no forward on fake processes."),
        job=Job(phase="decode", batch=16, seq=8192, headroom=0.08),
        cluster=ClusterSpec.parse("1x8xh100-sxm-80gb").to_dict(),
        model="llama-3.1-70b",
    )


def repeating_plan() -> ShardingPlan:
    """Return a plan on far more devices than its batch can use."""
    plan = fsdp_plan()
    two = parse_layout(["R", "S(0)"])
    return dataclasses.replace(
        plan,
        mesh=PlanMesh.from_mesh(MeshSpec.parse("dp=100000,tp=8")),
        plan=dict.fromkeys(plan.plan, two),
        compute_plan={},
        fully_shard={},
        input_plan={"input": parse_layout(["R", "R"])},
        output_plan={f"{BLOCK}.mlp": parse_layout(["R", "S(1)"])},
        cluster=ClusterSpec.parse("100000x8xh100-sxm-80gb").to_dict(),
        baselines=(),
    )


def pipeline_plan() -> ShardingPlan:
    """Return a pipeline of two stages, of FSDP each."""
    plan = fsdp_plan()
    stages = tuple(
        PipelineStage(modules=modules, micro_batch_s=0.4, peak_memory_bytes=60_000_000_000)
        for modules in (
            ("model.embed_tokens", "model.layers.{0-15}"),
            ("model.layers.{16-31}", "model.norm", "lm_head"),
        )
    )
    return dataclasses.replace(
        plan,
        mesh=PlanMesh.from_mesh(MeshSpec.parse("pp=2,fsdp=8")),
        pipeline=Pipeline(schedule="1f1b", layout=("S(0)",), idle_s=0.8, stages=stages),
        notes=("a pipeline cannot be run here yet: --executable-only (executable_only=True) plans without.",),
        baselines=(),
        verification=None,
    )


def long_names_plan() -> ShardingPlan:
    """Return a plan whose names are longer than a line."""
    plan = fsdp_plan()
    path = ".".join(["a_module_with_a_very_long_name"] * 4)
    axis = "an_axis_with_a_name_that_is_far_longer_than_any_axis_needs"
    cluster = {**plan.cluster, "device": {**dict(plan.cluster["device"]), "name": "h100-sxm-80gb"}}
    return dataclasses.replace(
        plan,
        mesh=PlanMesh.from_mesh(MeshSpec.parse(f"{axis}=16")),
        model="/home/somebody/projects/" + "a-folder-with-a-long-name/" * 4 + "config.json",
        plan={f"{path}.*.{n}_projection.weight": S0 for n in range(20)} | {f"{path}.head.weight": S0},
        compute_plan={f"{path}.head.weight": R},
        activation_checkpointing={f"{path}.*": "full"},
        cluster=cluster,
        notes=("a note with " + "many words " * 40,),
    )


def bare_plan() -> ShardingPlan:
    """Return a plan as a person writes it: layouts and nothing else."""
    return ShardingPlan(
        mesh=PlanMesh.from_mesh(MeshSpec.parse("dp=2,tp=2")),
        plan={"up.weight": parse_layout(["R", "S(0)"]), "bags": "half-and-half"},
    )


PLANS = {
    "fsdp": fsdp_plan,
    "decoding": decoding_plan,
    "repeating": repeating_plan,
    "pipeline": pipeline_plan,
    "long names": long_names_plan,
    "bare": bare_plan,
}
