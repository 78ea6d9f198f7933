"""Models with experts: what is traced of them, what the op of experts takes, and how its parameters may lie."""

from __future__ import annotations

import pytest
import torch
import transformers
from support import families
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from api.requests.model_registry import load_model
from executor.verify import verify
from planner import build_plan
from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.graph.op_graph import OpGraph, Value, at_batch
from planner.graph.trace_module import trace_module
from planner.model_rewrites.experts.experts_op import (
    OP_NAME,
    OWN_ACTIVATION,
    ExpertsArguments,
    ExpertsForm,
)
from planner.model_rewrites.experts.modules import experts_form, experts_in
from planner.model_rewrites.experts.placements import gate_up_placement
from planner.model_rewrites.experts.work import ExpertsWork
from planner.pricing.storage_options import stored_layouts
from planner.profile.profile import profile_graph
from planner.regions.regions import build_regions

SEQ = 4096


def traced(family: str) -> tuple[nn.Module, OpGraph]:
    module, inputs = families.make(family, 4)
    return module, trace(to_meta(module, None), meta_inputs(inputs))


@pytest.mark.parametrize(("family", "blocks"), [("mixtral", 2), ("deepseek", 2)])
def test_experts_are_one_op_and_keep_their_parameters_names(family: str, blocks: int) -> None:
    module, graph = traced(family)
    found = [op for op in graph.ops if op.target_name == OP_NAME]
    assert [ExpertsArguments(*op.args).activation for op in found] == ["silu"] * blocks
    named = {name for names in graph.parameters.values() for name in names}
    assert named == {name for name, _ in module.named_parameters()}
    assert all("forward" not in vars(part) for part in module.modules()), "the module itself is left as it was"
    assert all("expand_kv" not in vars(part) for part in module.modules())


def test_equal_blocks_with_experts_are_one_class_and_dense_ones_another() -> None:
    _, graph = traced("deepseek")
    members = {c.pattern: len(c.members) for c in build_regions(graph).classes}
    assert members["model.layers.*.mlp.experts"] == members["model.layers.*.mlp.shared_experts.down_proj"] == 2
    assert members["model.layers.*.mlp.down_proj"] == 1, "the first block is dense"


@pytest.mark.parametrize(("preset", "parameters", "active"), [("mixtral-8x7b", 46_702_792_704, 12_879_925_248)])
def test_flops_are_those_of_the_active_parameters(preset: str, parameters: int, active: int) -> None:
    """Six for each parameter that a token meets (the table of embeddings is looked up), and attention."""
    module = load_model(preset, seq=SEQ).module
    found = trace_module(module, batch=2, seq=SEQ)
    graph = at_batch(found.graph, found.traced_batch, 1)
    assert sum(value.nbytes for value in graph.values.values() if value.kind == "parameter") == 2 * parameters
    ops = profile_graph(graph, flash_attention=True).ops
    attention = [ops[op.name] for op in graph.ops if op.target_name.startswith("aten.scaled_dot_product")]
    embeddings = module.get_input_embeddings().weight.numel()
    by_hand = 6 * (active - embeddings) * SEQ + sum(op.flops + op.backward_flops for op in attention)
    assert sum(op.flops + op.backward_flops for op in ops.values()) == pytest.approx(by_hand, rel=1e-4)


def test_work_of_a_rank_by_hand() -> None:
    shapes = [(16, 8), (16, 2), (16, 2), (2, 12, 8), (2, 8, 6)]
    work = ExpertsWork.from_shapes(ExpertsForm("silu"), shapes, all_experts=4, itemsize=2)
    assert work.rows == 16 * 2 // 2
    assert work.flops == 2 * 16 * (8 * 12 + 6 * 8)
    assert work.backward_flops(hidden=True, gate_up=True, down=True) == 2 * work.flops
    assert work.saved_nbytes == 16 * (12 * 2 + 8)


def test_parameters_that_are_computed_in_a_strided_shard_rest_in_it() -> None:
    gate_up = gate_up_placement(ExpertsForm("silu"))
    value = Value(name="up", shape=(4, 32, 8), dtype=torch.float32, kind="parameter", requires_grad=True)
    replicated = (Replicate(), Replicate())
    plain = set(stored_layouts(value, (2, 2), [replicated]))
    strided = set(stored_layouts(value, (2, 2), [replicated, (Replicate(), gate_up)]))
    assert strided - plain == {
        (a, b)
        for a in (Replicate(), Shard(0), Shard(2), gate_up)
        for b in (Replicate(), Shard(0), Shard(2), gate_up)
        if (a == gate_up) != (b == gate_up)
    }


def test_other_experts_are_left_alone() -> None:
    module, _ = families.make("mixtral", 4)
    (first, form), *_ = experts_in(module)
    assert form == ExpertsForm("silu")
    first.act_fn = nn.Tanh()
    assert experts_form(first) == ExpertsForm(OWN_ACTIVATION)
    first.act_fn = nn.Softmax(-1)
    assert experts_form(first) is None, "it mixes the elements of a row"
    first.act_fn = nn.BatchNorm1d(4, affine=False, track_running_stats=False)
    assert experts_form(first) is None, "it mixes rows"
    first.act_fn = nn.ReLU(inplace=True)
    assert experts_form(first) is None, "it writes to what the backward reads"
    first.act_fn, first._apply_gate = nn.Identity(), lambda rows: rows.chunk(2, -1)[0]
    assert experts_form(first) is None, "its result is part of its input"
    assert experts_form(nn.Linear(2, 2)) is None


def test_shapes_that_do_not_go_together_are_refused() -> None:
    def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    index = meta(16, 2, dtype=torch.long)
    *form, costs = ExpertsForm("silu")
    options = (*form, list(costs))
    good = (meta(16, 8), index, meta(16, 2), meta(4, 12, 8), meta(4, 8, 6), None, None)
    assert torch.ops.shardplan.experts(*good, *options).shape == (16, 8)
    for position, wrong in (
        (0, meta(16, 4)),
        (2, meta(16, 3)),
        (3, meta(4, 10, 8)),
        (4, meta(0, 8, 6)),
        (5, meta(4, 12)),
    ):
        given = list(good)
        given[position] = wrong
        with pytest.raises(RuntimeError):
            torch.ops.shardplan.experts(*given, *options)
    with pytest.raises(RuntimeError, match="activation"):
        torch.ops.shardplan.experts(*good, "sine", *options[1:])


class CalledTwice(nn.Module):
    """A block with experts that is called twice, so that gradients of its weights add up."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=4)
        self.block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock(config)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x)).square().mean()


@pytest.mark.parametrize("planner", ["ilp", "random:0", "random:1"])
def test_experts_that_are_called_twice_are_planned(planner: str) -> None:
    inputs = torch.randn(8, 16, 32)
    options = {"cluster": "2x2xtoy", "mesh": "dp=2,tp=2", "dtype": "fp32", "micro_batches": 1}
    plan = build_plan(CalledTwice(), example_inputs=(inputs,), planner=planner, **options)
    assert verify(CalledTwice(), plan, (inputs,)).equal
