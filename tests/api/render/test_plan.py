"""A plan as it is printed: every line of two plans, the width of all, and what each kind says."""

from __future__ import annotations

import dataclasses
import io

import pytest
from rich.console import Console
from support.printed_plans import PLANS, S0, R, bare_plan, decoding_plan, fsdp_plan, pipeline_plan, repeating_plan

from api.render.axis_roles import useful_devices
from api.render.headline import binding, mfu
from api.render.layout_lines import layout_lines
from api.render.plan import plan_lines, show_plan
from api.requests.run_cost import RunCost
from cost_model.hardware.cluster import ClusterSpec
from cost_model.layouts.layout import MeshSpec
from planner.errors import JobError
from planner.plan.sharding_plan import PlanMesh, ShardingPlan

GOLDEN = """\
llama-3.1-8b on 16 x H100-SXM-80GB (2 nodes of 8)
training, 128 x 8,192 tokens a step, bf16, AdamW

  step time      7.34 s   (6.55 to 8.13)   143,000 tokens/s, 8,930 per GPU
  MFU            43.0 %                    bound by compute (95 %)
  memory         70.0 GB of 85.0 GB        18 % free, headroom of 8 % kept
  verified       yes: 10 kinds of collectives run as planned

Mesh
  fsdp = 16     shards weights, gradients, optimizer states and the batch (FSDP)
  8 micro-batches of 16 samples, no activation checkpointing

Layouts                         stored      computed
  model.layers.* (all weights)  fsdp dim 0  gathered per block
  model.embed_tokens, lm_head   fsdp dim 0  gathered
  model.norm                    whole       whole

Memory per GPU    GB
  activations   53.0  ##############################  saved for the backward
  transient      4.3  ##  the most that one op works on
  optimizer      4.0  ##
  allocator      2.7  ##  free blocks of torch's caching allocator
  parameters     2.1  #
  gradients      2.0  #
  context        1.8  #  CUDA context, NCCL's buffers

Time per step       s
  compute        6.95  ##############################
  communication  1.49  ######  1.12 s overlapped, 370 ms exposed
  optimizer      0.02  #

Compared with                 step   memory
  this plan    fsdp=16      7.34 s  70.0 GB
  HSDP         dp=2,fsdp=8  7.41 s  77.0 GB  1 % slower: within the model's
                                             error
  FSDP x TP    fsdp=8,tp=2  8.72 s  63.0 GB  19 % slower
  DDP          dp=16             -   152 GB  does not fit, needs 152 GB

Optimal within 0.5 %: no plan of the search space takes less than 7.30 s. The
fastest found takes 7.31 s on dp=2,tp=8; this one is simpler.

Verify it   shardplan verify llama-3.1-8b plan.json
Run it      torchrun --nnodes 2 --nproc-per-node 8 YOUR_SCRIPT.py
            (with executor.shard_module, as the README shows)
Details     shardplan show plan.json --details (and 1 note)
Look at it  shardplan report plan.json -o plan.html
"""


def text_of(plan: ShardingPlan, **options: object) -> str:
    """Return a printed plan as one line, with single spaces."""
    return " ".join(" ".join(plan_lines(plan, **options)).split())  # type: ignore[arg-type]


def test_a_plan_prints_from_the_answer_down() -> None:
    assert "\n".join(plan_lines(fsdp_plan(), file="plan.json")) + "\n" == GOLDEN


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("details", [False, True])
def test_no_line_is_wider_than_80_columns(name: str, details: bool) -> None:
    lines = plan_lines(PLANS[name](), details=details, cost=None)
    assert max(map(len, lines)) <= 80
    assert all(line == line.rstrip() for line in lines)


def test_the_console_neither_cuts_nor_wraps_lines() -> None:
    printed = io.StringIO()
    show_plan(fsdp_plan(), Console(file=printed, width=40, color_system=None))
    assert printed.getvalue().splitlines() == plan_lines(fsdp_plan())


def test_mfu_is_over_the_peak_of_the_jobs_dtype() -> None:
    plan = fsdp_plan()
    peak = ClusterSpec.from_dict(plan.cluster).device.peak_flops["bf16"]
    assert mfu(plan) == pytest.approx(5.0e16 / 7.34 / 16 / peak)
    assert mfu(bare_plan()) is None


def test_what_binds_is_named_with_its_share() -> None:
    plan, decoding, pipeline = fsdp_plan(), decoding_plan(), pipeline_plan()
    assert plan.estimate is not None
    assert decoding.estimate is not None
    assert pipeline.estimate is not None
    assert binding(plan, plan.estimate) == ("compute", pytest.approx(6.95 / 7.34))
    assert binding(decoding, decoding.estimate) == ("the host", pytest.approx(10))
    no_host = dataclasses.replace(decoding.estimate, host_s=None)
    assert binding(decoding, no_host) == ("memory traffic", pytest.approx(16 / 18))
    waiting = dataclasses.replace(plan.estimate, compute_s=2.0, exposed_communication_s=5.3)
    assert binding(plan, waiting) == ("exposed communication", pytest.approx(5.3 / 7.34))


def test_a_step_that_waits_for_the_host_and_a_full_memory_are_said_under_the_headline() -> None:
    lines = plan_lines(decoding_plan())
    assert lines[0] == "llama-3.1-70b on 8 x H100-SXM-80GB"
    assert lines[1] == "decoding, 16 sequences with 8,192 tokens in the cache, bf16"
    assert lines[2].startswith("Warning: a step would wait for the host")
    said = text_of(decoding_plan())
    assert "about 180 ms in eager mode" in said
    assert "CUDA graphs" in said
    assert "no headroom: 119 MB of 85.0 GB stay free" in said
    assert "Warning: the plan was not verified" in said
    assert "bound by the host (10 x the step)" in said
    assert "Time was up" in said


def test_devices_that_repeat_work_are_counted() -> None:
    assert useful_devices(repeating_plan()) == 8
    assert "8 of 800,000 devices do all the work" in text_of(repeating_plan())
    assert "dp = 100,000 repeats the work of the other ranks" in text_of(repeating_plan())
    for plan in (fsdp_plan(), decoding_plan(), pipeline_plan(), bare_plan()):
        assert useful_devices(plan) == plan.mesh.size
        assert "repeat" not in text_of(plan)


def test_a_cluster_that_cannot_be_read_does_not_keep_a_plan_from_being_shown() -> None:
    said = text_of(dataclasses.replace(fsdp_plan(), cluster={"nodes": 2, "device": "one of ours"}))
    assert said.startswith("llama-3.1-8b on 16 devices training")
    assert "step time 7.34 s 143,000 tokens/s, 8,930 per device" in said


def test_one_device_has_nothing_to_split() -> None:
    plan = dataclasses.replace(fsdp_plan(), mesh=PlanMesh.from_mesh(MeshSpec.parse("dp=1")), cluster={})
    assert "dp = 1 has one rank" in text_of(plan)
    assert "143,000 tokens/s MFU" in text_of(plan)


def test_a_pipeline_shows_its_stages_and_that_it_is_not_run() -> None:
    said = text_of(pipeline_plan())
    assert "Warning: a pipeline cannot be run here yet" in said
    assert "pp = 2 cuts the model into 2 stages, 1f1b (PP)" in said
    assert "0 model.embed_tokens, model.layers.{0-15} 400 ms 60.0 GB" in said
    assert "bubble" in said
    assert "shardplan verify" not in said


def test_a_plan_by_hand_says_what_it_says() -> None:
    said = text_of(bare_plan())
    assert said.startswith("A model on 4 devices training, bf16, AdamW step time not priced")
    assert "bags Sharder half-and-half" in said
    assert "verified not yet" in said


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fastest_s": None, "fastest_mesh": None}, "takes less than 7.30 s."),
        ({"loses_under": "slow-communication"}, "with communication 1.3 times as slow it is slower than this one."),
        ({"status": "given"}, "Not optimised"),
        ({"bound_s": None, "gap": None}, "No bound was proven"),
    ],
)
def test_how_far_from_the_best(changes: dict[str, object], said: str) -> None:
    plan = fsdp_plan()
    assert plan.solver is not None
    assert said in text_of(dataclasses.replace(plan, solver=dataclasses.replace(plan.solver, **changes)))  # type: ignore[arg-type]


def test_days_and_price_of_a_run() -> None:
    # 128 x 8,192 tokens in 7.34 s: 1e12 tokens in 81.0 days of 16 devices.
    said = text_of(fsdp_plan(), cost=RunCost(tokens=1e12, price=2.5))
    assert "1e12 tokens 81.0 days 31,100 GPU-hours, 77,800 at 2.5 each" in said
    with pytest.raises(JobError, match="step time"):
        plan_lines(bare_plan(), cost=RunCost(tokens=1e12))


@pytest.mark.parametrize(("tokens", "price"), [(0.0, None), (float("nan"), None), (1e9, -1.0), (None, 2.5)])
def test_a_run_that_cannot_be_priced_is_refused(tokens: float | None, price: float | None) -> None:
    with pytest.raises(JobError):
        RunCost.of(tokens, price)


def test_details_hold_what_is_left_out_above() -> None:
    plan = fsdp_plan()
    short, long = text_of(plan), text_of(plan, details=True)
    for said in ("a note for people", "reduce-scatter fsdp backward 264 872 MB 701 ms", "Other meshes", "Planned in"):
        assert said in long
        assert said not in short
    assert "--details (and 1 note)" in short


@pytest.mark.parametrize("name", PLANS)
def test_print_of_a_plan_shows_what_show_does_and_the_statements_to_type_next(name: str) -> None:
    plan = PLANS[name]()
    head, _, following = str(plan).rpartition("\n\n")
    assert head == "\n".join(plan_lines(plan)).rpartition("\n\n")[0]
    assert 'plan.save("plan.json")' in following
    assert ("shard_module(model, device_mesh_for(plan), plan)" in following) == (plan.pipeline is None)
    assert all(len(line) <= 80 for line in following.splitlines())


def test_repr_of_a_plan_is_one_line() -> None:
    plan = fsdp_plan()
    assert plan.estimate is not None
    assert len(repr(plan)) < 160
    assert "\n" not in repr(plan)
    assert f"mesh {plan.mesh}" in repr(plan)
    assert f"{plan.estimate.peak_memory_bytes:,} bytes" in repr(plan)
    assert repr(bare_plan()).startswith("<ShardingPlan: ")


def test_all_weights_of_a_block_are_said_to_be_alike_only_where_no_other_row_names_one() -> None:
    names = ("mlp.up.weight", "mlp.down.weight", "norm.weight")
    mixed = {
        **{f"layers.0.{name}": R for name in names[:2]},
        **{f"layers.{{1-5}}.{name}": S0 for name in names[:2]},
        f"layers.*.{names[2]}": R,
    }
    apart = {f"layers.{{{blocks}}}.{name}": layout for blocks, layout in (("0-2", S0), ("3-5", R)) for name in names}
    lines = [
        "\n".join(layout_lines(ShardingPlan(mesh=PlanMesh.parse("fsdp=4"), plan=plan, compute_plan={})))
        for plan in (mixed, apart)
    ]
    assert "all weights" not in lines[0]
    assert "layers.0: up, down" in lines[0]
    assert "layers.{0-2} (all weights)" in lines[1]
    assert "layers.{3-5} (all weights)" in lines[1]
