"""Collectives that plans really run, compared with counts worked out by hand, on fake processes."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from support.executor_cases import (
    FP32,
    MESH,
    S0,
    Case,
    R,
    data_parallel,
    fully_sharded,
    make_batch,
    make_model,
    megatron,
)
from torch import nn
from torch.distributed.tensor import DTensor

from executor.collective_counter import CollectiveKey
from executor.torch_internals.dtensor import fake_process_group
from executor.verify import compare, observed_collectives, verify
from planner import build_plan
from planner.errors import PlanError, RunError
from planner.plan.job import Job
from planner.plan.sharding_plan import CollectiveEstimate, Estimate, Port, ShardingPlan


def counts(case: Case) -> Counter[tuple[str, str, str, int]]:
    observed = observed_collectives(make_model(case.family), case.plan, make_batch(case.family))
    return Counter({(row.phase, row.kind, row.axis, row.bytes): count for row, count in observed.items()})


def in_phase(observed: Counter[tuple[str, str, str, int]], phase: str) -> dict[tuple[str, str, int], int]:
    return {row[1:]: count for row, count in observed.items() if row[0] == phase}


def test_data_parallelism_all_reduces_the_loss_in_forward_and_gradients_once() -> None:
    observed = counts(data_parallel("mlp"))
    # Sum and count of losses, two float32, on each axis.
    assert in_phase(observed, "forward") == {("all_reduce", "dp", 8): 1, ("all_reduce", "tp", 8): 1}
    assert in_phase(observed, "backward") == {}
    reduced = {row: count for row, count in in_phase(observed, "grad_reduce").items() if row[0] == "all_reduce"}
    # Biases of fc1 [256], fc2 [64], head [16] and the weight of head [16, 64]: small ones reduce on both axes.
    for nbytes in (256 * 4, 64 * 4, 16 * 4, 16 * 64 * 4):
        assert reduced["all_reduce", "dp", nbytes] == 1


def test_parameters_outside_fsdp_groups_are_gathered_in_backward_only_where_it_needs_them() -> None:
    observed = counts(fully_sharded("mlp"))
    forward, backward = in_phase(observed, "forward"), in_phase(observed, "backward")
    # Weights of fc1 [256, 64] and fc2 [64, 256]: two gathers each, inner axis first.
    assert forward["all_gather", "tp", 256 * 64 * 2] == 2
    assert forward["all_gather", "dp", 256 * 64 * 4] == 2
    # The backward needs neither the first layer's weight, whose input has no gradient, nor biases.
    assert backward == {
        ("all_gather", "tp", 256 * 64 * 2): 1,
        ("all_gather", "dp", 256 * 64 * 4): 1,
        ("all_gather", "tp", 16 * 64 * 2): 1,
        ("all_gather", "dp", 16 * 64 * 4): 1,
    }


def test_the_megatron_layout_runs_megatrons_collectives() -> None:
    observed = counts(megatron())
    # Per layer: hidden states [4, 16, 64] gathered and reduce-scattered around attention and MLP; q, k, v share theirs.
    nbytes = 4 * 16 * 64 * 4
    # The head's input and the embedding's gradient are gathered as well.
    expected = {("all_gather", "tp", nbytes): 5, ("reduce_scatter", "tp", nbytes): 4}
    forward = in_phase(observed, "forward")
    assert forward.pop(("all_reduce", "dp", 8)) == 1
    assert forward == expected
    assert in_phase(observed, "backward") == expected


def test_a_sharded_vocabulary_reduces_maxima_and_sums() -> None:
    forward = in_phase(counts(megatron(vocabulary=True)), "forward")
    rows = 4 * 16
    assert forward["all_reduce", "tp", 4 * rows] == 1
    assert forward["all_reduce", "tp", 8 * rows] == 1
    assert forward["all_reduce", "dp", 8] == 1


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_recomputation_repeats_the_collectives_inside_the_blocks(mode: str) -> None:
    plain = counts(fully_sharded("llama"))
    checkpointed = counts(fully_sharded("llama", activation_checkpointing={"model.layers.*": mode}))
    for phase in ("forward", "grad_reduce"):
        assert in_phase(checkpointed, phase) == in_phase(plain, phase)
    recomputed = in_phase(checkpointed, "recompute")
    forward = in_phase(plain, "forward")
    # Two norms [64] in each of two blocks, and one after them.
    assert forward["all_gather", "dp", 64 * 4] == 5
    assert recomputed["all_gather", "dp", 64 * 4] == 4
    # The block's backward uses the copies of its recomputation; the last norm and the head lie outside of blocks.
    backward = in_phase(checkpointed, "backward")
    assert {row[2] for row in backward if row[1] == "dp"} == {64 * 4, 256 * 64 * 4}
    assert set(backward.values()) == {1}
    assert ("all_gather", "dp", 256 * 64 * 4) in forward
    assert ("all_gather", "dp", 256 * 64 * 4) not in recomputed


def test_parameters_are_gathered_in_the_compute_dtype_and_gradients_reduced_in_theirs() -> None:
    case = fully_sharded("mlp", job=Job(dtype="bf16", reduce_dtype="fp32"))
    observed = counts(case)
    assert in_phase(observed, "forward")["all_gather", "dp", 256 * 64 * 2] == 2
    assert in_phase(observed, "grad_reduce")["reduce_scatter", "dp", 256 * 64 * 4] == 2


def test_micro_batches_repeat_all_collectives_but_the_gradient_reduction() -> None:
    one, five = counts(fully_sharded("mlp")), counts(fully_sharded("mlp", micro_batches=5))
    for phase, times in (("forward", 5), ("backward", 5), ("grad_reduce", 1)):
        assert in_phase(five, phase) == {row: times * count for row, count in in_phase(one, phase).items()}


def test_inference_runs_the_forward_alone() -> None:
    observed = counts(fully_sharded("mlp", job=dataclasses.replace(FP32, training=False)))
    assert {row[0] for row in observed} == {"forward"}


class TwoReaders(nn.Module):
    """Two layers that read one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (self.left(hidden) + self.right(hidden)).sum()


def readers_plan(*, same_layout: bool) -> ShardingPlan:
    gathered = Port(layout=(R, R), grad=(R, R), source=(S0, R), source_grad=(S0, R))
    other = Port(layout=(R, S0), grad=(R, S0), source=(S0, R), source_grad=(S0, R))
    return ShardingPlan(
        mesh=MESH,
        job=FP32,
        plan={"*.*": (R, R)},
        input_plan={
            "input": {"x": Port(layout=(S0, R))},
            "left.input": (gathered,),
            "right.input": (gathered if same_layout else other,),
        },
        output_plan={} if same_layout else {"right": Port(layout=(R, R), source=(R, S0))},
    )


def test_readers_of_a_tensor_share_its_redistribution_to_one_layout() -> None:
    def forward(same_layout: bool) -> dict[tuple[str, str, int], int]:
        observed = observed_collectives(TwoReaders(), readers_plan(same_layout=same_layout), {"x": torch.zeros(8, 8)})
        return {(row.kind, row.axis, row.bytes): n for row, n in observed.items() if row.phase == "forward"}

    assert forward(same_layout=True) == {("all_gather", "dp", 8 * 8 * 4): 1}
    assert sum(forward(same_layout=False).values()) > 1


def estimated(plan: ShardingPlan, rows: Counter[CollectiveKey]) -> ShardingPlan:
    collectives = tuple(
        CollectiveEstimate(kind=row.kind, axis=row.axis, phase=row.phase, count=count, bytes=row.bytes, time_s=0.0)
        for row, count in rows.items()
    )
    estimate = Estimate(
        step_time_s=1,
        forward_s=1,
        backward_s=0,
        grad_reduce_s=0,
        optimizer_s=0,
        peak_memory_bytes=0,
        collectives=collectives,
    )
    return dataclasses.replace(plan, estimate=estimate)


def test_the_report_has_the_differences() -> None:
    case = data_parallel("mlp")
    model, batch = make_model("mlp"), make_batch("mlp")
    rows = observed_collectives(model, case.plan, batch)
    report = verify(model, estimated(case.plan, rows), batch)
    assert report.equal
    assert str(report).startswith("Verified: ")
    missing = next(iter(rows))
    del rows[missing]
    report = verify(model, estimated(case.plan, rows), batch)
    assert not report.equal
    (difference,) = report.differences
    assert (difference.kind, difference.axis, difference.expected) == (missing.kind, missing.axis, 0)
    assert report.to_dict()["differences"] == [dataclasses.asdict(difference)]
    assert report.to_dict()["equal"] is False
    assert "differ" in str(report)
    assert missing.kind in str(report)


def test_a_redistribution_that_dtensor_runs_by_itself_is_counted() -> None:
    plan = dataclasses.replace(readers_plan(same_layout=True), input_plan={"input": {"x": Port(layout=(S0, R))}})
    with_row_split = dataclasses.replace(plan, plan={"first.*": (R, R), "left.*": (S0, R), "right.*": (R, R)})
    observed = observed_collectives(TwoReaders(), with_row_split, {"x": torch.zeros(8, 8)})
    assert any(row.phase == "forward" and row.bytes > 8 for row in observed)


def test_verify_changes_neither_the_module_nor_the_process_group() -> None:
    model = make_model("mlp")
    observed_collectives(model, fully_sharded("mlp").plan, make_batch("mlp"))
    assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
    assert "forward" not in vars(model.fc1)
    assert not dist.is_initialized()


def test_verify_needs_a_process_group_of_the_plans_size() -> None:
    with fake_process_group(2), pytest.raises(PlanError, match="needs 4 fake processes"):
        observed_collectives(make_model("mlp"), data_parallel("mlp").plan, make_batch("mlp"))


def test_verify_needs_an_estimate() -> None:
    with pytest.raises(PlanError, match="no estimate"):
        verify(make_model("mlp"), data_parallel("mlp").plan, make_batch("mlp"))


def test_reports_on_equal_counts_are_equal() -> None:
    row = CollectiveKey(phase="forward", kind="all_reduce", axis="dp", bytes=8)
    assert compare(Counter({row: 2}), Counter({row: 2})).equal
    assert not compare(Counter({row: 2}), Counter({row: 3})).equal


class FailsInside(nn.Module):
    """A model whose inner module fails, in the forward or in the backward."""

    def __init__(self, *, in_backward: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), Failing(in_backward=in_backward)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


class Failing(nn.Module):
    def __init__(self, *, in_backward: bool) -> None:
        super().__init__()
        self.in_backward = in_backward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.in_backward:
            x.register_hook(self._fail)
            return x
        return x.relu().view(3, 3, 3)

    def _fail(self, gradient: torch.Tensor) -> None:
        raise ValueError("no gradient\nfor a reason that takes many lines")


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_run_that_fails_says_where_in_one_line(in_backward: bool) -> None:
    plan = ShardingPlan(
        mesh=MESH, job=FP32, plan={"layers.0.*": (R, R)}, input_plan={"input": {"x": Port(layout=(S0, R))}}
    )
    with pytest.raises(RunError) as raised:
        observed_collectives(FailsInside(in_backward=in_backward), plan, {"x": torch.zeros(8, 8)})
    message = raised.value.detail
    assert "\n" not in message
    assert raised.value.exit_code == 4
    assert raised.value.__cause__ is not None
    assert not dist.is_initialized()
    if in_backward:
        assert "the backward fails" in message
        assert message.endswith("ValueError: no gradient")
    else:
        assert raised.value.module == "layers.1"
        assert "layers.1 (Failing) fails, at aten." in message
        assert "view" in str(raised.value.op)


def test_inputs_of_a_whole_step_are_refused_where_it_has_micro_batches() -> None:
    module = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    whole = torch.randn(8, 16)
    plan = build_plan(module, example_inputs=(whole,), cluster="1x2xtoy", mesh="dp=2", dtype="fp32", micro_batches=2)
    with pytest.raises(PlanError, match=r"8 samples, which are those of a step; a micro-batch has 4.*of 4 samples"):
        verify(module, plan, (whole,))
    assert verify(module, plan, (whole[:4],)).equal
