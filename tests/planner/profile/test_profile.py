"""Profiles of ops: FLOPs against torch's counter on the module, bytes and saved tensors by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from support import families
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from planner.errors import ModelError
from planner.graph.capture import to_meta
from planner.graph.example_inputs import meta_inputs
from planner.graph.from_fx import trace
from planner.profile.op_formulas import FLASH_BACKWARD_FLOPS
from planner.profile.profile import profile_graph


@pytest.mark.parametrize("family", [*families.FAMILIES, *families.WITH_EXPERTS])
def test_flops_equal_torchs_own_count(family: str) -> None:
    module, kwargs = families.make(family, 4, "cpu")
    if family in families.WITH_EXPERTS:
        module.set_experts_implementation("eager")  # torch's counter does not count grouped GEMMs
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = module(**kwargs)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        with FlopCounterMode(display=False) as backward:
            loss.backward()
    profile = profile_graph(trace(to_meta(module, None), meta_inputs(kwargs)), flash_attention=False)
    assert sum(op.flops for op in profile.ops.values()) == forward.get_total_flops() > 0
    assert sum(op.backward_flops for op in profile.ops.values()) == backward.get_total_flops() > 0


def test_flash_attention_saves_a_float_per_row_and_math_attention_its_scores() -> None:
    module, kwargs = families.make("llama", 4)
    graph = trace(to_meta(module, None), meta_inputs(kwargs))
    math, flash = (profile_graph(graph, flash_attention=flag) for flag in (False, True))
    name = next(op.name for op in graph.ops if "scaled_dot_product" in op.target_name)
    scores = 4 * 8 * 16 * 16 * 4
    assert math.ops[name].saved_extra_nbytes >= scores
    assert flash.ops[name].saved_extra_nbytes == 4 * 8 * 16 * 4
    assert flash.ops[name].flops == math.ops[name].flops == 4 * 4 * 8 * 16 * 16 * 8
    assert flash.ops[name].backward_flops == FLASH_BACKWARD_FLOPS * flash.ops[name].flops
    assert math.ops[name].backward_flops == 2 * math.ops[name].flops


def test_a_linear_saves_its_input_and_a_view_moves_no_bytes() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(8, 4, bias=False), torch.nn.Flatten(0))
    graph = trace(to_meta(module, None), meta_inputs((torch.zeros(6, 8),)))
    profile = profile_graph(graph, flash_attention=False)
    linear, view = (profile.ops[op.name] for op in graph.ops)
    assert linear.flops == linear.backward_flops == 2 * 6 * 8 * 4  # the input needs no gradient: one GEMM
    assert linear.nbytes == 4 * (6 * 8 + 8 * 4 + 6 * 4)
    assert linear.saved == (graph.ops[0].inputs[0],)
    assert (view.flops, view.nbytes, view.backward_nbytes) == (0, 0, 0)
    assert profile.root[graph.ops[1].outputs[0]] == graph.ops[0].outputs[0]


class Split(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.both = torch.nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = self.both(x).split([4, 8], -1)
        return (one.sum(-1) * two.sum(-1)).sum()


def test_gradients_of_views_are_written_into_one_tensor() -> None:
    graph = trace(to_meta(Split(), None), meta_inputs((torch.zeros(6, 8),)))
    profile = profile_graph(graph, flash_attention=False)
    split = next(profile.ops[op.name] for op in graph.ops if len(op.outputs) == 2)
    assert (split.nbytes, split.backward_nbytes) == (0, 2 * 4 * 6 * 12)


class _Count(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def test_dispatched_ops_are_those_that_torch_dispatches() -> None:
    module, kwargs = families.make("mlp", 4, "cpu")
    with _Count() as count:
        torch.autograd.grad(module(**kwargs), list(module.parameters()))
    ops = profile_graph(trace(to_meta(module, None), meta_inputs(kwargs)), flash_attention=False).ops.values()
    dispatched = sum(op.forward_dispatched.ops + op.backward_dispatched.ops + len(op.autograd_sums) for op in ops)
    assert dispatched == count.ops - 1  # the gradient of the loss is created outside of all ops


def test_dispatched_bytes_by_hand_and_the_sum_of_two_uses_gradients() -> None:
    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scaled = x * self.weight
            return scaled[:, :4] + scaled[:, 4:]

    graph = trace(to_meta(Twice(), None), meta_inputs((torch.zeros(6, 8),)))
    profiles = profile_graph(graph, flash_attention=False).ops
    by_name = {op.target_name: profiles[op.name] for op in graph.ops}
    multiplication, view = by_name["aten.mul.Tensor"], by_name["aten.slice.Tensor"]
    assert multiplication.forward_dispatched == (1, 4 * (48 + 8 + 48))
    assert view.forward_dispatched == (1, 0)
    assert view.backward_dispatched.nbytes >= 4 * 48  # zeros of the unsliced tensor
    assert sorted(op.autograd_sums for op in profiles.values()) == [(), (), (), (0,)]


def test_shared_input_linears_accumulate_the_gradient_in_their_gemms() -> None:
    """Of n linear layers that read a tensor, n - 1 add to its gradient in their GEMM; autograd adds all other uses."""
    module, kwargs = families.make("llama", 4)
    graph = trace(to_meta(module, None), meta_inputs(kwargs))
    separate, shared = (
        profile_graph(graph, flash_attention=False, shared_input_linears=flag).ops for flag in (False, True)
    )
    names = {op.name: graph.calls[op.call].fqn.rpartition(".")[2] for op in graph.ops}
    assert {names[op] for op in shared if shared[op].gemm_sums} == {"q_proj", "k_proj", "gate_proj"}
    assert sum(len(op.gemm_sums) for op in shared.values()) == 2 * 3  # layers
    assert all(op.gemm_sums == op.in_place for op in shared.values())
    assert not any(op.gemm_sums for op in separate.values())
    fewer = Counter({names[op]: len(separate[op].autograd_sums) - len(shared[op].autograd_sums) for op in shared})
    assert +fewer == Counter({"k_proj": 1, "v_proj": 1, "up_proj": 1})


class _Mixed(torch.nn.Module):
    """Reads a tensor by linear layers and by other ops."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (torch.nn.Linear(8, 8) for _ in range(3))
        self.weight = torch.nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        read = x * self.weight
        return self.first(read) + read.exp() + self.second(read) + self.third(read.sin()) + self.third(x)


def test_autograd_adds_uses_between_shared_input_linears() -> None:
    """Their gradients are live then, so that no GEMM adds in place. Linears on a model input accumulate nothing."""
    graph = trace(to_meta(_Mixed(), None), meta_inputs((torch.zeros(6, 8),)))
    profiles = profile_graph(graph, flash_attention=False, shared_input_linears=True).ops
    names = {graph.calls[op.call].fqn or op.target_name: profiles[op.name] for op in graph.ops}
    assert {
        name: (op.gemm_sums, op.autograd_sums) for name, op in names.items() if op.gemm_sums or 0 in op.autograd_sums
    } == {
        "first": ((0,), ()),
        "aten.exp.default": ((), (0,)),
        "aten.sin.default": ((), (0,)),
    }
    assert not any(op.in_place for op in profiles.values())


class WrongDropout(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, dropout_p=7.0).sum()


def test_an_op_that_a_trace_takes_and_torch_does_not_run_is_named() -> None:
    module = nn.Sequential(WrongDropout())
    graph = trace(module, meta_inputs((torch.empty(2, 2, 4, 8, device="meta"),)))
    with pytest.raises(ModelError, match=r"scaled_dot_product_attention.* in 0 does not run: .* got 7") as refused:
        profile_graph(graph, flash_attention=False)
    assert refused.value.module == "0"
