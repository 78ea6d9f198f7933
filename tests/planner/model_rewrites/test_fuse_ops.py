"""Fused ops take the place of a module's own code only where that does the same, and nowhere else."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from support.executor_cases import make_batch, make_model
from support.families import make
from support.graphs import canonical
from torch import nn

from cost_model import ClusterSpec
from planner import PlanningSession, estimate_plan
from planner.errors import JobError
from planner.graph.trace_module import trace_module
from planner.model_rewrites import fused_kernels
from planner.model_rewrites.fuse_ops import FusedOps, fuse_ops
from planner.plan.sharding_plan import ShardingPlan
from planner.pricing.op_times import LocalOp, OpTimes
from planner.profile.profile import profile_graph
from planner.wire.codec import read_graph, write_graph


class Calls:
    """The formulas, on plain tensors, counted."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.ops = FusedOps(
            rms_norm=functools.partial(self._call, fused_kernels.RMS_NORM),
            gated=functools.partial(self._call, fused_kernels.GATED),
            gated_pairs=functools.partial(self._call, fused_kernels.GATED_PAIRS),
            rotary=functools.partial(self._call, fused_kernels.ROTARY),
            cross_entropy=functools.partial(self._call, fused_kernels.CROSS_ENTROPY),
        )

    def _call(self, name: str, *args: Any) -> torch.Tensor:
        self.counts[name.split(".")[1]] += 1
        return fused_kernels.run_forward(name, args)[0]


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"rms_norm": 5, "gated": 2, "rotary": 4, "cross_entropy": 1}),
        ("mixtral", {"rms_norm": 5, "rotary": 4, "cross_entropy": 1}),  # its experts are another op
        ("deepseek", {"rms_norm": 13, "gated": 3, "cross_entropy": 1}),  # it turns neighbours, not halves
        ("gpt2", {"cross_entropy": 1}),
        ("bert", {}),
        ("vit", {}),
        ("t5", {"rms_norm": 12}),
    ],
)
def test_what_is_fused_gives_the_models_own_numbers(family: str, expected: dict[str, int]) -> None:
    model, batch, calls = make_model(family).eval(), make_batch(family), Calls()
    own = model(**batch)
    fuse_ops(model, calls.ops)
    found = model(**batch)
    assert calls.counts == Counter(expected)
    assert torch.equal(found.logits, own.logits)
    torch.testing.assert_close(found.loss, own.loss, rtol=1e-6, atol=1e-6)


def test_only_the_module_at_hand_changes() -> None:
    model, other, batch = make_model("llama"), make_model("llama"), make_batch("llama")
    calls = Calls()
    fuse_ops(model, calls.ops)
    other(**batch)
    assert not calls.counts
    model(**batch)
    assert calls.counts


def test_what_a_sharder_made_keeps_its_code() -> None:
    model, calls = make_model("llama").eval(), Calls()
    fuse_ops(model, calls.ops, opaque=[model.model.layers[0]])
    model(**make_batch("llama"))
    assert calls.counts == Counter({"rms_norm": 3, "gated": 1, "rotary": 2, "cross_entropy": 1})


def test_a_forward_that_somebody_else_put_there_stays() -> None:
    model, calls = make_model("llama").eval(), Calls()
    theirs = model.model.norm.forward
    model.model.norm.forward = lambda x: 2 * theirs(x)
    batch = make_batch("llama")
    own = model(**batch).logits
    fuse_ops(model, calls.ops)
    assert torch.equal(model(**batch).logits, own)
    assert calls.counts["rms_norm"] == 4


def test_norms_that_scale_otherwise_keep_their_code() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256, "head_dim": 8}
    config = transformers.Gemma2Config(**sizes, num_attention_heads=8, num_key_value_heads=4)
    calls, batch = Calls(), make_batch("llama")
    model = transformers.Gemma2ForCausalLM(config).eval()
    own = model(**batch).logits
    fuse_ops(model, calls.ops)
    assert torch.equal(model(**batch).logits, own)
    assert "rms_norm" not in calls.counts  # Gemma multiplies by 1 + weight
    assert calls.counts["gated"] == 1


class OddMLP(nn.Module):
    """Has the names of a gated MLP, and gates the other factor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class UsualMLP(OddMLP):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(hidden)) * self.up_proj(hidden))


@pytest.mark.parametrize(
    ("kind", "activation", "calls_op"),
    [
        (OddMLP, nn.SiLU(), False),
        (UsualMLP, nn.SiLU(), True),
        (UsualMLP, nn.GELU(), True),
        (UsualMLP, nn.GELU(approximate="tanh"), True),
        (UsualMLP, nn.ReLU(), False),
    ],
)
def test_an_mlp_is_known_by_what_it_computes(kind: type[nn.Module], activation: nn.Module, calls_op: bool) -> None:
    module, calls, x = kind(), Calls(), torch.randn(3, 8)
    module.act_fn = activation
    own = module(x)
    fuse_ops(module, calls.ops)
    torch.testing.assert_close(module(x), own)
    assert bool(calls.counts) is calls_op


def test_a_norm_of_another_kind_keeps_its_code() -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.randn(8)), 1e-6

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, (8,), self.weight, eps=self.eps)

    calls, module = Calls(), Centred()
    fuse_ops(module, calls.ops)(torch.randn(2, 8))
    assert not calls.counts


# --- planning ---


def session_of(cluster: str, fused_ops: bool, **options: Any) -> PlanningSession:
    module, inputs = make("llama", 8)
    return PlanningSession(module, cluster=cluster, example_inputs=inputs, fused_ops=fused_ops, **options)


def test_a_fused_model_takes_less_memory_and_time_on_a_gpu() -> None:
    own, fused = (
        session_of("1x4xh100-sxm-80gb", fused, micro_batches=1, ac="none").plan(mesh="dp=4").estimate
        for fused in (False, True)
    )
    assert own is not None
    assert fused is not None
    assert fused.compute_s < own.compute_s
    assert fused.memory["activations"] < own.memory["activations"]


def test_a_device_that_waits_for_its_host_moves_the_bytes_of_compiled_ops_too() -> None:
    """There all that is dispatched is charged: a hundredth of the bandwidth makes a hundred times the streaming."""
    gpu = ClusterSpec.parse("1x2xh100-sxm-80gb")
    found = []
    for bandwidth in (1.0, 0.01):
        bytes_per_s = gpu.device.memory_bandwidth_bytes_per_s * bandwidth
        device = dataclasses.replace(gpu.device, host_op_s=1e-5, memory_bandwidth_bytes_per_s=bytes_per_s)
        times = OpTimes(device, flash_attention=True)
        module, inputs = make("llama", 8)
        graph = trace_module(module, example_inputs=inputs, micro_batches=1, fused_ops=True).graph
        op = next(op for op in graph.ops if op.target_name == fused_kernels.GATED)
        values, output = [graph.values[name] for name in op.inputs], graph.values[op.outputs[0]]
        known = profile_graph(graph, flash_attention=True).ops[op.name]
        time = times.op_time(LocalOp(op, values, output, [value.shape for value in values], output.shape, known))
        host_s = 1e-5 * known.forward_dispatched.ops
        found.append(time.forward_s - host_s)
    assert found[0] > 0
    assert found[1] == pytest.approx(100 * found[0], rel=1e-6)


@pytest.mark.parametrize("planner", ["ilp", "random:3"])
def test_the_estimator_prices_a_written_plan_as_it_was_priced(planner: str) -> None:
    module, inputs = make("llama", 8)
    plan = session_of("1x4xh100-sxm-80gb", True, ac="none").plan(planner=planner, mesh="dp=2,tp=2")
    read = ShardingPlan.from_dict(plan.to_dict())
    assert read.job.fused_ops
    again = estimate_plan(module, read, example_inputs=inputs).estimate
    assert again.step_time_s == pytest.approx(plan.estimate.step_time_s, rel=1e-9)
    assert again.peak_memory_bytes == pytest.approx(plan.estimate.peak_memory_bytes, rel=1e-9)


def test_a_plan_that_is_edited_to_run_unfused_no_longer_says_otherwise() -> None:
    module, inputs = make("llama", 8)
    plan = session_of("1x4xh100-sxm-80gb", True, ac="none").plan(planner="fully-sharded", mesh="dp=4")
    unfused = dataclasses.replace(plan, job=dataclasses.replace(plan.job, fused_ops=False))
    assert not any("fused_ops" in note for note in estimate_plan(module, unfused, example_inputs=inputs).notes)


def test_a_model_without_such_parts_says_so() -> None:
    module, inputs = make("bert", 8)
    plan = PlanningSession(module, cluster="4xtoy", example_inputs=inputs, fused_ops=True).plan(mesh="dp=4")
    assert any("no module was replaced by a fused op" in note for note in plan.notes)


def test_a_folded_trace_is_the_full_one(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=7, num_attention_heads=8, vocab_size=256
    )
    with torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    inputs = make("llama", 8)[1]
    folded = trace_module(copy.deepcopy(module), example_inputs=inputs, fused_ops=True).graph
    monkeypatch.setattr("planner.graph.from_fx.find_repeated_blocks", lambda module, inputs: ())
    full = trace_module(module, example_inputs=inputs, fused_ops=True).graph
    assert canonical(folded) == canonical(full)
    assert sum(op.target_name == fused_kernels.GATED for op in full.ops) == 7


def test_a_graph_with_fused_ops_goes_over_the_wire() -> None:
    module, inputs = make("llama", 8)
    traced = trace_module(module, example_inputs=inputs, fused_ops=True)
    read = read_graph(write_graph(traced))
    assert read.fused_ops
    assert canonical(read.graph) == canonical(traced.graph)


@pytest.mark.parametrize("fused_ops", [False, True])
def test_a_graph_traced_for_another_job_is_refused(fused_ops: bool) -> None:
    module, inputs = make("llama", 8)
    traced = trace_module(module, example_inputs=inputs, fused_ops=not fused_ops)
    with pytest.raises(JobError, match=r"fused ops"):
        PlanningSession(traced, cluster="4xtoy", fused_ops=fused_ops)
